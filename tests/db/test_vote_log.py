"""The vote log: whoever edits, removes or re-orders a row is found, and what is forgotten stays gone."""

from __future__ import annotations

import hashlib
import pathlib
import threading

import pytest
from sqlalchemy import text

from db import queries, vote_log
from tests.db.rows import NOW, add_models, add_visitor, add_votable_battle, later


def sign(said: str) -> str:
    return hashlib.sha256(f"key {said}".encode()).hexdigest()


def cast(session, visitor: str, models: tuple[int, int], kind: str = "a", **options):
    battle = add_votable_battle(session, visitor, models)
    return queries.cast_vote(
        session, battle_id=battle.id, visitor_id=visitor, kind=kind, now=later(1), sign=sign, **options
    )


@pytest.fixture
def five(database):
    """Five votes of two visitors; the fourth does not count."""
    with database.session() as session:
        models = tuple(add_models(session, "alpha", "beta"))
        visitors = [add_visitor(session), add_visitor(session)]
        for number, kind in enumerate(("a", "b", "tie", "a", "both_bad")):
            refused = {"counted": False, "reason": "identity", "decided_by": "test"} if number == 3 else {}
            cast(session, visitors[number % 2], models, kind, **refused)
    return visitors


def faults(database, signer=sign) -> tuple[str, ...]:
    with database.session(read_only=True) as session:
        return queries.verify_log(session, signer).faults


def test_log_of_votes_as_they_were_cast_is_whole(database, five):
    with database.session(read_only=True) as session:
        report = queries.verify_log(session, sign)
    assert report.faults == ()
    assert (report.votes, report.counted, report.decisions, report.heads["votes"].signed_from) == (5, 4, 1, 0)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("UPDATE votes SET kind = 'b' WHERE number = 2 OR number = 1", "vote 1 was edited"),
        ("UPDATE votes SET created_at = '2026-01-01 00:00:00' WHERE number = 2", "vote 2 was edited"),
        ("UPDATE battles SET model_a_id = model_b_id + 0, model_b_id = model_a_id + 0", "vote 1 was edited"),
        ("UPDATE models SET name = 'gamma' WHERE name = 'beta'", "vote 1 was edited"),
        ("DELETE FROM votes WHERE number = 3", "vote 3 is missing"),
        ("DELETE FROM votes WHERE number = 5", "the last of the votes is missing"),
        ("UPDATE votes SET number = number + 1 WHERE number = 5", "vote 5 is missing"),
        ("UPDATE votes SET counted = FALSE, not_counted_reason = 'admin' WHERE number = 1", "vote 1 stands as not"),
        ("UPDATE votes SET counted = TRUE, not_counted_reason = NULL WHERE number = 4", "vote 4 stands as counted"),
        ("DELETE FROM decisions", "the last of the decisions is missing"),
        ("UPDATE decisions SET reason = 'admin'", "decision 1 was edited"),
        ("UPDATE turns SET prompt = 'Why not?'", "vote 1: its visitor, its texts"),
        ("UPDATE answers SET text = 'No.'", "vote 1: its visitor, its texts"),
        ("UPDATE log_heads SET signed_from = 3 WHERE name = 'votes'", "the head of the votes has no valid signature"),
    ],
)
def test_change_in_the_database_is_found_and_named(database, five, change, fault):
    with database.session() as session:
        session.execute(text(change))
    assert any(each.startswith(fault) for each in faults(database)), faults(database)


def test_votes_that_change_places_are_found(database, five):
    with database.session() as session:
        for number, to in ((1, -1), (2, 1), (-1, 2)):
            session.execute(text(f"UPDATE votes SET number = {to} WHERE number = {number}"))
    assert "vote 1 stands after vote 2: re-ordered, or there twice" in faults(database)


def test_end_that_was_cut_off_with_its_head_has_no_signature_and_the_next_vote_does_not_cover_it_up(database, five):
    with database.session() as session:
        session.execute(text("DELETE FROM votes WHERE number = 5"))
        last = session.scalar(text("SELECT chain_hash FROM votes WHERE number = 4"))
        session.execute(text(f"UPDATE log_heads SET entries = 4, chain_hash = '{last}' WHERE name = 'votes'"))
    assert faults(database) == ("the head of the votes has no valid signature",)
    with database.session() as session:
        models = tuple(model.id for model in queries.models(session))
        cast(session, five[0], models)
        head = queries.log_head(session, vote_log.VOTES)
    assert (head.entries, head.signed_from) == (5, 4)


def test_votes_at_once_make_one_chain(database, five):
    with database.session() as session:
        models = tuple(model.id for model in queries.models(session))
        battles = [add_votable_battle(session, five[0], models).id for _ in range(32)]
    failures = []

    def vote(battle: str) -> None:
        try:
            with database.session() as session:
                queries.cast_vote(session, battle_id=battle, visitor_id=five[0], kind="a", now=NOW, sign=sign)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=vote, args=(battle,)) for battle in battles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with database.session(read_only=True) as session:
        report = queries.verify_log(session, sign)
    assert report.faults == () and report.votes == 37


def test_quarantine_takes_all_votes_out_and_release_brings_back_what_it_took(database, five):
    with database.session() as session:
        assert queries.quarantine(session, five[1], "test", "admin", NOW, sign) == 1  # of two, one counted no more
        assert len(queries.votes_in_order(session)) == 3
    with database.session() as session:
        assert queries.release(session, five[1], "admin", NOW, sign) == 1
        assert len(queries.votes_in_order(session)) == 4
    assert faults(database) == ()


def test_recount_empties_the_cache_of_ratings(database, five):
    with database.session() as session:
        session.execute(
            text(
                "INSERT INTO ratings (model_id, method, ci, rating, votes, wins, elo, last_vote_id, notes, updated_at) "
                "SELECT id, 'bt', 'x', 1, 1, 1, 1, 1, '{}', created_at FROM models"
            )
        )
        before = queries.last_decision(session)
        queries.quarantine(session, five[0], "test", "admin", NOW, sign)
        assert queries.last_decision(session) > before
        assert session.scalar(text("SELECT count(*) FROM ratings")) == 0


def test_forgotten_visitor_leaves_votes_and_nothing_else_and_the_log_is_whole(database, five):
    secret = "my secret is 8c7a1"
    with database.session() as session:
        models = tuple(model.id for model in queries.models(session))
        battle = add_votable_battle(session, five[0], models, prompt=secret, address_hash="where")
        queries.cast_vote(session, battle_id=battle.id, visitor_id=five[0], kind="a", now=NOW, sign=sign)
    with database.session() as session:
        assert queries.forget_visitor(session, five[0], "f" * 32, NOW) == 4
    database.empty_journal()
    with database.session(read_only=True) as session:
        report = queries.verify_log(session, sign)
        assert (report.faults, report.votes, report.forgotten) == ((), 6, 4)
        assert queries.find_visitor(session, five[0]) is None
        for table in ("votes", "battles", "turns", "answers", "visitors"):
            rows = repr(session.execute(text(f"SELECT * FROM {table}")).all())
            assert secret not in rows and five[0] not in rows and "where" not in rows
    if database.is_sqlite:
        folder = database.url.database.rpartition("/")[0]
        assert all(secret.encode() not in path.read_bytes() for path in pathlib.Path(folder).glob("arena.db*"))


def test_note_with_nul_is_hashed_as_it_is_kept(database, five):
    with database.session() as session:
        queries.quarantine(session, five[0], "why\0", "admin\0", later(9), sign)
    assert faults(database) == ()
