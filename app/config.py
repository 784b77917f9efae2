"""Every setting of the website: read once at start, frozen, passed down. No other module reads the environment.

defaults < the [web] table of a TOML file < ARENA_* environment < flags. A key that is unknown, a value out of range or
a secret that anybody would guess refuses to start and names the key as it was written. The engine's own settings are
the [engine] table and ARENA_ENGINE_*; only the few that say how to reach it are settings of ours too.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from app.errors import BadInput, ConfigError
from db.connect import address

PREFIX = "ARENA_"
ENGINE_PREFIX = "ARENA_ENGINE_"
NOT_OURS = frozenset({"ARENA_CONFIG", "ARENA_CACHE", "ARENA_SHARED_DATA", "ARENA_CHROMIUM"})
GUESSABLE = frozenset(
    [
        "admin",
        "administrator",
        "arena",
        "change-me",
        "change_me",
        "changeme",
        "default",
        "letmein",
        "pass",
        "passw0rd",
        "password",
        "paged-arena",
        "qwerty",
        "root",
        "secret",
        "test",
        "12345678",
        "123456789",
        "1234567890",
        "admin123",
        "password1",
        "paged_arena",
    ]
)


def setting(default: Any, sentence: str, *, unit: str = "", least: float | None = None, secret: bool = False):
    described = {"sentence": sentence, "unit": unit, "least": least, "secret": secret}
    return field(default=default, metadata=described, repr=not secret)


@dataclass(frozen=True)
class AppConfig:
    host: str = setting("127.0.0.1", "Address the website listens on.")
    port: int = setting(7860, "Port the website listens on; 0 takes a free one and prints it.", unit="port", least=0)
    data_folder: Path = setting(Path("data"), "Where the SQLite file, secrets and logs are kept.")  # noqa: RUF009
    database_url: str = setting(
        "", "sqlite:/// or postgresql:// address of the database; empty is a SQLite file in data_folder."
    )
    engine_url: str = setting("", "Address of a running engine; empty starts one of our own as a child process.")
    engine_port: int = setting(
        8001, "Port of the child engine on 127.0.0.1; a free one if it is taken.", unit="port", least=0
    )
    engine_api_key: str = setting("", "Key the engine asks for with every request.", secret=True)
    engine_admin_key: str = setting("", "Key the engine asks for when models are added or removed.", secret=True)
    hang_seconds: float = setting(
        60.0,
        "How long an engine of our own may take for one step, or answer nothing, before it is started again.",
        unit="seconds",
        least=1,
    )
    admin_password: str = setting(
        "", "Password of /admin; without it one is made up and printed once, when data_folder is new.", secret=True
    )
    admin_key: str = setting("", "Bearer key of /api/admin; without it the admin password is that key.", secret=True)
    vote_log_key: str = setting(
        "",
        "Key that signs the head of the vote log; empty takes the secret of data_folder. "
        "Processes on one database need the same.",
        secret=True,
    )
    secure_cookies: bool = setting(False, "Whether cookies are sent over https only, even where we see plain http.")
    trusted_proxies: tuple[str, ...] = setting(
        (),
        "Addresses or networks of reverse proxies, separated by commas, whose X-Forwarded-For and -Proto are believed.",
    )
    battles_per_visitor: int = setting(100, "Battles one visitor may start in an hour.", unit="battles", least=1)
    battles_per_address: int = setting(
        400, "Battles one network address may start in an hour.", unit="battles", least=1
    )
    turns_per_battle: int = setting(20, "Most questions in one battle.", unit="turns", least=1)
    attempts_per_turn: int = setting(10, "How often one question may be answered anew.", unit="attempts", least=1)
    answer_tokens: int = setting(
        512, "Longest answer; a model may ask for less in its sampling defaults.", unit="tokens", least=1
    )
    max_body_bytes: int = setting(4 * 1024 * 1024, "Largest request body that is read.", unit="bytes", least=1024)
    reader_grace_seconds: float = setting(
        1.8, "How long a turn goes on with nobody reading it before both sides stop.", unit="seconds", least=0.1
    )
    silence_seconds: float = setting(
        60.0, "How long a side may bring no text before it counts as failed.", unit="seconds", least=0.1
    )
    reveal_characters_per_second: float = setting(
        300.0, "Fastest pace at which the text of both sides is shown.", unit="characters/second", least=1
    )
    reveal_lag_seconds: float = setting(
        10.0,
        "How long a side may lag behind its own text once the other has ended.",
        unit="seconds",
        least=0,
    )
    sync_seconds: float = setting(
        1.0, "How often the models of the database are compared with those of the engines.", unit="seconds", least=0.05
    )
    remote_timeout_seconds: float = setting(
        5.0, "How long a remote endpoint may take to list its models.", unit="seconds", least=0.1
    )
    log_to_stderr: bool = setting(False, "Whether log lines go to standard error, not to files in data_folder/logs.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "data_folder", Path(self.data_folder).expanduser())
        object.__setattr__(self, "trusted_proxies", tuple(self.trusted_proxies))
        for each in fields(self):
            check(each.name, each, getattr(self, each.name))

    @property
    def database(self) -> str:
        """The address to connect to, with the default filled in."""
        return self.database_url or f"sqlite:///{self.data_folder.absolute() / 'arena.sqlite3'}"

    def require_database(self) -> None:
        """For what only reads: raises BadInput where the SQLite file is not there, which connecting would make."""
        url = address(self.database)
        if url.get_backend_name() == "sqlite" and not Path(url.database).is_file():
            raise BadInput(f"there is no database at {url.database}: arena serve makes one")

    @property
    def proxy_networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        return tuple(ipaddress.ip_network(each) for each in self.trusted_proxies)

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        file: str | Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> AppConfig:
        """Merges the four sources; `flags` holds only what was given. Raises ConfigError, naming the key."""
        values: dict[str, Any] = {}
        file = file or environ.get("ARENA_CONFIG")
        for source in (from_file(file) if file else {}, from_environment(environ), from_flags(flags or {})):
            for written, (name, value) in source.items():
                values[name] = parse(written, name, value)
        return cls(**values)


FIELDS = {each.name: each for each in fields(AppConfig)}


def engine_environment(
    config: AppConfig | None = None, file: str | Path | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What an engine is started with: our environment, our config file, and the keys that only we need to know."""
    found = dict(environ) | ({"ARENA_CONFIG": str(file)} if file else {})
    if config:
        found.pop("ARENA_ENGINE_PORT", None)  # comes as a flag
        keys = {"ARENA_ENGINE_API_KEY": config.engine_api_key, "ARENA_ENGINE_ADMIN_KEY": config.engine_admin_key}
        found |= {name: key for name, key in keys.items() if key}
    return found


def environment_without_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Our environment less every ARENA_ setting: what a process begins with whose settings are all given to it."""
    return {key: value for key, value in environ.items() if not key.startswith(PREFIX)}


def endpoint_key(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key of a remote endpoint, held in the environment variable of that name; None where it is not set."""
    return environ.get(name) or None


def from_file(path: str | Path) -> dict[str, tuple[str, Any]]:
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}", key=str(path)) from error
    for table in document:
        if table not in ("web", "engine"):
            raise ConfigError(f"unknown setting: {table} in {path} (its tables are [web] and [engine])", key=table)
    return {f"web.{key} in {path}": (key, value) for key, value in document.get("web", {}).items()}


def from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Ours, and of the engine's only those that we have too: the others are for the engine to read."""
    found = {}
    for key, value in environ.items():
        name = key.removeprefix(PREFIX).lower()
        if key.startswith(PREFIX) and key not in NOT_OURS and (name in FIELDS or not key.startswith(ENGINE_PREFIX)):
            found[key] = (name, value)
    return found


def from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    return {"--" + name.replace("_", "-"): (name, value) for name, value in flags.items()}


def parse(written: str, name: str, value: Any) -> Any:
    """The value in the type of its field; text (of the environment, of flags) is read, TOML's types must fit."""
    if name not in FIELDS:
        raise ConfigError(f"unknown setting: {written}", key=written)
    each = FIELDS[name]
    if isinstance(value, str):
        value = READERS[each.type](written, value.strip())
    elif each.type == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif isinstance(value, list):
        value = tuple(value)
    check(written, each, value)
    return value


def read_number(kind: type, words: str):
    def read(written: str, text: str) -> Any:
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{written} must be {words}, not {text!r}", key=written) from None

    return read


def read_boolean(written: str, text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ConfigError(f"{written} must be true or false, not {text!r}", key=written)
    return known[text.lower()]


READERS = {
    "int": read_number(int, "a whole number"),
    "float": read_number(float, "a number"),
    "bool": read_boolean,
    "str": lambda written, text: text,
    "Path": lambda written, text: Path(text),
    "tuple[str, ...]": lambda written, text: tuple(part.strip() for part in text.split(",") if part.strip()),
}
TYPES = {"int": int, "float": float, "bool": bool, "str": str, "Path": (Path, str), "tuple[str, ...]": tuple}
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "Path": "a path",
    "tuple[str, ...]": "a list of texts",
}


def check(written: str, each: Any, value: Any) -> None:
    """Raises ConfigError; a secret's value is never part of the sentence."""
    rules = each.metadata
    if not isinstance(value, TYPES[each.type]) or (each.type in ("int", "float") and isinstance(value, bool)):
        raise ConfigError(f"{written} must be {WORDS[each.type]}", key=written)
    if rules["least"] is not None and value < rules["least"]:
        raise ConfigError(f"{written} must be at least {rules['least']:,}, not {value:,}", key=written)
    if rules["unit"] == "port" and value > 65535:
        raise ConfigError(f"{written} must be at most 65,535, not {value:,}", key=written)
    if rules["secret"] and value and (value.lower() in GUESSABLE or len(value) < 8):
        raise ConfigError(
            f"{written} is a secret that anybody would guess: use 8 characters or more, and none of the usual words",
            key=written,
        )
    if each.name == "database_url" and value:
        try:
            address(value)
        except ValueError as error:
            raise ConfigError(f"{written}: {error}", key=written) from None
    if each.name == "trusted_proxies":
        for network in value:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ConfigError(f"{written}: {error}", key=written) from None
