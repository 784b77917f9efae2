"""Every setting of the engine: read once at start, frozen, passed down. No other module reads the environment.

defaults < the [engine] table of a TOML file < ARENA_ENGINE_* environment < flags. A key that is unknown, or a value
that is out of range, refuses to start and names the key as it was written.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

ENVIRONMENT_PREFIX = "ARENA_ENGINE_"
NOT_OURS = frozenset({"ARENA_ENGINE_URL"})  # where the website finds an engine
DEFAULT_CACHE = Path("~/.cache/paged-arena")
PRECISIONS = ("int8", "compact")  # of a model's weights; without one they are of the engine's `dtype`, as KV always is
SIZES = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def setting(
    default: Any, sentence: str, *, unit: str = "", least: int | None = None, choices: tuple = (), secret=False
):
    described = {"sentence": sentence, "unit": unit, "least": least, "choices": choices, "secret": secret}
    return field(default=default, metadata=described, repr=not secret)


@dataclass(frozen=True)
class EngineConfig:
    host: str = setting("127.0.0.1", "Address to listen on; anything but loopback needs an api_key.")
    port: int = setting(8001, "Port to listen on; 0 takes a free one and prints it.", unit="port", least=0)
    api_key: str | None = setting(
        None, "Bearer key that every request must carry; none is asked without it.", secret=True
    )
    admin_key: str | None = setting(
        None, "Bearer key for adding and removing models; the api_key where it is not set.", secret=True
    )
    kv_memory_bytes: int = setting(512 * SIZES["MiB"], "Size of the pool of KV pages.", unit="bytes", least=1024**2)
    page_bytes: int = setting(
        0,
        "Size of one page; 0 is 8,192 for bfloat16 and 16,384 for float32, which leave no padding with common shapes.",
        unit="bytes",
        least=0,
    )
    dtype: str = setting(
        "auto",
        "Type of weights and KV; auto is bfloat16 where the processor has it, else float32.",
        choices=("auto", "bfloat16", "float32"),
    )
    backend: str = setting(
        "auto",
        "Kernels to run; auto is Triton on an NVIDIA GPU, else C++ where it compiles, else the PyTorch reference.",
        choices=("auto", "triton", "cpu", "reference"),
    )
    threads: int = setting(
        0,
        "Threads of a forward; 0 takes every core this process may use, "
        "and no more than its container's share pays for.",
        unit="threads",
        least=0,
    )
    max_batch_tokens: int = setting(
        512, "Most tokens in one step, prefill chunks and decodes together.", unit="tokens", least=16
    )
    prefill_tokens_beside_decodes: int = setting(
        256, "Most prompt tokens in one step while answers stream: a bound on their pauses.", unit="tokens", least=16
    )
    max_sequences: int = setting(64, "Most sequences in one step.", unit="sequences", least=1)
    max_waiting: int = setting(1024, "Most requests that wait; one more is answered 429.", unit="requests", least=1)
    speculative_tokens: int = setting(
        0,
        "Most tokens of an answer that are guessed from the text before (prompt lookup) and checked in one step; "
        "answers stay what they are without, to the bit with the C++ kernels. 0: none.",
        unit="tokens",
        least=0,
    )
    speculative_sequences: int = setting(
        4,
        "Most sequences in a step of which tokens are guessed: with more, guesses cost more.",
        unit="sequences",
        least=1,
    )
    stall_seconds: int = setting(
        300, "How long a running request may make no progress before it is failed and logged.", unit="seconds", least=1
    )
    max_body_bytes: int = setting(8 * SIZES["MiB"], "Largest request body that is read.", unit="bytes", least=1024)
    policy: str = setting(
        "paged",
        "How KV memory is given out; max, pow2 and oracle reserve contiguously as older systems, to compare with.",
        choices=("paged", "max", "pow2", "oracle"),
    )
    enable_prefix_cache: bool = setting(True, "Whether sequences share the blocks of a common prefix.")
    check_integrity: bool = setting(
        False, "Whether the pool's invariants are checked after every step, not only at idle."
    )
    cache_folder: Path = setting(  # noqa: RUF009
        DEFAULT_CACHE,
        "Where converted checkpoints and compiled kernels are kept; also set by ARENA_CACHE.",
    )
    exit_with_parent: bool = setting(False, "Whether the engine ends when the process that started it ends.")
    parent_pid: int = setting(
        0,
        "Id of the process that exit_with_parent is about; 0 is the parent as it is found, too late where that ends "
        "within the first moments.",
        unit="pid",
        least=0,
    )
    log_level: str = setting(
        "info",
        "Least severe log line that is written to standard error.",
        choices=("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_folder", Path(self.cache_folder).expanduser())
        for each in fields(self):
            check(each.name, each, getattr(self, each.name))
        if self.page_bytes % 512:
            raise ConfigError(f"page_bytes is {self.page_bytes:,}; it must be a multiple of 512", param="page_bytes")
        if self.page_bytes > self.kv_memory_bytes:
            raise ConfigError(f"page_bytes ({self.page_bytes:,}) is more than kv_memory_bytes", param="page_bytes")
        if not self.api_key and not is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host}, which others can reach, and no api_key is set: "
                "set ARENA_ENGINE_API_KEY, or listen on 127.0.0.1",
                param="api_key",
            )

    @property
    def key_of_admin(self) -> str | None:
        return self.admin_key or self.api_key

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        file: str | Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> EngineConfig:
        """Merges the four sources; `flags` holds only what was given. Raises ConfigError, naming the key."""
        values: dict[str, Any] = {}
        file = file or environ.get("ARENA_CONFIG")
        for source in (from_file(file) if file else {}, from_environment(environ), from_flags(flags or {})):
            for written, (name, value) in source.items():
                values[name] = parse(written, name, value)
        return cls(**values)


FIELDS = {each.name: each for each in fields(EngineConfig)}


def from_file(path: str | Path) -> dict[str, tuple[str, Any]]:
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    for table in document:
        if table not in ("engine", "web") or not isinstance(document[table], dict):
            raise ConfigError(f"unknown setting: {table} in {path} (its tables are [engine] and [web])", param=table)
    return {f"engine.{key} in {path}": (key, value) for key, value in document.get("engine", {}).items()}


def from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    found = {"ARENA_CACHE": ("cache_folder", environ["ARENA_CACHE"])} if environ.get("ARENA_CACHE") else {}
    ours = (key for key in environ if key.startswith(ENVIRONMENT_PREFIX) and key not in NOT_OURS)
    return found | {key: (key.removeprefix(ENVIRONMENT_PREFIX).lower(), environ[key]) for key in ours}


def from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    return {"--" + name.replace("_", "-"): (name, value) for name, value in flags.items()}


def parse(written: str, name: str, value: Any) -> Any:
    """The value in the type of its field; text (of the environment, of flags) is read, TOML's types must fit."""
    if name not in FIELDS:
        raise ConfigError(f"unknown setting: {written}", param=written)
    each = FIELDS[name]
    if isinstance(value, str):
        value = READERS[each.type](written, value.strip(), each.metadata["unit"])
    check(written, each, value)
    return value


def read_integer(written: str, text: str, unit: str) -> int:
    number, factor = text, 1
    for suffix, size in SIZES.items():
        if unit == "bytes" and text.endswith(suffix):
            number, factor = text.removesuffix(suffix).strip(), size
    try:
        return int(number.replace("_", "")) * factor
    except ValueError:
        also = " (also as 512MiB or 2GiB)" if unit == "bytes" else ""
        raise ConfigError(f"{written} must be a whole number{also}, not {text!r}", param=written) from None


def read_boolean(written: str, text: str, unit: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ConfigError(f"{written} must be true or false, not {text!r}", param=written)
    return known[text.lower()]


READERS = {
    "int": read_integer,
    "bool": read_boolean,
    "str": lambda written, text, unit: text,
    "str | None": lambda written, text, unit: text or None,
    "Path": lambda written, text, unit: Path(text),
}
TYPES = {"int": int, "bool": bool, "str": str, "str | None": (str, type(None)), "Path": (Path, str)}
TYPE_WORDS = {"int": "a whole number", "bool": "true or false", "str": "text", "str | None": "text", "Path": "a path"}


def check(written: str, each: Any, value: Any) -> None:
    rules = each.metadata
    if not isinstance(value, TYPES[each.type]) or (each.type == "int" and isinstance(value, bool)):
        raise ConfigError(f"{written} must be {TYPE_WORDS[each.type]}, not {value!r}", param=written)
    if rules["choices"] and value not in rules["choices"]:
        raise ConfigError(f"{written} must be one of {', '.join(rules['choices'])}, not {value!r}", param=written)
    if rules["least"] is not None and value < rules["least"]:
        raise ConfigError(f"{written} must be at least {rules['least']:,}, not {value:,}", param=written)
    if rules["unit"] == "port" and value > 65535:
        raise ConfigError(f"{written} must be at most 65,535, not {value:,}", param=written)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
