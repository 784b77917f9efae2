"""Boards of chosen votes of the database: what the page, the API and the command line can ask for."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta

import numpy as np
import pytest

from app.errors import BadInput
from app.leaderboard import boards
from app.leaderboard.votes import Selection, Voted, Votes, chosen, prepared
from db import queries
from tests.db.rows import NOW, add_battle, add_models, add_visitor


class Arena:
    def __init__(self, database):
        self.database = database
        with database.session() as session:
            self.ids = add_models(session, "ant", "bee", "cat")
            self.visitors = [add_visitor(session) for _ in range(3)]

    def vote(self, a: int, b: int, kind: str, *, prompt="Why?", texts=("one", "two"), days_ago=0, visitor=0):
        moment = NOW - timedelta(days=days_ago)
        with self.database.session() as session:
            battle = add_battle(session, self.visitors[visitor], (self.ids[a], self.ids[b]), moment, prompt=prompt)
            for (_, side), answer in queries.current_answers(session, battle.id).items():
                queries.end_answer(session, answer.id, "done", text=texts["ab".index(side)], finish_reason="stop")
            queries.make_votable(session, battle.id, moment)
            return queries.cast_vote(
                session, battle_id=battle.id, visitor_id=self.visitors[visitor], kind=kind, now=moment
            ).id

    def sheet(self, **choice):
        return boards.sheet(self.database, Selection(**choice))


@pytest.fixture
def arena(database) -> Arena:
    arena = Arena(database)
    for i in range(6):
        arena.vote(0, 1, "a", prompt="```x = 1```", days_ago=10, visitor=i % 3)
        arena.vote(1, 2, "both_bad" if i else "a", prompt="What is the time of day?", visitor=i % 3)
    return arena


def test_sheet_of_all_votes_is_the_board_itself(arena):
    whole = arena.sheet()
    assert whole.board == boards.board(arena.database)
    assert (whole.board.votes, whole.board.both_bad, whole.all_votes) == (12, 5, 12)
    names = [row.model for row in whole.board.rows]
    ant, bee = names.index("ant"), names.index("bee")
    assert (whole.meetings[ant][bee].votes, whole.meetings[ant][bee].score) == (6, 6)
    assert whole.meetings[ant][names.index("cat")] is None
    assert len(whole.history) > 1 and whole.history[-1][1].keys() == {"ant", "bee", "cat"}


def test_category_and_days_choose_votes(arena):
    assert {row.model for row in arena.sheet(category="code").board.rows} == {"ant", "bee"}
    assert arena.sheet(category="english").board.votes == 6
    day = (NOW - timedelta(days=1)).date()
    assert {row.model for row in arena.sheet(since=day).board.rows} == {"bee", "cat"}
    assert {row.model for row in arena.sheet(until=day).board.rows} == {"ant", "bee"}
    assert arena.sheet(category="chinese").board.rows == ()


def test_chosen_board_carries_the_hash_of_all_its_input(arena):
    assert arena.sheet(category="code").board.input_sha256 == arena.sheet().board.input_sha256 != ""


def test_days_at_the_end_of_the_calendar_choose_votes_too(arena):
    assert arena.sheet(since=date.min, until=date.max).board.votes == 12


def test_sheet_follows_votes_and_recounts(arena):
    arena.sheet(category="code")
    last = arena.vote(0, 1, "b", prompt="```y```")
    assert arena.sheet(category="code").board.votes == 7
    with arena.database.session() as session:
        vote = session.get(queries.Vote, last)
        queries.decide(session, [vote], False, "quarantine", "test", NOW)
    assert arena.sheet(category="code").board.votes == 6


def test_visitors_cluster_and_chances_weigh(arena):
    clustered, plain = (arena.sheet(cluster=c, until=NOW.date()).board for c in (True, False))
    assert clustered.clustered and not plain.clustered
    assert clustered.rows[0].rating == plain.rows[0].rating
    weighed = arena.sheet(propensity=True).board
    assert [row.rating for row in weighed.rows] == pytest.approx([row.rating for row in arena.sheet().board.rows])


def test_chance_of_a_pair_weighs_its_votes():
    votes = Votes.of([Voted("ant", "bee", "a", pair_probability=p) for p in (0.1, 0.3)])
    assert prepared(votes, Selection(propensity=True)).weight == pytest.approx([1.5, 0.5])
    with pytest.raises(BadInput, match="not every vote"):
        prepared(Votes.of([Voted("ant", "bee", "a")]), Selection(propensity=True))


def test_models_with_few_votes_are_left_out_until_none_is_left_with_few():
    pairs = [("ant", "bee")] * 5 + [("bee", "cat")] * 2 + [("cat", "dog")]
    some = chosen(Votes.of([Voted(a, b, "a") for a, b in pairs]), Selection(min_votes=3))
    assert set(some.games.models) == {"ant", "bee"} and len(some) == 5


SELECTION = Selection("davidson", "bootstrap", "code", True, True, False, True, date(2026, 1, 2), date(2026, 2, 3), 7)


@pytest.mark.parametrize("selection", [Selection(), SELECTION, replace(Selection(), cluster=True)])
def test_permalink_says_the_whole_selection(selection):
    assert Selection.of_query(selection.as_query()) == selection
    assert Selection.of_query({"lang": "zh", "part": "x"}) == Selection()


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ({"category": "x"}, "no category"),
        ({"method": "x"}, "no rating method"),
        ({"since": "yesterday"}, "is no day"),
        ({"since": "2026-02-01", "until": "2026-01-01"}, "no time at all"),
        ({"style": "yes"}, "neither 0 nor 1"),
        ({"min_votes": "-3"}, "no number of votes"),
        ({"method": "elo", "style": "1"}, "cannot hold style"),
        ({"method": "elo", "propensity": "1"}, "cannot weigh"),
        ({"ci": "bootstrap", "cluster": "1"}, "only sandwich"),
    ],
)
def test_selection_that_there_is_not_says_why(query, why):
    with pytest.raises(BadInput, match=why):
        Selection.of_query(query)


def test_flags_of_a_selection_are_those_that_the_command_takes():
    from app.cli import build_parser

    args = build_parser().parse_args(["leaderboard", *SELECTION.as_flags()])
    assert {name: getattr(args, name) for name in SELECTION.__dataclass_fields__} == SELECTION.__dict__
    assert np.isfinite(args.min_votes)
