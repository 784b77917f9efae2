"""Whether a conversation gives a model away: its own name, or its maker's, in a question or an answer.

A vote on such a battle is not blind and is not rated. The visitor is told after the vote, with the names: told before,
"a name of one of the two stands here" would itself give the model away to whoever typed it. Pure; knows no database.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

# Names under which models are known whatever their versions are called; only such as are no words for anything else.
FAMILIES = frozenset(
    (
        *("alpaca", "bloomz", "chatglm", "chatgpt", "claude", "codellama", "dbrx", "deepseek", "gemma", "glm", "gpt"),
        *("grok", "internlm", "kimi", "llama", "minicpm", "minimax", "mistral", "mixtral", "mpt", "nemotron", "olmo"),
        *("openchat", "pythia", "qwen", "qwq", "rwkv", "smollm", "stablelm", "tinyllama", "tulu", "vicuna", "wizardlm"),
    )
)
GLUED = (  # scripts without spaces between words
    r"\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff"
    r"\u3130-\u318f\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
)
LETTER = rf"[^\W_{GLUED}]"  # of a script that puts spaces between words
TOKENS = re.compile(r"[^\W\d_]+|\d+")


@dataclass(frozen=True)
class Named:
    """Which model, by side, and what of it stood in the conversation."""

    side: str
    term: str


def terms(name: str, source: str = "", organisation: str | None = None, adapter: str | None = None) -> tuple[str, ...]:
    """What gives a model away: its name, the family in it, the checkpoint's name, an adapter's, the organisation."""
    found = [name, organisation or ""]
    for written in (source, adapter or ""):
        scheme, _, rest = written.partition(":")
        if scheme == "hf":
            found += rest.partition("@")[0].split("/")
        elif scheme == "openai":
            found.append(rest.partition("#")[2].rpartition("/")[2])
    for text in (name, *found[2:]):
        words = {word.casefold() for word in TOKENS.findall(text)}
        found += sorted(words & FAMILIES)
    return tuple(dict.fromkeys(term.strip() for term in found if len(term.strip()) > 1))


def find(texts: Iterable[str], models: Mapping[str, Sequence[str]]) -> Named | None:
    """The first of the models' terms (by side) in the texts, as a word of its own: "bombard" is no "bard"."""
    for text in texts:
        plain = normal(text)
        for side, names in models.items():
            for term in names:
                if (pattern := _pattern(term)) and pattern.search(plain):
                    return Named(side, term)
    return None


def normal(text: str) -> str:
    """One form for what looks the same: compatible letters, no case, no marks that have no width."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(char for char in folded if unicodedata.category(char) != "Cf")


@lru_cache(maxsize=4096)
def _pattern(term: str) -> re.Pattern | None:
    """The term's words with anything but letters between them: "SmolLM2 135M" is "smollm2-135m". At either end no
    letter or digit may follow, of a script with words; none of the others has spaces to tell by. Behind a family its
    version may: "Llama3" is one of the llamas."""
    words = TOKENS.findall(normal(term))
    if not words:
        return None
    first, last = words[0][0], words[-1][-1]
    before = rf"(?<!{LETTER})" if re.match(LETTER, first) else ""
    follows = rf"[^\W\d_{GLUED}]" if normal(term) in FAMILIES else LETTER
    after = rf"(?!{follows})" if re.match(LETTER, last) else ""
    return re.compile(before + r"[\W_]{0,3}".join(map(re.escape, words)) + after)
