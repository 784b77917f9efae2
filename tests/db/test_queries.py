"""The named queries: what they promise, on both databases."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import select, text, update

from db import queries
from db.connect import Database
from db.errors import AlreadyVoted, NameTaken, NotFound, NotVotable, VoteRefused
from db.tables import BATTLE_STATES, Battle, Model, Vote
from db.vote_kinds import VOTE_KINDS
from tests.db.rows import NOW, add_battle, add_models, add_visitor, add_votable_battle, later


@pytest.fixture
def visitor_id(database) -> str:
    with database.session() as session:
        return add_visitor(session)


@pytest.fixture
def model_ids(database) -> list[int]:
    with database.session() as session:
        return add_models(session, "ant", "bee", "cat")


@pytest.fixture
def votable(database, visitor_id, model_ids) -> Battle:
    with database.session() as session:
        return add_votable_battle(session, visitor_id, model_ids[:2])


# Models


def test_nothing_is_called_by_a_name_with_nul(database):
    with database.session(read_only=True) as session:
        for find in (queries.find_battle, queries.model_named):
            with pytest.raises(NotFound):
                find(session, "a\0b")
        assert queries.find_visitor(session, "a\0b") is queries.visitor_called(session, "a\0b") is None
        assert not queries.battle_exists(session, "\0")


def test_model_comes_back_as_it_was_added(database):
    columns = {
        "name": "qwen small",
        "source": "hf:org/name@abc",
        "system_prompt": "Be brief.\n你好",
        "sampling": {"temperature": 0.7, "stop": ["\n"]},
        "chat_template": "plain-roles",
        "context_length": 4096,
        "endpoint_key_env": "OTHER_KEY",
        "enabled": False,
        "precision": "int8",
        "adapter": "path:/tuned",
        "kv_share": 0.5,
    }
    with database.session() as session:
        queries.add_model(session, now=NOW, **columns)
    with database.session(read_only=True) as session:
        model = queries.model_named(session, "qwen small")
    assert {key: getattr(model, key) for key in columns} == columns
    assert (model.created_at, model.retired_at) == (NOW, None)


def test_name_is_taken_once(database, model_ids):
    with pytest.raises(NameTaken, match="'ant'"), database.session() as session:
        add_models(session, "ant")
    with database.session() as session:
        assert [model.name for model in queries.models(session)] == ["ant", "bee", "cat"]


def test_retired_model_keeps_its_name_and_leaves_the_list(database, model_ids):
    with database.session() as session:
        queries.retire_model(session, "bee", later(5))
    with database.session() as session:
        assert [model.name for model in queries.models(session)] == ["ant", "cat"]
        assert [model.name for model in queries.models(session, retired=True)] == ["ant", "bee", "cat"]
        bee = queries.model_named(session, "bee")
        assert (bee.enabled, bee.retired_at) == (False, later(5))
        with pytest.raises(NotFound):
            queries.change_model(session, "bee", enabled=True)
        with pytest.raises(NotFound):
            queries.retire_model(session, "bee", later(6))
    with pytest.raises(NameTaken), database.session() as session:
        add_models(session, "bee")


def test_change_of_a_model_is_seen_in_the_same_session_and_after(database, model_ids):
    with database.session() as session:
        assert queries.model_named(session, "ant").enabled
        assert not queries.change_model(session, "ant", enabled=False, sampling={"top_k": 5}).enabled
    with database.session() as session:
        assert queries.model_named(session, "ant").sampling == {"top_k": 5}


def test_model_that_is_not_there_is_not_found(database):
    with database.session() as session:
        for query in (queries.model_named, queries.change_model):
            with pytest.raises(NotFound):
                query(session, "none")


def test_name_and_dates_of_a_model_stay(database, model_ids):
    with database.session() as session, pytest.raises(ValueError, match="name"):
        queries.change_model(session, "ant", name="ape")


# Visitors


def test_first_acceptance_of_the_notice_is_kept(database, visitor_id):
    for moment in (later(1), later(2)):
        with database.session() as session:
            queries.accept_notice(session, visitor_id, moment)
    with database.session() as session:
        assert queries.find_visitor(session, visitor_id).notice_accepted_at == later(1)
        assert queries.find_visitor(session, "nobody") is None
        with pytest.raises(NotFound):
            queries.accept_notice(session, "nobody", NOW)


# Battles, turns, answers


def test_new_battle_streams_with_one_turn_and_two_empty_answers(database, visitor_id, model_ids):
    with database.session() as session:
        battle = add_battle(session, visitor_id, model_ids[:2], prompt="Hm?")
    with database.session() as session:
        assert queries.find_battle(session, battle.id, visitor_id).state == "streaming"
        assert [(turn.number, turn.prompt) for turn in queries.turns_of(session, battle.id)] == [(1, "Hm?")]
        answers = queries.current_answers(session, battle.id)
        assert {key: (answer.state, answer.attempt, answer.text) for key, answer in answers.items()} == {
            (1, "a"): ("streaming", 1, ""),
            (1, "b"): ("streaming", 1, ""),
        }
        assert {side: model.name for side, model in queries.models_of(session, battle).items()} == {
            "a": "ant",
            "b": "bee",
        }


def test_battle_of_another_visitor_looks_like_none(database, votable):
    with database.session() as session:
        stranger = add_visitor(session)
        for battle_id, visitor in ((votable.id, stranger), ("0" * 32, None)):
            with pytest.raises(NotFound, match="no such battle"):
                queries.find_battle(session, battle_id, visitor)


def test_next_attempt_is_the_current_answer(database, visitor_id, model_ids):
    with database.session() as session:
        battle = add_battle(session, visitor_id, model_ids[:2])
        first = queries.current_answers(session, battle.id)[1, "a"]
        queries.end_answer(session, first.id, "failed", error="gone")
        queries.add_answer(session, first.turn_id, "a", NOW)
        current = queries.current_answers(session, battle.id)
    assert {key: (answer.attempt, answer.state) for key, answer in current.items()} == {
        (1, "a"): (2, "streaming"),
        (1, "b"): (1, "streaming"),
    }


def test_answer_ends_once(database, visitor_id, model_ids):
    with database.session() as session:
        battle = add_battle(session, visitor_id, model_ids[:2])
        answer = queries.current_answers(session, battle.id)[1, "a"]
        assert queries.end_answer(session, answer.id, "done", text="Yes.", completion_tokens=2, duration_ms=1.5)
        assert not queries.end_answer(session, answer.id, "failed", text="")
    with database.session() as session:
        answer = queries.current_answers(session, battle.id)[1, "a"]
        assert (answer.state, answer.text, answer.completion_tokens, answer.duration_ms) == ("done", "Yes.", 2, 1.5)


def test_battle_is_votable_only_when_both_sides_have_answered(database, visitor_id, model_ids):
    with database.session() as session:
        battle = add_battle(session, visitor_id, model_ids[:2])
        answers = queries.current_answers(session, battle.id)
        queries.end_answer(session, answers[1, "a"].id, "done", text="Yes.")
        assert not queries.make_votable(session, battle.id, NOW)
        queries.end_answer(session, answers[1, "b"].id, "failed")
        assert not queries.make_votable(session, battle.id, NOW)
        retry = queries.add_answer(session, answers[1, "b"].turn_id, "b", NOW)
        assert not queries.make_votable(session, battle.id, NOW)
        queries.end_answer(session, retry.id, "done", text="No.")
        assert queries.make_votable(session, battle.id, NOW)
        assert not queries.make_votable(session, battle.id, NOW), "it already is"


def test_answer_stopped_by_the_visitor_counts_if_it_says_anything(database, visitor_id, model_ids):
    for text_b, votable in (("No", True), (" \n", False)):
        with database.session() as session:
            battle = add_battle(session, visitor_id, model_ids[:2])
            answers = queries.current_answers(session, battle.id)
            queries.end_answer(session, answers[1, "a"].id, "done", text="Yes.")
            queries.end_answer(session, answers[1, "b"].id, "stopped", text=text_b)
            assert queries.make_votable(session, battle.id, NOW) == votable


def test_next_turn_needs_a_votable_battle_and_takes_the_vote_away(database, visitor_id, votable):
    with database.session() as session:
        turn, answers = queries.add_turn(session, votable.id, "And then?", later(1))
        assert (turn.number, sorted(answers)) == (2, ["a", "b"])
        assert queries.add_turn(session, votable.id, "And now?", later(2)) is None
        with pytest.raises(NotVotable, match="streaming"):
            queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind="a", now=NOW)


def test_only_one_of_many_changes_of_state_succeeds(database, votable):
    def advance():
        with database.session() as session:
            return queries.advance_battle(session, votable.id, ("votable",), "streaming", NOW)

    assert sorted(at_once(advance, 16)) == [False] * 15 + [True]


def test_after_a_restart_nothing_streams(database, visitor_id, model_ids, votable):
    with database.session() as session:
        battle = add_battle(session, visitor_id, model_ids[:2])
    with database.session() as session:
        assert queries.interrupt_all(session, NOW) == 1
    with database.session() as session:
        assert queries.find_battle(session, battle.id).state == "interrupted"
        assert queries.find_battle(session, votable.id).state == "votable"
        assert {answer.state for answer in queries.current_answers(session, battle.id).values()} == {"interrupted"}


def test_visitor_finds_the_latest_battle_that_is_not_over(database, visitor_id, model_ids):
    with database.session() as session:
        assert queries.latest_battle(session, visitor_id) is None
        first, second, third = (
            add_votable_battle(session, visitor_id, model_ids[:2], now=later(i)).id for i in range(3)
        )
        add_battle(session, add_visitor(session), model_ids[:2], now=later(9))
        queries.cast_vote(session, battle_id=third, visitor_id=visitor_id, kind="tie", now=NOW)
        assert queries.latest_battle(session, visitor_id).id == third
        queries.advance_battle(session, third, ("voted",), "void", NOW)
        assert queries.latest_battle(session, visitor_id).id == second
        assert first != second


def test_a_retired_model_is_forgotten_only_if_it_never_was_in_a_battle(database, visitor_id, model_ids):
    with database.session() as session:
        add_battle(session, visitor_id, model_ids[:2])
        names = [model.name for model in queries.models(session)]
        assert not queries.forget_unused_model(session, names[2]), "it is not retired"
        for name in names:
            queries.retire_model(session, name, NOW)
        assert [queries.forget_unused_model(session, name) for name in names] == [False, False, True]


def test_battles_are_counted_by_visitor_address_and_time(database, visitor_id, model_ids):
    with database.session() as session:
        for seconds, address in ((0, "x"), (10, "x"), (20, "y")):
            add_battle(session, visitor_id, model_ids[:2], now=later(seconds), address_hash=address)
        add_battle(session, add_visitor(session), model_ids[1:], now=later(30), address_hash="x")
        assert queries.count_battles(session, since=NOW, visitor_id=visitor_id) == 3
        assert queries.count_battles(session, since=later(10), visitor_id=visitor_id) == 2
        assert queries.count_battles(session, since=NOW, address_hash="x") == 3
        assert queries.count_battles(session, since=later(31), address_hash="x") == 0


# Votes


def at_once(function, times: int) -> list:
    """What `times` threads got that called at the same moment: results, or the exceptions themselves."""
    barrier, results = threading.Barrier(times), []

    def call():
        barrier.wait()
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=call) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("kind", VOTE_KINDS)
def test_vote_ends_its_battle(database, visitor_id, votable, kind):
    with database.session() as session:
        queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind=kind, now=later(1))
    with database.session() as session:
        vote = queries.vote_of(session, votable.id)
        assert (vote.kind, vote.visitor_id, vote.created_at) == (kind, visitor_id, later(1))
        battle = queries.find_battle(session, votable.id)
        assert (battle.state, battle.updated_at) == ("voted", later(1))


def test_second_vote_is_refused(database, visitor_id, votable):
    with database.session() as session:
        queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind="a", now=NOW)
    with pytest.raises(AlreadyVoted), database.session() as session:
        queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind="b", now=NOW)


@pytest.mark.parametrize("state", sorted(set(BATTLE_STATES) - {"votable", "voted"}))
def test_vote_needs_a_votable_battle(database, visitor_id, votable, state):
    with database.session() as session:
        queries.advance_battle(session, votable.id, ("votable",), state, NOW)
    with pytest.raises(NotVotable, match=state), database.session() as session:
        queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind="a", now=NOW)
    with database.session() as session:
        assert queries.vote_of(session, votable.id) is None
        assert queries.find_battle(session, votable.id).state == state


def test_vote_on_another_visitors_battle_is_not_found(database, votable):
    with database.session() as session:
        stranger = add_visitor(session)
        with pytest.raises(NotFound):
            queries.cast_vote(session, battle_id=votable.id, visitor_id=stranger, kind="a", now=NOW)


def test_vote_of_a_made_up_kind_is_refused(database, visitor_id, votable):
    with database.session() as session, pytest.raises(ValueError, match="both_bad"):
        queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind="c", now=NOW)


def test_of_32_votes_at_once_one_counts_and_the_rest_are_told_so(database, visitor_id, votable):
    def vote():
        with database.session() as session:
            return queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind="a", now=NOW)

    results = at_once(vote, 32)
    assert sorted(type(result).__name__ for result in results) == ["AlreadyVoted"] * 31 + ["Vote"]
    with database.session() as session:
        assert session.scalar(text("SELECT count(*) FROM votes")) == 1


def test_of_32_votes_from_several_processes_one_counts(connect, database, visitor_id, votable):
    others = iter([connect(max_connections=1, busy_timeout_seconds=60) for _ in range(32)])

    def vote():
        with next(others).session() as session:
            return queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind="a", now=NOW)

    assert sum(not isinstance(result, AlreadyVoted) for result in at_once(vote, 32)) == 1


def test_unique_constraint_holds_even_where_the_state_does_not(database, visitor_id, votable):
    with database.session() as session:
        queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind="a", now=NOW)
        session.execute(update(Battle).values(state="votable"))
    with pytest.raises(VoteRefused), database.session() as session:
        queries.cast_vote(session, battle_id=votable.id, visitor_id=visitor_id, kind="b", now=NOW)
    with database.session() as session:
        assert [vote.kind for vote in session.scalars(select(Vote))] == ["a"]


def test_votes_get_rising_ids_in_the_order_of_their_commits(database, visitor_id, model_ids):
    with database.session() as session:
        battles = iter([add_votable_battle(session, visitor_id, model_ids[:2]).id for _ in range(24)])
    seen = []

    def vote():
        battle_id = next(battles)
        with database.session() as session:
            vote = queries.cast_vote(session, battle_id=battle_id, visitor_id=visitor_id, kind="a", now=NOW)
            seen.append(queries.last_vote_id(session, before=vote.id))
            return vote.id

    ids = at_once(vote, 24)
    assert sorted(seen) == [0, *sorted(ids)[:-1]], "each vote saw the one before it committed"


def test_votes_for_ratings_come_in_order_with_retired_models(database, visitor_id, model_ids):
    ant, bee, cat = model_ids
    with database.session() as session:
        for pair, kind in (((ant, bee), "a"), ((cat, ant), "both_bad"), ((bee, cat), "tie")):
            battle = add_votable_battle(session, visitor_id, pair)
            queries.cast_vote(session, battle_id=battle.id, visitor_id=visitor_id, kind=kind, now=NOW)
        add_votable_battle(session, visitor_id, (ant, bee))  # not voted on
        queries.retire_model(session, "cat", NOW)
    with database.session(read_only=True) as session:
        votes = queries.votes_in_order(session)
        assert [(vote.model_a_id, vote.model_b_id, vote.kind) for vote in votes] == [
            (ant, bee, "a"),
            (cat, ant, "both_bad"),
            (bee, cat, "tie"),
        ]
        assert queries.votes_in_order(session, after=votes[0].vote_id) == votes[1:]
        assert queries.last_vote_id(session) == votes[-1].vote_id
        assert queries.last_vote_id(session, before=votes[-1].vote_id) == votes[-2].vote_id


# Ratings


def rating_row(model_id: int, last_vote_id: int, **columns) -> dict:
    return {
        "model_id": model_id,
        "method": "bt",
        "ci": "sandwich",
        "rating": 1000.0,
        "lower": 990.0,
        "upper": 1010.0,
        "rank_best": 1,
        "rank_worst": 2,
        "votes": 3,
        "wins": 1,
        "elo": 1001.0,
        "last_vote_id": last_vote_id,
        "input_sha256": "0" * 64,
        "notes": {"prior_weight": 0},
        "updated_at": NOW,
    } | columns


def test_cached_ratings_come_back_best_first(database, model_ids):
    ant, bee, _ = model_ids
    with database.session() as session:
        queries.save_ratings(session, [rating_row(ant, 1), rating_row(bee, 1, rating=1200.5, lower=None)])
        queries.save_ratings(session, [rating_row(ant, 1, method="elo", ci="none")])
    with database.session() as session:
        cached = queries.cached_ratings(session, "bt", "sandwich")
        assert [(name, row.rating, row.lower, row.notes) for name, row in cached] == [
            ("bee", 1200.5, None, {"prior_weight": 0}),
            ("ant", 1000.0, 990.0, {"prior_weight": 0}),
        ]


def test_slow_writer_does_not_put_old_ratings_over_new_ones(database, model_ids):
    ant = model_ids[0]
    for last_vote_id, rating in ((5, 1.0), (7, 2.0), (6, 3.0)):
        with database.session() as session:
            queries.save_ratings(session, [rating_row(ant, last_vote_id, rating=rating)])
    with database.session() as session:
        [(_, row)] = queries.cached_ratings(session, "bt", "sandwich")
        assert (row.last_vote_id, row.rating) == (7, 2.0)


def test_whole_board_can_be_marked_as_right_up_to_a_vote(database, model_ids):
    with database.session() as session:
        queries.save_ratings(session, [rating_row(model_id, 5) for model_id in model_ids])
        queries.advance_ratings(session, "bt", "sandwich", 6, later(1))
    with database.session() as session:
        assert {row.last_vote_id for _, row in queries.cached_ratings(session, "bt", "sandwich")} == {6}


def test_rated_model_cannot_be_deleted(database, model_ids):
    with database.session() as session:
        queries.save_ratings(session, [rating_row(model_ids[0], 1)])
    with pytest.raises(Exception, match=r"(?i)foreign key"), database.session() as session:
        session.delete(session.get(Model, model_ids[0]))


# Cost


@pytest.mark.parametrize(
    ("ask", "index"),
    [
        (lambda session: queries.undecided_battles(session, NOW), "ix_battles_state_updated_at"),
        (lambda session: queries.votes_not_counted_for(session, "identity"), "ix_votes_not_counted_reason"),
        (queries.vote_totals, "ix_votes_not_counted_reason"),
        (queries.vote_totals, "ix_visitors_quarantined_at"),
    ],
)
def test_what_is_asked_all_the_time_reads_an_index(tmp_path, ask, index):
    database = Database(f"sqlite:///{tmp_path}/arena.db")
    database.upgrade_to_head()
    with database.session() as session:
        asked = []
        connection = session.connection().connection.driver_connection
        connection.set_trace_callback(asked.append)
        ask(session)
        connection.set_trace_callback(None)
        plans = [row[-1] for each in asked for row in connection.execute(f"EXPLAIN QUERY PLAN {each}")]
    database.close()
    assert any(index in plan for plan in plans), plans
