"""Style control: what of a vote goes to the looks of an answer, held constant as covariates.

Four features, as LMArena's style control has them (Li, Angelopoulos and Chiang 2024, "Does style matter?"): length,
headers, list items, bold spans, outside of code blocks. Each enters as (a - b) / (a + b), 0 where neither side has
any, and is scaled to a mean square of 1; not centred, so that who sat left changes nothing. Ratings do not depend on
the scale; the effects are then per standard step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from app.ratings.games import Games

CODE_BLOCK = re.compile(r"```[^`]*```")  # as theirs: a block that holds a backtick is not one
HEADER = re.compile(r"^#{1,6}\s", re.MULTILINE)
LIST_ITEM = re.compile(r"^[^\S\n]*+(?:\d+\.|[-*+])\s", re.MULTILINE)
BOLD = re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__")
CHARACTERS_A_TOKEN = 4  # where nobody counted tokens; the ratio of lengths hardly feels it
WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")  # a token each


@dataclass(frozen=True)
class Style:
    """Of one side's answers, all turns together."""

    length: float  # tokens
    headers: int
    lists: int
    bold: int


FEATURES = tuple(field.name for field in fields(Style))


def style_of(answers: Sequence[str], tokens: int | None = None) -> Style:
    """`tokens` as the engine counted them, else estimated."""
    plain = [CODE_BLOCK.sub("", answer) for answer in answers]
    return Style(
        sum(map(estimated_tokens, answers)) if tokens is None else tokens,
        *(sum(len(pattern.findall(text)) for text in plain) for pattern in (HEADER, LIST_ITEM, BOLD)),
    )


def estimated_tokens(text: str) -> float:
    wide = len(WIDE.findall(text))
    return wide + (len(text) - wide) / CHARACTERS_A_TOKEN


def difference(left: Style, right: Style) -> tuple[float, ...]:
    """By feature, from -1 (only the right side has any) to 1."""
    return tuple((a - b) / (a + b) if a + b else 0.0 for a, b in zip(astuple(left), astuple(right), strict=True))


def controlled(games: Games, differences: np.ndarray) -> Games:
    """The games with `differences` [game, feature] as covariates; features that never differ are left out."""
    size = np.sqrt((differences**2).mean(axis=0)) if len(games) else np.zeros(len(FEATURES))
    scaled = {name: differences[:, i] / size[i] for i, name in enumerate(FEATURES) if size[i] > 0}
    return games.knowing(covariates={**games.covariates, **scaled})
