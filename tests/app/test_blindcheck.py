"""The check of blindness finds what is planted: a name, a mark, a field, a difference in time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from app.blindcheck.guess import FEATURES, auc, features, guess
from app.blindcheck.play import OverHttp
from app.blindcheck.search import leaks
from tests.app.fake_engine import FakeEngine, Script
from tests.app.running import Website

NAMES = ("kestrel-quick", "/models/secret")


def found(body: str, url: str = "http://x/api/battles/1/events") -> list[str]:
    return [leak.what for leak in leaks(0, {url: body}, NAMES)]


def event(**data) -> str:
    return f"id: 1\nevent: block\ndata: {json.dumps(data)}\n\n"


def test_what_a_battle_usually_sends_is_no_leak():
    assert found(event(turn=1, side="a", block=0, html="<p>A fast bird.</p>", done=False)) == []
    assert found(json.dumps({"battle": "f00", "state": "votable", "models": None, "vote": None})) == []


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (event(html="I am Kestrel-Quick"), "name 'kestrel-quick'"),
        (event(html="see /models/secret").replace("/", "\\/"), "name '/models/secret'"),
        (event(html="ok<|im_end|>"), "tokenizer mark '<|im_end|>'"),
        (event(html="Ġhello"), "tokenizer mark 'Ġ'"),
        (event(html="x", usage={"n": 1}), "field 'usage'"),
        (event(html="x", inner=[{"duration_ms": 3.5}]), "field 'duration_ms'"),
    ],
)
def test_planted_leak_is_found(body, what):
    assert what in found(body)


def test_name_in_the_page_itself_is_found():
    assert found("<html>KESTREL-quick</html>", "the page") == ["name 'kestrel-quick'"]


def battles(rng: np.random.Generator, number: int, lag: float) -> tuple[np.ndarray, np.ndarray]:
    """Sides as the times of a visitor show them, the slow one later by `lag` seconds."""
    slow_a = rng.random(number) < 0.5
    rows = []
    for slow in slow_a:
        a, b = (np.sort(rng.uniform(0, 3, 20)) for _ in "ab")
        late = a if slow else b
        late += lag
        rows.append(np.subtract(features(a, a[-1]), features(b, b[-1])))
    return np.array(rows), slow_a


def test_engine_that_lags_is_told_by_its_times():
    guessed = guess(*battles(np.random.default_rng(0), 60, 0.5))
    assert guessed.auc > 0.9 and not guessed.is_blind


def test_equal_times_are_blind_39_times_of_40(monkeypatch):
    monkeypatch.setattr("app.blindcheck.guess.ROUNDS", 100)
    blind = [guess(*battles(np.random.default_rng(seed), 40, 0.0), seed).is_blind for seed in range(40)]
    assert sum(blind) >= 38


def test_area_under_the_curve_of_a_worked_example():
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True])) == 0.75


def test_features_of_a_side_that_said_nothing_are_numbers():
    assert len(features([], 2.0)) == len(features([1.0], 2.0)) == len(FEATURES)
    assert np.isfinite(features([], 2.0)).all()


def test_visitor_over_http_records_all_that_came_before_the_vote(tmp_path, monkeypatch):
    monkeypatch.setattr("app.blindcheck.play.SLOW", "beta")
    with FakeEngine() as engine:
        engine.say("alpha", Script.of("One two three. " * 6))
        engine.say("beta", Script.of("Four five six. " * 6, pause_seconds=0.02))
        with Website(tmp_path, engine_url=engine.url) as website:
            visitor = OverHttp(website.ready().url)
            played = visitor.play("Why?")
            visitor.close()
    assert played.slow_side in ("a", "b")
    assert all(played.times[side] and played.ended[side] >= played.times[side][-1] for side in "ab")
    assert leaks(0, played.bodies, ("alpha", "beta", engine.url, str(tmp_path))) == []
    assert "three" in played.bodies["/api/battles/events"]
