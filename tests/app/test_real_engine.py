"""Battles on our own engine, in its own process, with tiny checkpoints: what no fake can show."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from app.errors import SIDE_FAILED, ArenaError
from db.tables import Battle
from tests.app.running import Website
from tests.engine.server_fixture import SPOKEN, TinyModel
from tests.waiting import until

ENDLESS = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 400}
MODELS = [
    ("one", TinyModel("one", seed=1).source),
    ("two", TinyModel("two", seed=1).source),
    ("three", TinyModel("three", family="gemma3", seed=2).source),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The website with a child engine of its own, as `arena serve` starts it."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "ARENA_ENGINE_KV_MEMORY_BYTES": "32MiB",
            "ARENA_ENGINE_DTYPE": "float32",
            "ARENA_ENGINE_BACKEND": "reference",
            "ARENA_ENGINE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }.items():
            environment.setenv(name, value)
        folder = tmp_path_factory.mktemp("real")
        with Website(folder, models=MODELS, sampling=ENDLESS, engine_port=0) as site:
            yield site.ready(3)


def pages_in_use(site) -> int:
    return site.in_loop(site.services.engine.kv())["pages"]["used"]


def stored_state(site, battle: str) -> str:
    with site.services.database.session() as session:
        return session.get(Battle, battle).state


def test_a_battle_streams_from_real_weights_to_its_vote(site):
    visitor = site.visitor()
    battle, reading = visitor.battle("Hello there")
    assert reading.state == "votable" and reading.html("a") and reading.html("b")
    assert set(visitor.vote(battle).json()["models"].values()) < {"one", "two", "three"}


def test_a_prompt_is_counted_by_the_engine(site):
    count = site.visitor().post("/api/count", json={"prompt": "word " * 5000}).json()
    assert not count["ok"] and count["tokens"] > count["limit"] > 0


def test_a_closed_tab_frees_its_pages(site, monkeypatch):
    monkeypatch.setattr(site.services.battles, "_config", replace(site.config, reader_grace_seconds=0.5))
    idle, visitor = pages_in_use(site), site.visitor()
    battle = visitor.ask("Tell me a long story")
    visitor.read(battle, stop=lambda reading: reading.html("a") and pages_in_use(site) > idle)
    until(lambda: pages_in_use(site) <= idle)
    # To ask for its snapshot would be to read it again.
    until(lambda: stored_state(site, battle) != "streaming")
    assert stored_state(site, battle) == "interrupted"


def test_the_engine_killed_under_eight_battles_leaves_a_sentence_and_a_way_on(site):
    visitors = [site.visitor() for _ in range(8)]
    with ThreadPoolExecutor(8) as readers:
        battles, readings = [], []
        for visitor in visitors:
            battles.append(visitor.ask("Tell me a long story"))
            readings.append(readers.submit(visitor.read, battles[-1]))
        until(lambda: site.services.process.pid and pages_in_use(site) > 16)
        os.kill(site.services.process.pid, signal.SIGKILL)
    for visitor, battle, reading in zip(visitors, battles, [each.result() for each in readings], strict=True):
        assert reading.state == "interrupted"
        ends = [e.data for e in reading.events if e.name == "side" and e.data["state"] not in ("streaming", "done")]
        assert ends and all(end["state"] == "failed" and end["message"] == SIDE_FAILED for end in ends)
        assert visitor.vote(battle).status_code == 409
    until(lambda: visitors[0].get("/api/status").json()["ready_models"] == 3, seconds=60)
    for visitor, battle in zip(visitors, battles, strict=True):
        assert visitor.post(f"/api/battles/{battle}/regenerate").status_code == 202
        visitor.post(f"/api/battles/{battle}/stop")
    battle, reading = visitors[0].battle("Hello again")
    assert reading.state == "votable"


def failed(site, name: str):
    model = site.in_loop(site.services.registry.model(name))
    return model if model.status == "failed" else None


def test_a_failed_checkpoint_is_told_and_the_others_go_on(site, tmp_path):
    with pytest.raises(ArenaError, match="no file or folder"):
        site.in_loop(site.services.registry.add(name="nowhere", source="path:/nowhere/at/all"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"architectures": ["OddForCausalLM"], "model_type": "odd"}')
    (tmp_path / "odd" / "model.safetensors").write_bytes(b"")
    (tmp_path / "odd" / "tokenizer.json").write_text("{}")
    for name, path in (("broken", broken), ("odd", tmp_path / "odd")):
        site.in_loop(site.services.registry.add(name=name, source=f"path:{path}"))
        model = until(lambda name=name: failed(site, name), seconds=60)
        assert model.reason
    _, reading = site.visitor().battle("Still there?")
    assert reading.state == "votable"


def test_models_added_while_running_take_part_and_split_characters_come_whole(site):
    registry = site.services.registry
    for name in ("speaker", "speaker too"):
        site.in_loop(registry.add(name=name, source=TinyModel(name, family="speaker").source))
    for name, _ in MODELS:
        site.in_loop(registry.change(name, enabled=False))
    until(lambda: {model.name for model in registry.ready()} == {"speaker", "speaker too"})
    _, reading = site.visitor().battle("What do you say?")
    assert reading.html("a") == reading.html("b") == f"<p>{SPOKEN}</p>\n"
    assert "\ufffd" not in reading.raw.decode()
    for name, _ in MODELS:
        site.in_loop(registry.change(name, enabled=True))
    for name in ("speaker", "speaker too"):
        site.in_loop(registry.retire(name))
