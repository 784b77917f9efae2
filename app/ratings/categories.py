"""Categories: which votes a board is about. Each is a rule that anyone can apply again, written down in one table.

Rules see the conversation alone: prompts and both answers. No model judges; so `hard` is about what a prompt asks for
and not about who would fail at it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.ratings.style import estimated_tokens

LONG_TOKENS = 500
HARD_SIGNS = 3

# Anybody's text is searched, so no pattern may try a place again and again: hence the possessive `++` and `*+`, lines
# that begin with space but not with a line break, and no `.*?` before what it could pass over.
CODE = re.compile(r"```|^[^\S\n]*+(?:def |class |import |#include|SELECT |function )", re.MULTILINE)
LIST_ITEM = r"(?:\d++[.)]|[-*•])(?=\s).*"
LETTER = re.compile(r"[^\W\d_]")
SCRIPTS = {
    "chinese": re.compile(r"[\u3400-\u9fff]"),
    "japanese": re.compile(r"[\u3040-\u30ff]"),
    "korean": re.compile(r"[\uac00-\ud7af]"),
    "russian": re.compile(r"[\u0400-\u04ff]"),
}
COMMON_WORDS = {  # that the other languages here do not have
    "english": "the and is of what how you with for this are that write can why",
    "german": "der die und ist nicht wie ein eine ich das mit für was schreibe",
    "french": "le les est une des dans pour que qui quelle comment avec sur écris",
    "spanish": "el los es una que para con por como qué cuál escribe del las",
}
SIGNS_OF_HARD = {
    "asks for steps or reasons": re.compile(
        r"\b(?:prove|derive|explain why|step by step|compare|analy[sz]e|design|debug|optimi[sz]e)\b"
        r"|证明|推导|逐步|分析|设计|比较",
        re.I,
    ),
    "sets bounds": re.compile(
        r"\b(?:must|at most|at least|exactly|without|only|no more than|between)\b|必须|至少|至多|不超过|恰好", re.I
    ),
    "has numbers or formulas": re.compile(r"(?<!\d)\d++(?:\.\d++)?\s*+(?:%|[a-zA-Z]+\b)|[=<>^∑∫√]|\$[^$]+\$"),
    "shows code": CODE,
    "is of several parts": re.compile(rf"^[^\S\n]*+{LIST_ITEM}\n\s*+{LIST_ITEM}|\?[^?]+\?|？[^？]+？", re.MULTILINE),
    "is of 40 words or more": re.compile(
        r"(?<!\S)(?:\S++\s++){39}\S|[\u3400-\u9fff](?:[^\u3400-\u9fff]*+[\u3400-\u9fff]){59}"
    ),
}


@dataclass(frozen=True)
class Category:
    """`rule` is the sentence that readers see; `holds(prompts, answers)` is the same in code."""

    name: str
    rule: str
    holds: Callable[[Sequence[str], Sequence[str]], bool]


def language_of(prompts: Sequence[str]) -> str | None:
    """By script, then by common words; None where nothing tells."""
    text = " ".join(prompts)
    letters = len(LETTER.findall(text)) or 1
    found = {name: len(script.findall(text)) / letters for name, script in SCRIPTS.items()}
    if found["japanese"] > 0.1:
        return "japanese"
    script = max(found, key=found.get)
    if found[script] > 0.3:
        return script
    words = re.findall(r"[^\W\d_]+", text.lower())
    score = {name: sum(word in common.split() for word in words) for name, common in COMMON_WORDS.items()}
    best = max(score, key=score.get)
    tied = sum(value == score[best] for value in score.values()) > 1
    return None if not score[best] or tied else best


def _is_in(language: str) -> Callable:
    return lambda prompts, answers: language_of(prompts) == language


def _is_hard(prompts: Sequence[str], answers: Sequence[str]) -> bool:
    return sum(bool(sign.search(prompts[0])) for sign in SIGNS_OF_HARD.values()) >= HARD_SIGNS if prompts else False


CATEGORIES = {
    category.name: category
    for category in (
        Category("english", "Most of the common words in the prompts are English.", _is_in("english")),
        Category("chinese", "More than 30% of the letters in the prompts are Chinese characters.", _is_in("chinese")),
        Category(
            "other",
            "A language is recognised, and it is neither English nor Chinese.",
            lambda prompts, answers: language_of(prompts) not in ("english", "chinese", None),
        ),
        Category(
            "code",
            "A prompt or an answer holds a code block, or a line that begins like code.",
            lambda prompts, answers: any(CODE.search(text) for text in (*prompts, *answers)),
        ),
        Category(
            "multi_turn", "The conversation has two questions or more.", lambda prompts, answers: len(prompts) > 1
        ),
        Category(
            "long",
            f"The prompts have {LONG_TOKENS} tokens or more, at four characters a token; a Chinese, Japanese or Korean "
            "character is a token.",
            lambda prompts, answers: sum(map(estimated_tokens, prompts)) >= LONG_TOKENS,
        ),
        Category(
            "hard",
            f"The first prompt shows {HARD_SIGNS} or more of these signs: it {'; '.join(SIGNS_OF_HARD)}.",
            _is_hard,
        ),
    )
}


def categories_of(prompts: Sequence[str], answers: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name, category in CATEGORIES.items() if category.holds(prompts, answers))
