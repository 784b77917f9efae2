"""What the tokens of one tokenizer stand for, one at a time: their bytes, which may be half a character.

A tokenizer's `decode` gives text, and text has no half characters. So the bytes are read from the vocabulary, in the
three ways in which it writes them: byte-level (each byte a printable character), byte fallback (`<0xE2>` beside
ordinary text with ▁ for a space), and literally, as all added tokens are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """Bytes and names of a tokenizer's tokens, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token: entry.content for token, entry in added.items()}
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        decoders = list(parts_of(json.loads(tokenizer.decoder.__getstate__()))) if tokenizer.decoder else []
        self._byte_level = any(part["type"] == "ByteLevel" for part in decoders)
        self._byte_fallback = any(part["type"] == "ByteFallback" for part in decoders)
        self._spaces = [text for part in decoders if (text := written_for_a_space(part))]
        self._known: dict[int, bytes | None] = {}

    def bytes_of(self, token: int) -> bytes | None:
        """None for a special token, which has no text, and for one that the tokenizer does not know."""
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def name_of(self, token: int) -> str:
        """The token as text; one that is no whole characters by its bytes, as OpenAI writes them: \\xe2\\x80."""
        content = self.bytes_of(token)
        if content is None:
            return self._tokenizer.id_to_token(token) or f"<token {token}>"
        return content.decode() if decodes(content) else "".join(f"\\x{byte:02x}" for byte in content)

    def is_text(self, token: int) -> bool:
        """Whether the token is whole characters, so that its name is its text."""
        content = self.bytes_of(token)
        return content is not None and decodes(content)

    def _look_up(self, token: int) -> bytes | None:
        if token in self._special:
            return None
        if token in self._added:
            return self._added[token].encode()
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return None
        if self._byte_level and all(character in BYTE_OF for character in written):
            return bytes(BYTE_OF[character] for character in written)
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(written)):
            return bytes.fromhex(byte[1])
        for space in self._spaces:
            written = written.replace(space, " ")
        return written.encode()


@dataclass(frozen=True)
class Spelling:
    """A vocabulary as one answer writes it. `as_ids`: names are ids, so no two tokens have one. `special`: special
    tokens are text."""

    vocabulary: Vocabulary
    as_ids: bool = False
    special: bool = False

    def bytes_of(self, token: int) -> bytes | None:
        content = self.vocabulary.bytes_of(token)
        return self.vocabulary.name_of(token).encode() if content is None and self.special else content

    def name_of(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.vocabulary.name_of(token)

    def is_text(self, token: int) -> bool:
        content = self.bytes_of(token)
        return self.as_ids or (content is not None and decodes(content))


def decodes(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def parts_of(decoder: dict) -> Iterable[dict]:
    """The decoders that a decoder consists of."""
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from parts_of(part)
    else:
        yield decoder


def written_for_a_space(decoder: dict) -> str | None:
    if decoder["type"] == "Metaspace":
        return decoder["replacement"]
    if decoder["type"] == "Replace" and decoder["content"] == " ":
        return decoder["pattern"].get("String")
    return None


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = byte_alphabet()
