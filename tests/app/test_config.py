"""Settings: where they come from, and what refuses to start."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from app.config import FIELDS, AppConfig, engine_environment
from app.errors import ConfigError


def test_flags_go_before_environment_before_file_before_defaults(tmp_path):
    file = tmp_path / "arena.toml"
    file.write_text('[web]\nport = 1\nhost = "10.0.0.1"\nbattles_per_visitor = 7\n[engine]\nthreads = 3\n')
    environ = {"ARENA_PORT": "2", "ARENA_HOST": "10.0.0.2", "HOME": "/root"}
    config = AppConfig.load({"port": 3}, file=file, environ=environ)
    assert (config.port, config.host, config.battles_per_visitor) == (3, "10.0.0.2", 7)
    assert config.answer_tokens == AppConfig().answer_tokens


def test_the_file_can_be_named_in_the_environment(tmp_path):
    file = tmp_path / "arena.toml"
    file.write_text("[web]\nport = 1\n")
    assert AppConfig.load(environ={"ARENA_CONFIG": str(file)}).port == 1


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"ARENA_PROT": "1"}, "ARENA_PROT"),
        ({"ARENA_PORT": "many"}, "ARENA_PORT"),
        ({"ARENA_PORT": "70000"}, "ARENA_PORT"),
        ({"ARENA_ADMIN_PASSWORD": "admin"}, "ARENA_ADMIN_PASSWORD"),
        ({"ARENA_ADMIN_PASSWORD": "Password"}, "ARENA_ADMIN_PASSWORD"),
        ({"ARENA_ADMIN_PASSWORD": "short"}, "ARENA_ADMIN_PASSWORD"),
        ({"ARENA_ADMIN_KEY": "change-me"}, "ARENA_ADMIN_KEY"),
        ({"ARENA_TRUSTED_PROXIES": "10.0.0.0/99"}, "ARENA_TRUSTED_PROXIES"),
        ({"ARENA_SECURE_COOKIES": "perhaps"}, "ARENA_SECURE_COOKIES"),
        ({"ARENA_DATABASE_URL": "mysql://x"}, "ARENA_DATABASE_URL"),
        ({"ARENA_DATABASE_URL": "nonsense"}, "ARENA_DATABASE_URL"),
        ({"ARENA_READER_GRACE_SECONDS": "-1"}, "ARENA_READER_GRACE_SECONDS"),
    ],
)
def test_a_wrong_setting_refuses_to_start_and_is_named(environ, key):
    with pytest.raises(ConfigError, match=key) as refused:
        AppConfig.load(environ=environ)
    assert refused.value.key == key


@pytest.mark.parametrize("text", ["[web]\nprot = 1\n", "[wob]\nport = 1\n", "port = 1\n", "[web]\nport = '1'\nx"])
def test_a_wrong_file_refuses_to_start(tmp_path, text):
    file = tmp_path / "arena.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        AppConfig.load(file=file, environ={})


def test_a_secret_is_shown_by_nothing():
    config = AppConfig(admin_password="correct horse", admin_key="battery staple", engine_api_key="a key of engine")
    assert "correct horse" not in repr(config) and "battery" not in repr(config) and "of engine" not in repr(config)
    with pytest.raises(ConfigError) as refused:
        AppConfig(admin_password="hunter2")
    assert "hunter2" not in str(refused.value)


def test_the_engines_own_settings_are_left_to_it():
    config = AppConfig.load(environ={"ARENA_ENGINE_THREADS": "4", "ARENA_CACHE": "/c", "ARENA_ENGINE_URL": "http://e"})
    assert config.engine_url == "http://e"


def test_a_child_engine_gets_our_environment_and_its_keys(tmp_path):
    config = AppConfig(engine_admin_key="a long admin key")
    given = engine_environment(config, tmp_path / "a.toml", {"ARENA_ENGINE_THREADS": "4", "ARENA_ENGINE_PORT": "1"})
    assert given == {
        "ARENA_ENGINE_THREADS": "4",
        "ARENA_CONFIG": str(tmp_path / "a.toml"),
        "ARENA_ENGINE_ADMIN_KEY": "a long admin key",
    }


def test_lists_are_read_from_text_and_from_toml(tmp_path):
    file = tmp_path / "arena.toml"
    file.write_text('[web]\ntrusted_proxies = ["10.0.0.1"]\n')
    assert AppConfig.load(file=file, environ={}).trusted_proxies == ("10.0.0.1",)
    environ = {"ARENA_TRUSTED_PROXIES": "10.0.0.1, 192.168.0.0/16"}
    assert AppConfig.load(environ=environ).trusted_proxies == ("10.0.0.1", "192.168.0.0/16")


def test_the_database_is_a_file_in_the_data_folder_unless_told_otherwise():
    assert AppConfig(data_folder=Path("/d")).database == "sqlite:////d/arena.sqlite3"
    assert AppConfig(database_url="postgresql://x/y").database == "postgresql://x/y"


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_sentence(name):
    rules = FIELDS[name].metadata
    assert rules["sentence"].endswith(".")
    assert rules["unit"] or FIELDS[name].type not in ("int", "float")


def test_the_config_is_frozen():
    config = AppConfig()
    with pytest.raises(AttributeError):
        config.port = 1
    assert {each.name for each in fields(config)} == set(FIELDS)
