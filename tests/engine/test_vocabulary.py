"""The bytes of single tokens, in each way that tokenizers write them."""

from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.vocabulary import Vocabulary
from tests.engine.tiny import BOS, tiny_tokenizer

TEXT = "naïve café, 你好 🦊 the end\n"


def byte_fallback_tokenizer() -> Tokenizer:
    """Sentencepiece's way, as in gemma and llama 2."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁", "e", "é", "<0xZZ>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<end>", special=True)])
    return tokenizer


def test_bytes_of_byte_level_tokens_add_up_to_the_text():
    vocabulary, tokens = Vocabulary(tokenizer := tiny_tokenizer(adds_bos=False)), tokenizer_ids(TEXT)
    assert b"".join(vocabulary.bytes_of(token) for token in tokens) == TEXT.encode()
    assert tokenizer.decode(tokens) == TEXT


def tokenizer_ids(text: str) -> list[int]:
    return tiny_tokenizer(adds_bos=False).encode(text).ids


def test_byte_tokens_and_spaces_of_sentencepiece_are_what_they_stand_for():
    tokenizer = byte_fallback_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    found = {text: vocabulary.bytes_of(tokenizer.token_to_id(text)) for text in ("<0xE2>", "▁the", "é", "<0xZZ>")}
    assert found == {"<0xE2>": b"\xe2", "▁the": b" the", "é": "é".encode(), "<0xZZ>": b"<0xZZ>"}


def test_added_tokens_stand_for_themselves_and_special_ones_for_no_text():
    tokenizer = byte_fallback_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.bytes_of(tokenizer.token_to_id("<tool>")) == b"<tool>"
    assert vocabulary.bytes_of(tokenizer.token_to_id("<end>")) is None
    assert vocabulary.name_of(tokenizer.token_to_id("<end>")) == "<end>"
    assert Vocabulary(tiny_tokenizer(adds_bos=False)).bytes_of(BOS) is None


def test_a_token_that_is_no_whole_characters_is_named_by_its_bytes():
    vocabulary = Vocabulary(byte_fallback_tokenizer())
    assert vocabulary.name_of(1 + 0xE2) == "\\xe2" and not vocabulary.is_text(1 + 0xE2)
    assert vocabulary.name_of(1 + 0x41) == "A" and vocabulary.is_text(1 + 0x41)


def test_a_token_beyond_the_tokenizer_has_no_bytes_and_still_a_name():
    vocabulary = Vocabulary(byte_fallback_tokenizer())
    assert (vocabulary.bytes_of(99_999), vocabulary.name_of(99_999)) == (None, "<token 99999>")
