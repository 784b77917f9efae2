"""A battle over real sockets, from its question to its vote; the engine's words and pace are the test's."""

from __future__ import annotations

import pytest

from tests.app.fake_engine import FakeEngine, Script
from tests.app.running import Website


@pytest.fixture
def engine():
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def site(engine, tmp_path):
    with Website(tmp_path, engine_url=engine.url) as site:
        yield site.ready()


def test_a_battle_streams_both_sides_and_reveals_the_names_after_the_vote(site, engine):
    engine.say("alpha", "# Title\n\nThe *answer* is **42**.")
    engine.say("beta", "```python\nprint('hello')\n```")
    visitor = site.visitor()
    battle, reading = visitor.battle()
    assert reading.state == "votable"
    both = reading.html("a") + reading.html("b")
    assert "<h1>Title</h1>" in both and "<strong>42</strong>" in both and 'class="highlight"' in both
    assert visitor.snapshot(battle)["models"] is None
    answer = visitor.vote(battle, "a")
    assert answer.status_code == 200
    assert set(answer.json()["models"].values()) == {"alpha", "beta"}
    assert visitor.snapshot(battle)["models"] == answer.json()["models"]
    assert visitor.snapshot(battle)["vote"] == "a"


def test_second_vote_is_refused(site):
    visitor = site.visitor()
    battle, _ = visitor.battle()
    assert visitor.vote(battle).status_code == 200
    again = visitor.vote(battle, "b")
    assert again.status_code == 409 and again.json()["error"]["code"] == "already_voted"


def test_a_vote_while_the_sides_answer_is_refused(site, engine):
    engine.say("alpha", Script.of("slow words " * 5, pause_seconds=0.1))
    visitor = site.visitor()
    battle = visitor.ask()
    early = visitor.vote(battle)
    assert early.status_code == 409 and early.json()["error"]["code"] == "not_votable"
    visitor.read(battle)
    assert visitor.vote(battle).status_code == 200
