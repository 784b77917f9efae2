"""Chats to token ids: a checkpoint's own chat template, rendered as transformers renders it, or a named one of ours.

What a message says is text and nothing else: a control token spelled in it ("<|im_end|>") is broken up before the
tokenizer could take it for one, while the template's own control tokens stay whole. Knows no requests and no models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from engine.errors import BadRequest, CheckpointError

Message = Mapping[str, Any]  # role, content: both text

OWN_FORMAT = "checkpoint"  # the name of a checkpoint's own template
BASE_FORMAT = "plain-roles"  # what a checkpoint without a template gets
MARK, TAILS = "\ufdd0", "\ufdd1\ufdd2"  # noncharacters: never part of text


class ChatFormat:
    """A chat template over one tokenizer. `stop`: strings that end an answer, beside the end tokens. Immutable.

    Raises CheckpointError when made of a template that does not compile.
    """

    def __init__(
        self, name: str, template: str, *, stop: Sequence[str], tokenizer: Tokenizer, special_tokens: Mapping[str, str]
    ) -> None:
        self.name = name
        self.template = template
        self.stop = tuple(stop)
        self.special_tokens = dict(special_tokens)  # bos_token, eos_token ...: text the template may name
        self._tokenizer = tokenizer
        self._control_tokens = control_token_pattern(tokenizer, template)
        try:
            self._compiled = template_environment().from_string(template)
        except TemplateError as error:
            raise CheckpointError(f"the chat template is broken: {error}") from error
        self._folds_system = not self._renders_system()

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of the chat up to where the assistant speaks. Raises BadRequest if the template refuses it.

        A template without a system role gets the system text at the head of the first user message. With
        `continue_final_message` the tokens end where the last message does, before whatever the template closes it
        with. `add_special_tokens`: also those that the tokenizer adds, beside the ones that the template writes.
        """
        if self._folds_system:
            messages = fold_system(messages)
        mark = unused_mark(messages)
        broken = [break_control_tokens(message, self._control_tokens, mark) for message in messages]
        if continue_final_message:
            text = self._render_open(broken, mark)
        else:
            text = self._render(broken, add_generation_prompt)
        pieces = self._tokenizer.encode_batch_fast(text.split(mark), add_special_tokens=False)
        tokens = [token for piece in pieces for token in piece.ids]
        return self._with_special_tokens(pieces, tokens) if add_special_tokens else tokens

    def system_prefix(self, system_prompt: str) -> list[int]:
        """The tokens that every chat with this system prompt begins with (what two different users' share)."""
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        first, second = (self.encode([*system, {"role": "user", "content": text}]) for text in ("Hi", "9?"))
        return first[: common_length(first, second)]

    def _with_special_tokens(self, pieces: list[Encoding], tokens: list[int]) -> list[int]:
        """What the tokenizer makes of the whole; of a first token that the template writes too, one."""
        whole = self._tokenizer.post_process(Encoding.merge(pieces, growing_offsets=False)).ids
        return whole[1:] if len(whole) > len(tokens) and whole[:1] == tokens[:1] else whole

    def _render_open(self, messages: Sequence[Message], mark: str) -> str:
        """The chat up to the end of what its last message says. The space behind the end mark tells whether the
        template strips messages: then it would have stripped that end too (as transformers does it)."""
        *before, last = messages
        end = f"{mark}\ufdd2 "
        text = self._render([*before, {**last, "content": last["content"] + end}], add_generation_prompt=False)
        at = text.rfind(end.rstrip())
        if at < 0:
            raise BadRequest("the chat template does not write the last message as it is", param="messages")
        return text[:at] if text.startswith(end, at) else text[:at].rstrip()

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        flags = {"add_generation_prompt": add_generation_prompt}
        try:
            return self._compiled.render(messages=messages, **flags, **self.special_tokens)
        except TemplateError as error:
            raise BadRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise BadRequest(f"the chat template fails on these messages: {error}", param="messages") from error

    def _renders_system(self) -> bool:
        probe = "a system text to look for"
        try:
            text = self._render([{"role": "system", "content": probe}, {"role": "user", "content": "hello"}])
        except BadRequest:
            return False
        return probe in text


@dataclass(frozen=True)
class NamedFormat:
    """A format of ours for base checkpoints: the template's file in chat_templates and its stop strings."""

    name: str
    stop: tuple[str, ...]

    def bind(self, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> ChatFormat:
        template = (Path(__file__).parent / "chat_templates" / f"{self.name}.jinja").read_text(encoding="utf-8")
        tokens = {"bos_token": "", **special_tokens}
        return ChatFormat(self.name, template, stop=self.stop, tokenizer=tokenizer, special_tokens=tokens)


# A base checkpoint goes on with the next turn, under the label that we gave it or one that it has made up.
LABELS = ("User:", "User answer:", "User question:", "Assistant:", "Assistant answer:", "Question:")
CHINESE_LABELS = ("用户:", "用户：", "助手:", "助手：")
STOPS = tuple(f"\n{label}" for each in LABELS for label in (each, each.lower())) + tuple(
    f"\n{label}" for label in CHINESE_LABELS
)

CHAT_FORMATS: dict[str, NamedFormat] = {format.name: format for format in (NamedFormat("plain-roles", stop=STOPS),)}


def fold_system(messages: Sequence[Message]) -> list[Message]:
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        user = rest.pop(0)
        return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]
    return [{"role": "user", "content": system["content"]}, *rest]


def control_token_pattern(tokenizer: Tokenizer, template: str) -> re.Pattern[str]:
    """Matches where a control token begins: every special token, and every added one that the template writes."""
    added = tokenizer.get_added_tokens_decoder().values()
    written = {token.content for token in added if token.content in template and not token.content.isspace()}
    control = written | {token.content for token in added if token.special}
    several = {token for token in control if len(token) > 1}
    return re.compile(f"(?={any_of(several)})(.)" if several else "(?!)", re.DOTALL)


def any_of(words: set[str]) -> str:
    """A pattern for texts that begin with one of `words`, as a tree: thousands of them cost little more than one."""
    if "" in words:
        return ""
    by_first: dict[str, set[str]] = {}
    for word in words:
        by_first.setdefault(word[0], set()).add(word[1:])
    branches = [re.escape(first) + any_of(rest) for first, rest in sorted(by_first.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def break_control_tokens(message: Message, control_tokens: re.Pattern[str], mark: str) -> Message:
    """The message with a mark inside each control token that it spells; no two pieces around a mark hold one."""
    return {
        key: control_tokens.sub(lambda match: match[0] + mark, value) if isinstance(value, str) else value
        for key, value in message.items()
    }


def unused_mark(messages: Sequence[Message]) -> str:
    """MARK, or where a message holds that, with a tail that no message has behind it: there are more tails of that
    length than places. Short, for every control token that is spelled gets one; found in one look at each text."""
    texts = [value for message in messages for value in message.values() if isinstance(value, str)]
    places = sum(text.count(MARK) for text in texts)
    length = places.bit_length()
    pattern = re.compile(f"{MARK}([{TAILS}]{{{length}}})")
    taken = {tail for text in texts for tail in pattern.findall(text)}
    return MARK + next(tail for tail in map("".join, product(TAILS, repeat=length)) if tail not in taken)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def template_environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives its templates: the sandbox, whitespace rules, and the same few helpers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only encloses."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's attribute)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
