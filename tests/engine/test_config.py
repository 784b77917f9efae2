from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine.config import FIELDS, EngineConfig
from engine.errors import ConfigError


def load(tmp_path=None, *, toml="", environ=None, **flags) -> EngineConfig:
    file = None
    if toml:
        file = tmp_path / "arena.toml"
        file.write_text(toml)
    return EngineConfig.load(flags, file=file, environ=environ or {})


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults(tmp_path):
    toml = "[engine]\nport = 1\nmax_sequences = 2\nmax_waiting = 3\n"
    environ = {"ARENA_ENGINE_MAX_SEQUENCES": "20", "ARENA_ENGINE_MAX_WAITING": "30"}
    config = load(tmp_path, toml=toml, environ=environ, max_waiting="300")
    assert (config.port, config.max_sequences, config.max_waiting) == (1, 20, 300)
    assert config.host == "127.0.0.1"


@pytest.mark.parametrize(("text", "bytes"), [("512MiB", 512 * 2**20), ("2 GiB", 2 * 2**30), ("1_048_576", 2**20)])
def test_sizes_may_be_written_with_their_unit(text, bytes):
    assert load(environ={"ARENA_ENGINE_KV_MEMORY_BYTES": text}).kv_memory_bytes == bytes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "x"),
        ("PORT", "-1"),
        ("PORT", "70000"),
        ("PORT", "1MiB"),
        ("DTYPE", "fp8"),
        ("BACKEND", "cuda"),
        ("KV_MEMORY_BYTES", "12"),
        ("CHECK_INTEGRITY", "maybe"),
        ("MAX_SEQUENCES", "0"),
        ("LOG_LEVEL", "loud"),
        ("BANANA", "1"),
    ],
)
def test_wrong_value_is_refused_by_the_name_of_its_variable(name, value):
    with pytest.raises(ConfigError, match=f"ARENA_ENGINE_{name}"):
        load(environ={f"ARENA_ENGINE_{name}": value})


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[engine]\nbanana = 1\n", r"unknown setting: engine\.banana"),
        ("[engine]\nport = '8001x'\n", r"engine\.port"),
        ("[engine]\nport = 1.5\n", r"engine\.port"),
        ("[engine]\nport = true\n", r"engine\.port"),
        ("port = 1\n", "unknown setting: port"),
        ("[engine\n", "cannot read the config file"),
    ],
)
def test_wrong_file_is_refused_by_the_name_of_its_key(tmp_path, toml, words):
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, toml=toml)


def test_tables_of_the_website_are_left_to_it(tmp_path):
    assert load(tmp_path, toml="[web]\nport = 7860\n").port == 8001


def test_address_of_the_engine_is_a_setting_of_the_website():
    assert load(environ={"ARENA_ENGINE_URL": "http://127.0.0.1:9"}) == load()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "engine"])
def test_other_machines_may_only_ask_with_a_key(host):
    with pytest.raises(ConfigError, match="no api_key is set"):
        load(host=host)
    assert load(host=host, environ={"ARENA_ENGINE_API_KEY": "k"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_may_ask_without_a_key(host):
    assert load(host=host).api_key is None


def test_pages_are_aligned_and_fit_the_pool():
    with pytest.raises(ConfigError, match="multiple of 512"):
        load(page_bytes="1000")
    with pytest.raises(ConfigError, match="more than kv_memory_bytes"):
        load(page_bytes="4MiB", kv_memory_bytes="1MiB")


def test_admin_key_is_the_api_key_where_there_is_no_other():
    assert load(environ={"ARENA_ENGINE_API_KEY": "k"}).key_of_admin == "k"
    assert load(environ={"ARENA_ENGINE_API_KEY": "k", "ARENA_ENGINE_ADMIN_KEY": "a"}).key_of_admin == "a"


def test_keys_are_not_shown():
    shown = repr(load(environ={"ARENA_ENGINE_API_KEY": "hush", "ARENA_ENGINE_ADMIN_KEY": "hush"}))
    assert "hush" not in shown


def test_cache_folder_is_shared_with_other_commands_through_arena_cache():
    assert load(environ={"ARENA_CACHE": "/c"}).cache_folder == Path("/c")
    assert load(environ={"ARENA_CACHE": "/c", "ARENA_ENGINE_CACHE_FOLDER": "/e"}).cache_folder == Path("/e")


def test_config_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().port = 1


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_one_sentence(name):
    sentence = FIELDS[name].metadata["sentence"]
    assert sentence.endswith(".") and len(sentence) > 20
