"""The leaderboard of the database: Elo vote by vote, boards from the cache, all of it replayable."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from sqlalchemy import delete, select

from app.leaderboard import boards
from app.ratings import METHODS, Board, rate
from app.ratings.elo import START
from app.votes.formats import any_csv
from db import queries
from db.connect import Database
from db.errors import DatabaseUnavailable
from db.tables import Model, Rating
from db.vote_kinds import VOTE_KINDS
from tests.db.rows import NOW, add_models, add_visitor, add_votable_battle, later

NAMES = ("ant", "bee", "cat", "dog")


class Arena:
    """A database with models, where votes are cast as the web process casts them."""

    def __init__(self, database: Database):
        self.database = database
        with database.session() as session:
            self.models = dict(zip(NAMES, add_models(session, *NAMES), strict=True))
            self.visitor_id = add_visitor(session)

    def vote(self, a: str, b: str, kind: str, *, counted: bool = True) -> None:
        with self.database.session() as session:
            battle = add_votable_battle(session, self.visitor_id, (self.models[a], self.models[b]))
            vote = queries.cast_vote(session, battle_id=battle.id, visitor_id=self.visitor_id, kind=kind, now=NOW)
            if counted:
                boards.count_vote(session, vote, NOW)

    def vote_often(self, times: int, seed: int = 0) -> None:
        chance = random.Random(seed)
        for _ in range(times):
            self.vote(*chance.sample(NAMES, 2), chance.choice(list(VOTE_KINDS)))

    def board(self, **options) -> Board:
        return boards.board(self.database, clock=lambda: later(60), **options)

    def live_elo(self) -> dict[str, float]:
        with self.database.session(read_only=True) as session:
            return {name: rating.elo for name, rating in queries.cached_ratings(session, *boards.LIVE_ELO)}

    def clear_cache(self) -> None:
        with self.database.session() as session:
            session.execute(delete(Rating))


@pytest.fixture
def arena(database) -> Arena:
    return Arena(database)


def test_arena_without_votes_has_an_empty_board(arena):
    assert arena.board().rows == ()


def test_first_vote_shows_on_the_board(arena):
    arena.vote("bee", "ant", "b")
    board = arena.board()
    assert [(row.model, row.votes, row.wins, row.elo) for row in board.rows] == [
        ("ant", 1, 1, 1002),
        ("bee", 1, 0, 998),
    ]
    assert board.votes == 1


@pytest.mark.parametrize("kind", VOTE_KINDS)
def test_every_kind_of_vote_counts_as_its_score_says(arena, kind):
    arena.vote("ant", "bee", kind)
    points = 4 * (VOTE_KINDS[kind].score_a - 0.5)
    assert arena.live_elo() == {"ant": START + points, "bee": START - points}
    wins = {row.model: row.wins for row in arena.board().rows}
    assert wins == {"ant": int(kind == "a"), "bee": int(kind == "b")}


def test_elo_kept_vote_by_vote_is_the_elo_of_a_replay_to_the_bit(arena):
    arena.vote_often(60)
    kept = arena.live_elo()
    arena.clear_cache()
    assert {row.model: row.elo for row in arena.board().rows} == kept == arena.live_elo()


def test_elo_that_missed_a_vote_waits_and_is_put_right_by_the_next_board(arena):
    arena.vote("ant", "bee", "a")
    arena.vote("ant", "bee", "a", counted=False)
    before = arena.live_elo()
    arena.vote("cat", "bee", "a")
    assert arena.live_elo() == before, "it does not go on from where a vote is missing"
    arena.board()
    arena.vote("ant", "dog", "tie")
    kept = arena.live_elo()
    arena.clear_cache()
    assert {row.model: row.elo for row in arena.board().rows} == kept


@pytest.mark.parametrize("method", METHODS)
def test_cached_board_is_the_board_computed(arena, method, monkeypatch):
    arena.vote_often(30)
    for ci in METHODS[method].intervals:
        computed = arena.board(method=method, ci=ci)
        with monkeypatch.context() as patch:
            patch.setattr(boards, "rate", lambda *args, **kwargs: pytest.fail("computed again"))
            assert arena.board(method=method, ci=ci) == computed
        arena.clear_cache()
        assert arena.board(method=method, ci=ci) == computed


def test_cache_outlives_the_process(arena, connect, monkeypatch):
    arena.vote_often(10)
    computed = arena.board()
    monkeypatch.setattr(boards, "rate", lambda *args, **kwargs: pytest.fail("computed again"))
    assert boards.board(connect()) == computed


def test_many_who_ask_at_once_wait_for_one_computation(arena, monkeypatch):
    arena.vote_often(10)
    computed = []
    monkeypatch.setattr(boards, "rate", lambda *args, **kwargs: computed.append(1) or rate(*args, **kwargs))
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: arena.board(), range(8)))
    assert len(set(made)) == 1 and len(computed) == 1


def test_next_vote_makes_the_board_anew(arena):
    arena.vote_often(10)
    before = arena.board()
    arena.vote("ant", "bee", "a")
    assert arena.board().votes == before.votes + 1
    assert arena.board().input_sha256 != before.input_sha256


def test_board_of_another_version_is_made_anew(arena, monkeypatch):
    arena.vote_often(10)
    arena.board()
    monkeypatch.setattr(boards, "VERSION", "99")
    assert arena.board().version == "99"


def test_islands_and_prior_come_back_from_the_cache(arena):
    arena.vote("ant", "bee", "a")
    arena.vote("cat", "dog", "b")
    computed = arena.board()
    assert computed.islands == (("ant", "bee"), ("cat", "dog")) and computed.prior_weight
    assert arena.board() == computed


def test_retired_model_keeps_its_place(arena):
    arena.vote_often(20)
    before = arena.board()
    with arena.database.session() as session:
        queries.retire_model(session, "ant", NOW)
    arena.clear_cache()
    assert arena.board() == before


def test_model_without_votes_is_not_on_the_board(arena):
    arena.vote("ant", "bee", "a")
    assert {row.model for row in arena.board().rows} == {"ant", "bee"}


def test_board_of_the_database_is_the_board_of_its_votes_in_a_file(arena, tmp_path):
    arena.vote_often(25)
    with arena.database.session(read_only=True) as session:
        names = {model.id: model.name for model in session.scalars(select(Model))}
        votes = queries.votes_in_order(session)
    winner = {"a": "left", "b": "right", "tie": "tie", "both_bad": "both_bad"}
    rows = [(names[vote.model_a_id], names[vote.model_b_id], winner[vote.kind]) for vote in votes]
    (tmp_path / "votes.csv").write_bytes(any_csv.write(rows))
    assert boards.board_from_csv(tmp_path / "votes.csv") == arena.board()


def test_board_is_shown_even_if_it_cannot_be_cached(arena, monkeypatch, caplog):
    arena.vote_often(5)

    def full(*args):
        raise DatabaseUnavailable("database unavailable: the disk is full")

    monkeypatch.setattr(queries, "save_ratings", full)
    assert arena.board().votes == 5
    assert "the disk is full" in caplog.text


def test_board_that_a_recount_overtook_is_not_kept(arena, monkeypatch):
    """Its rows would stand for ever among those of later boards, and none of these be found whole."""
    arena.vote("ant", "bee", "a")
    with arena.database.session() as session:
        late = add_visitor(session)
        battle = add_votable_battle(session, late, (arena.models["cat"], arena.models["dog"]))
        queries.cast_vote(session, battle_id=battle.id, visitor_id=late, kind="a", now=NOW)

    def overtaken(*args, **named):
        with arena.database.session() as session:
            queries.quarantine(session, late, "why", "admin", NOW, None)
        return rate(*args, **named)

    monkeypatch.setattr(boards, "rate", overtaken)
    assert {row.model for row in arena.board().rows} == set(NAMES)
    monkeypatch.setattr(boards, "rate", rate)
    whole = arena.board()
    assert [row.model for row in whole.rows] == ["ant", "bee"]
    monkeypatch.setattr(boards, "rate", None)
    assert arena.board() == whole


def test_board_is_not_kept_in_the_middle_of_a_vote(arena):
    """The two would take their rows in different orders, and PostgreSQL end one of them."""
    arena.vote_often(5)
    with ThreadPoolExecutor(1) as threads:
        with arena.database.session() as session:
            queries.lock_votes(session)
            queries.last_vote_id(session)  # with which SQLite's lock begins
            board = threads.submit(arena.board)
            assert wait([board], timeout=0.3).not_done
        assert board.result().votes == 5


def test_board_asked_for_by_a_method_that_is_not_there_is_refused(arena):
    with pytest.raises(ValueError, match="no rating method 'glicko'"):
        arena.board(method="glicko")


def test_boards_of_empty_files_and_of_no_votes_agree(tmp_path):
    (tmp_path / "votes.csv").write_bytes(any_csv.write([]))
    board = boards.board_from_csv(tmp_path / "votes.csv")
    assert board.rows == () and board == rate(
        any_csv.read(tmp_path / "votes.csv").games, input_sha256=board.input_sha256, version=boards.VERSION
    )
