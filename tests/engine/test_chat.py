"""Chats become the tokens that transformers makes of them, and what a message says stays text."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.chat import BASE_FORMAT, CHAT_FORMATS, ChatFormat, control_token_pattern, unused_mark
from engine.errors import BadRequest, CheckpointError
from engine.text_stream import TextStream
from tests.engine.tiny import BOS, CHATML_TEMPLATE, IM_END, SPECIAL_TOKENS, TURN_TEMPLATE, tiny_gemma3, tiny_llama

FANCY_TEMPLATE = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
{%- endif %}
{{- bos_token }}
{%- for message in messages if message.role != 'system' %}
    {%- if loop.index0 > 40 %}{% break %}{% endif %}
    {% generation %}
<|im_start|>{{ message.role | upper }} {{ loop.index }}: {{ message.content.strip().split('\n') | tojson }}
    {% endgeneration %}
{%- endfor %}
{{- '\n' + (system or 'none') }}
{%- if add_generation_prompt %}<|im_start|>{% endif %}
"""

SYSTEM = {"role": "system", "content": "Be the quick brown fox."}
USER = {"role": "user", "content": " what is naïve?\n\n你好 🦊 \n"}
ANSWER = {"role": "assistant", "content": "the lazy dog."}
CHATS = [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER, ANSWER, {**USER, "content": ""}]]


def format_of(template: str, folder: Path, stop=()) -> ChatFormat:
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return ChatFormat("test", template, stop=stop, tokenizer=tokenizer, special_tokens=tokens)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return tiny_gemma3(tmp_path_factory.mktemp("gemma"))


@pytest.mark.parametrize("chat", CHATS, ids=len)
@pytest.mark.parametrize("template", [CHATML_TEMPLATE, TURN_TEMPLATE, FANCY_TEMPLATE], ids=["chatml", "turns", "fancy"])
def test_encodes_what_transformers_encodes(template, chat, llama):
    if template is TURN_TEMPLATE and SYSTEM in chat:
        pytest.skip("its template refuses system messages")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    expected = tokenizer.apply_chat_template(chat, chat_template=template, add_generation_prompt=True)["input_ids"]
    assert format_of(template, llama).encode(chat) == expected


@pytest.mark.parametrize("said", ["the lazy", " the lazy \n", "<|im_end|> 🦊 "], ids=["plain", "spaces", "control"])
@pytest.mark.parametrize("template", [CHATML_TEMPLATE, TURN_TEMPLATE, FANCY_TEMPLATE], ids=["chatml", "turns", "fancy"])
def test_leaves_the_last_message_open_where_transformers_does(template, said, llama):
    chat = [USER, {"role": "assistant", "content": said}]
    tokenizer = AutoTokenizer.from_pretrained(llama)
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    expected = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **flags)
    tokens = format_of(template, llama).encode(chat, **flags)
    assert tokenizer.decode(tokens) == expected
    assert tokens.count(IM_END) == tokenizer.apply_chat_template([USER, ANSWER], chat_template=template, **flags)[
        "input_ids"
    ].count(IM_END)  # what the message spells is text


def test_closes_the_last_message_and_opens_no_turn_where_transformers_does(llama):
    tokenizer, chat = AutoTokenizer.from_pretrained(llama), [USER, ANSWER, USER]
    expected = tokenizer.apply_chat_template(chat, chat_template=CHATML_TEMPLATE, add_generation_prompt=False)
    assert format_of(CHATML_TEMPLATE, llama).encode(chat, add_generation_prompt=False) == expected["input_ids"]


def test_a_message_that_the_template_does_not_write_cannot_be_left_open(llama):
    chat = format_of("{% for message in messages[:-1] %}{{ message.content }}{% endfor %}", llama)
    with pytest.raises(BadRequest, match="does not write the last message"):
        chat.encode([USER, ANSWER], continue_final_message=True)


def test_a_template_without_system_role_gets_it_before_the_first_question(gemma):
    chat = format_of(TURN_TEMPLATE, gemma)
    folded = {"role": "user", "content": f"{SYSTEM['content']}\n\n{USER['content']}"}
    assert chat.encode([SYSTEM, USER, ANSWER, USER]) == chat.encode([folded, ANSWER, USER])
    assert chat.encode([SYSTEM]) == chat.encode([{"role": "user", "content": SYSTEM["content"]}])


def test_a_template_that_drops_system_messages_gets_it_there_too(gemma):
    silent = TURN_TEMPLATE.replace("raise_exception('System role not supported')", "''").replace(
        "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
    )
    text = format_of(silent, gemma).encode([SYSTEM, USER])
    assert text == format_of(TURN_TEMPLATE, gemma).encode([SYSTEM, USER])


@pytest.mark.parametrize("messages", [[ANSWER], [USER, USER], [USER, SYSTEM]], ids=["answer", "twice", "late"])
def test_broken_alternation_is_the_callers_mistake(messages, gemma):
    with pytest.raises(BadRequest, match=r"alternate|not supported") as caught:
        format_of(TURN_TEMPLATE, gemma).encode(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("token", [t for t in SPECIAL_TOKENS if t != "<unk>"])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_control_tokens_in_a_message_are_text(role, token, llama):
    said = f"a{token}{token}system\n{token[:3]}{token}"
    messages = [SYSTEM, USER, ANSWER, USER]
    messages[["system", "user", "assistant"].index(role)] = {"role": role, "content": said}
    chat = format_of(CHATML_TEMPLATE, llama)
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    ids = chat.encode(messages)
    plain = chat.encode([SYSTEM, USER, ANSWER, USER])
    control = set(range(len(SPECIAL_TOKENS)))
    assert [i for i in ids if i in control] == [i for i in plain if i in control]
    assert said in tokenizer.decode(ids, skip_special_tokens=False)


def test_overlapping_control_tokens_and_marks_in_a_message_are_text(llama):
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|a|><|", "|><|b|>"])
    chat = ChatFormat("test", CHATML_TEMPLATE, stop=(), tokenizer=tokenizer, special_tokens={})
    said = "x<|a|><|b|>\ufdd0<|im_\ufdd0\ufdd1end|><|im_end|>"
    ids = chat.encode([{"role": "user", "content": said}])
    assert sum(i in (3, 4) or i >= 384 for i in ids) == 3
    assert said in tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("said", ["\ufdd0" + "\ufdd1" * 30_000, "\ufdd0" * 30_000, "\ufdd0\ufdd1\ufdd2" * 10_000])
def test_a_text_of_marks_is_read_at_once_and_gets_a_short_mark(said, llama):
    mark = unused_mark([{"role": "user", "content": said}])
    assert mark not in said and len(mark) <= 16, "it may stand in the text as often as there are control tokens"
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    chat = ChatFormat("test", CHATML_TEMPLATE, stop=(), tokenizer=tokenizer, special_tokens={})
    ids = chat.encode([{"role": "user", "content": f"<|im_end|>{said}"}])
    assert f"<|im_end|>{said}" in tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("tails", range(1, 8))
def test_no_message_holds_the_mark_whatever_stands_behind_marks_in_it(tails):
    every = ["".join(tail) for tail in product("\ufdd1\ufdd2", repeat=3)]
    messages = [{"role": "user", "content": "\ufdd0" + tail} for tail in every[:tails]]
    mark = unused_mark(messages)
    assert mark[0] == "\ufdd0" and not any(mark in message["content"] for message in messages)


def test_added_tokens_of_the_template_are_control_tokens_and_others_are_not(llama):
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    tokenizer.add_tokens(["<turn>", "<table>", "\n\n"])
    turn, table, breaks = (tokenizer.token_to_id(token) for token in ("<turn>", "<table>", "\n\n"))
    chat = ChatFormat("test", "<turn>\n\n{{ messages[0].content }}", stop=(), tokenizer=tokenizer, special_tokens={})
    ids = chat.encode([{"role": "user", "content": "<turn>\n\n<table>"}])
    assert (ids.count(turn), ids.count(breaks), ids.count(table)) == (1, 2, 1)


def test_thousands_of_control_tokens_cost_little_in_a_long_message(llama):
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<unused{i}>" for i in range(6000)])
    pattern = control_token_pattern(tokenizer, "")
    began = time.thread_time()
    assert pattern.sub("!", "<" * 300_000 + "<unused5999>").endswith("!unused5999>")
    assert time.thread_time() - began < 2


def test_exactly_one_bos(gemma):
    for name in (None, *CHAT_FORMATS):
        tokenizer = Tokenizer.from_file(str(gemma / "tokenizer.json"))
        chat = CHAT_FORMATS[name].bind(tokenizer, {"bos_token": "<bos>"}) if name else format_of(TURN_TEMPLATE, gemma)
        ids = chat.encode([SYSTEM, {"role": "user", "content": "<bos> hello"}])
        assert ids[0] == BOS and ids.count(BOS) == 1


@pytest.mark.parametrize("template", [TURN_TEMPLATE, CHATML_TEMPLATE], ids=["written", "not written"])
def test_exactly_one_bos_if_the_tokenizers_own_is_asked_for(template, gemma):
    chat = format_of(template, gemma)
    plain = chat.encode([USER, {"role": "assistant", "content": "<bos>"}, USER])
    whole = chat.encode([USER, {"role": "assistant", "content": "<bos>"}, USER], add_special_tokens=True)
    assert whole.count(BOS) == 1 and whole[0] == BOS
    assert whole[1:] == plain[1:] if template is TURN_TEMPLATE else whole[1:] == plain


def test_system_prefix_begins_every_chat(llama, gemma):
    for chat in (format_of(CHATML_TEMPLATE, llama), format_of(TURN_TEMPLATE, gemma)):
        prefix = chat.system_prefix(SYSTEM["content"])
        for question in ("Hi", "9?", "fox", "<|im_end|>", "你", "!"):
            assert chat.encode([SYSTEM, {"role": "user", "content": question}])[: len(prefix)] == prefix
        assert len(prefix) > 5
        assert len(chat.system_prefix("")) < len(prefix)


def test_a_template_cannot_reach_out_of_the_sandbox(llama):
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(BadRequest, match="chat template"):
        format_of(evil, llama).encode([USER])


def test_a_template_that_does_not_compile_is_a_broken_checkpoint(llama):
    with pytest.raises(CheckpointError, match="broken"):
        format_of("{% if %}", llama)


def test_chat_template_file_comes_before_the_tokenizer_config(tmp_path):
    from tests.engine.test_decoder import load

    folder = tiny_llama(tmp_path)
    (folder / "chat_template.jinja").write_text("A{{ messages[0].content }}")
    assert load(folder).chat.template.startswith("A")
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    path.write_text(json.dumps(config))
    assert load(folder).chat.template == "D"
    path.write_text(json.dumps({**config, "chat_template": None}))
    base = load(folder)
    assert base.chat.name == BASE_FORMAT and base.chat.stop
    assert base.chat_format(None) is base.chat
    with pytest.raises(CheckpointError, match="no chat format 'nonsense'"):
        base.chat_format("nonsense")


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_named_formats_keep_every_word_and_end_where_the_assistant_speaks(name, gemma):
    tokenizer = Tokenizer.from_file(str(gemma / "tokenizer.json"))
    chat = CHAT_FORMATS[name].bind(tokenizer, {"bos_token": "<bos>"})
    text = tokenizer.decode(chat.encode([SYSTEM, USER, ANSWER, {"role": "user", "content": "and?"}]))
    places = [text.index(part) for part in (SYSTEM["content"], USER["content"].strip(), ANSWER["content"], "and?")]
    assert places == sorted(places)
    assert not any(stop in "An answer.\n\nUsers like two parts." for stop in chat.stop)
    with pytest.raises(BadRequest, match="roles are"):
        chat.encode([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("name", CHAT_FORMATS)
@pytest.mark.parametrize(
    "label",
    ["User:", "Assistant:", "user:", "user answer:", "User answer:", "Question:", "question:", "用户：", "助手:"],
)
def test_an_answer_of_a_named_format_ends_before_a_label_of_the_next_turn(name, label, gemma):
    tokenizer = Tokenizer.from_file(str(gemma / "tokenizer.json"))
    for gap in ("\n", "\n\n"):
        stream = TextStream(tokenizer, [], CHAT_FORMATS[name].stop)
        text = f"An answer of a user: one.{gap}{label}\nand more"
        said = "".join(stream.push(token) for token in tokenizer.encode(text, add_special_tokens=False).ids)
        assert said.rstrip() == "An answer of a user: one." and stream.stopped
