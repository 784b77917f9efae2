"""Text comes out whole: no half characters, nothing of a stop string, nothing lost at the end."""

from __future__ import annotations

import random

import pytest

from engine import text_stream
from engine.text_stream import TextStream
from tests.engine.tiny import BOS, IM_END, tiny_tokenizer

TOKENIZER = tiny_tokenizer(adds_bos=False)
TEXTS = [
    "the quick brown fox jumps",
    "naïve café déjà vu",
    "你好，世界 مرحبا بالعالم",
    "🦊🚀👩‍👩‍👧‍👦 e\u0301a\u0308 \U0001f1e9\U0001f1ea",
    "",
    " leading and  double  spaces \n\n",
]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def stream_out(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push(token) for token in ids] + [stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_hold_whole_characters(text):
    pieces = stream_out(TextStream(TOKENIZER, ids_of("user: ")), ids_of(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_every_piece_comes_as_soon_as_it_is_certain():
    ids = ids_of("fox 🦊!")
    pieces = stream_out(TextStream(TOKENIZER, []), ids)
    assert pieces[0] != "" and pieces[-1] == ""
    assert [piece for piece in pieces if "🦊" in piece] == ["🦊"]


def test_an_answer_that_ends_inside_a_character_drops_it():
    ids = ids_of("ok 🦊")
    assert "".join(stream_out(TextStream(TOKENIZER, []), ids[:-1])) == "ok "


@pytest.mark.parametrize("before", ["a ", "", "user: 你"])
def test_a_prompt_that_ends_inside_a_character_shows_that_character_alone(before):
    fox = ids_of("🦊")
    pieces = stream_out(TextStream(TOKENIZER, [*ids_of(before), *fox[:-1]]), [fox[-1], *ids_of(" and 🚀")])
    assert "".join(pieces) == "🦊 and 🚀"


def test_a_prompts_half_character_that_the_answer_does_not_finish_is_dropped():
    fox = ids_of("🦊")
    assert "".join(stream_out(TextStream(TOKENIZER, fox[:-1]), ids_of("ok"))) == "ok"
    assert "".join(stream_out(TextStream(TOKENIZER, [fox[-1]] * 9), ids_of("ok"))) == "ok"
    assert "".join(stream_out(TextStream(TOKENIZER, ids_of("a\ufffd")), ids_of("ok"))) == "ok"


def test_special_tokens_have_no_text():
    ids = [BOS, *ids_of("fox"), IM_END, *ids_of(" 🦊")[:2], BOS, *ids_of(" 🦊")[2:]]
    assert "fox" in "".join(stream_out(TextStream(TOKENIZER, [BOS, 3]), ids))
    assert "<" not in "".join(stream_out(TextStream(TOKENIZER, [BOS, 3]), ids))


def naive(text: str, stop: list[str]) -> str:
    """The definition: the text before the first stop string."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]


@pytest.mark.parametrize("seed", range(200))
def test_no_character_of_a_stop_string_leaks_and_none_is_lost(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice(["a", "b", "ab", "\n", "U", "User:", "é", "🦊"]) for _ in range(rng.randint(0, 30)))
    stop = [s for s in rng.sample(["ab\n", "\nUser:", "aab", "🦊é", "bU", "User: ", "b"], rng.randint(0, 3)) if s]
    stream = TextStream(TOKENIZER, ids_of("x"), stop)
    pieces = stream_out(stream, ids_of(text))
    assert "".join(pieces) == naive(text, stop)
    shown = ""
    for piece in pieces:
        shown += piece
        assert naive(text, stop).startswith(shown)
    assert (stream.stopped in stop) if any(s in text for s in stop) else stream.stopped is None


def test_a_stop_string_over_several_tokens_is_held_back_token_by_token():
    stream = TextStream(TOKENIZER, [], ["\nUser:"])
    assert [stream.push(token) for token in ids_of("a\nUs")] == ["a", "", "", ""]
    assert stream.push(ids_of("x")[0]) == "\nUsx"
    assert not any(stream.push(token) for token in ids_of("\nUser:"))
    assert stream.stopped == "\nUser:"
    assert stream.push(ids_of("a")[0]) == "" and stream.flush() == ""


def test_what_was_held_back_comes_at_the_end():
    stream = TextStream(TOKENIZER, [], ["\nUser:"])
    assert "".join(stream.push(token) for token in ids_of("a\nUser")) == "a"
    assert stream.flush() == "\nUser"
    assert stream.stopped is None


def test_stop_strings_wait_for_min_tokens():
    stream = TextStream(TOKENIZER, [], ["b"], min_tokens=2)
    assert "".join(stream.push(token) for token in ids_of("bbab")) == "bba"
    assert stream.stopped == "b"


def test_empty_stop_strings_stop_nothing():
    assert "".join(stream_out(TextStream(TOKENIZER, [], [""]), ids_of("abc"))) == "abc"


@pytest.mark.parametrize("text", TEXTS)
def test_text_after_a_long_prompt_is_what_it_is_after_a_short_one(text):
    prompt = ids_of("user: " + "你好 fox 🦊 " * 40)
    assert "".join(stream_out(TextStream(TOKENIZER, prompt), ids_of(text))) == text


def test_of_a_long_prompt_only_the_end_is_decoded(monkeypatch):
    primed = []
    monkeypatch.setattr(text_stream, "DecodeStream", lambda ids, **_: primed.append(len(ids)))
    TextStream(TOKENIZER, ids_of("fox " * 2000))
    assert primed[0] <= 64
