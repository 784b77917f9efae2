"""A vote that is not blind is kept, not rated, and its visitor is told so: after the vote, never before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from app.battles import Revealed, _vote
from app.security import log_signer
from app.votes import audit
from db import queries
from tests.app.fake_engine import FakeEngine, Script
from tests.app.running import Website
from tests.db.rows import NOW, add_models, add_visitor, add_votable_battle
from tests.waiting import until


@pytest.fixture(scope="module")
def engine():
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def website(engine, tmp_path_factory):
    with Website(tmp_path_factory.mktemp("honesty"), engine_url=engine.url) as website:
        yield website.ready()


def voted(website, prompt: str, kind: str = "a") -> dict:
    with website.visitor() as visitor:
        battle, _ = visitor.battle(prompt)
        assert visitor.snapshot(battle)["counted"] is None
        answer = visitor.vote(battle, kind).json()
        assert {key: visitor.snapshot(battle)[key] for key in ("counted", "reason")} == {
            key: answer[key] for key in ("counted", "reason")
        }
        return answer


def test_vote_on_a_blind_battle_counts(website, engine):
    engine.say("alpha", "Hello.")
    answer = voted(website, "Why?")
    assert (answer["counted"], answer["reason"]) == (True, None)


def test_name_in_the_question_or_an_answer_keeps_the_vote_from_counting(website, engine):
    before = votes_on_board(website)
    assert voted(website, "Are you Alpha?")["reason"] == "identity"
    engine.say("beta", Script.of("I am Beta, how can I help?"))
    assert voted(website, "Who are you?")["counted"] is False
    engine.say("beta", Script.of("Hello."))
    assert votes_on_board(website) == before
    assert voted(website, "Tell me of alphabets")["counted"] is True
    assert votes_on_board(website) == before + 1


def test_votes_of_a_visitor_in_quarantine_do_not_count(website, engine):
    with website.visitor() as visitor:
        battle, _ = visitor.battle("Why?")
        database = website.database()
        with database.session() as session:
            row = queries.find_visitor(session, visitor.cookies["arena_visitor"])
            row.quarantined_at = row.created_at
        assert visitor.vote(battle).json()["reason"] == "quarantine"
        database.close()


def test_vote_that_is_not_blind_stays_out_when_a_quarantine_is_taken_back(website, engine):
    with website.visitor() as visitor:
        battle, _ = visitor.battle("Are you Alpha?")
        database = website.database()
        with database.session() as session:
            who = visitor.cookies["arena_visitor"]
            queries.quarantine(session, who, "test", "admin", datetime.now(UTC), log_signer(website.config))
        assert visitor.vote(battle).json()["reason"] == "identity"
        with database.session() as session:
            assert queries.release(session, who, "admin", datetime.now(UTC), log_signer(website.config)) == 0
        database.close()


def test_visitor_forgotten_while_the_sides_answer_leaves_no_text(website, engine):
    for model in ("alpha", "beta"):
        engine.say(model, Script.of("word " * 40, pause_seconds=0.02))
    with website.visitor() as visitor:
        battle = visitor.ask("Forget me")
        visitor.read(battle, stop=lambda reading: "word" in reading.html("a"))
        database = website.database()
        with database.session() as session:
            queries.forget_visitor(session, visitor.cookies["arena_visitor"], uuid4().hex, datetime.now(UTC))
        until(lambda: website.services.battles._streaming(battle) is None)
        with database.session(read_only=True) as session:
            assert queries.conversation_of(session, battle) == [{"prompt": "", "a": "", "b": ""}]
            assert queries.find_battle(session, battle).state == "void"
        database.close()
    for model in ("alpha", "beta"):
        engine.say(model, "Hello.")


def test_quarantine_of_the_same_moment_holds_for_the_vote(database):
    with database.session() as session:
        visitor = add_visitor(session)
        battle = add_votable_battle(session, visitor, tuple(add_models(session, "alpha", "beta")))

    def vote() -> Revealed:
        with database.session() as session:
            return _vote(session, battle.id, visitor, "a", NOW, None)

    with ThreadPoolExecutor(1) as thread, database.session() as session:
        queries.quarantine(session, visitor, "test", "admin", NOW, None)
        revealed = thread.submit(vote)
        wait([revealed], timeout=0.5)  # it has come as far as it can before the quarantine is committed
    assert revealed.result().reason == "quarantine"


def test_votes_that_do_not_count_push_no_others_out_as_too_frequent(database):
    with database.session() as session:
        models = tuple(add_models(session, "ant", "bee"))
        flooder, honest = add_visitor(session), add_visitor(session)

        def vote(visitor: str, prompt: str) -> None:
            battle = add_votable_battle(session, visitor, models, prompt=prompt)
            queries.cast_vote(session, battle_id=battle.id, visitor_id=visitor, kind="a", now=NOW)

        for _ in range(12):
            vote(flooder, "Hello")
        for prompt in 3 * ("Hello", "Why?", "How?"):
            vote(honest, prompt)

    def deduplicate() -> tuple[int, int]:
        return audit.deduplicate(database, str.upper, percentile=60, seed=0)

    assert deduplicate() == (12, 0), "each prompt has three"
    with database.session() as session:
        queries.quarantine(session, flooder, "floods", "admin", NOW, str.upper)
    stopped, back = deduplicate()
    with database.session(read_only=True) as session:
        assert all(vote.counted for vote in queries.votes_by(session, honest))
    assert stopped == 0 and back > 0
    assert deduplicate() == (0, 0)


def test_log_of_a_running_arena_is_whole_and_signed(website):
    voted(website, "Why?")
    database = website.database()
    with database.session(read_only=True) as session:
        report = queries.verify_log(session, log_signer(website.config))
    database.close()
    assert report.faults == () and report.votes >= 1 and report.heads["votes"].signed_from == 0


def votes_on_board(website) -> int:
    with website.visitor(accepts=False) as visitor:
        return visitor.get("/api/leaderboard").json()["votes"]
