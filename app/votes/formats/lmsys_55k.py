"""lmsys-arena-human-preference-55k: the data of the first Kaggle competition on predicting votes.

Columns are documented on the data set's card (huggingface.co/datasets/lmsys/lmsys-arena-human-preference-55k) and on
the competition's page: id, model_a, model_b, prompt, response_a, response_b (each a JSON list of one text a turn, null
where there was none), winner_model_a, winner_model_b, winner_tie (exactly one is 1). It counts "both bad" as a tie.
"""

from __future__ import annotations

import json
from typing import Any

from app.votes.formats.records import Said, VoteRecord
from app.votes.formats.rows import RowFormat, needed

KINDS = {"winner_model_a": "a", "winner_model_b": "b", "winner_tie": "tie"}


def parse(columns: dict[str, Any]) -> VoteRecord:
    model_a, model_b = needed(columns, "model_a", "model_b")
    won = [kind for name, kind in KINDS.items() if _flag(columns, name)]
    if len(won) != 1:
        raise ValueError(f"{len(won)} of {', '.join(KINDS)} are 1, and exactly one must be")
    return VoteRecord(
        model_a=model_a,
        model_b=model_b,
        kind=won[0],
        battle=None if columns.get("id") is None else str(columns["id"]),
        conversation=conversation_of(*(columns.get(name) for name in ("prompt", "response_a", "response_b"))),
    )


def _flag(columns: dict[str, Any], name: str) -> bool:
    if columns.get(name) not in (0, 1):
        raise ValueError(f"{name} is {columns.get(name)!r}, and not 0 or 1")
    return columns[name] == 1


def conversation_of(*texts: Any) -> tuple[Said, ...]:
    try:
        listed = [json.loads(text) for text in texts]
    except (TypeError, ValueError):
        return ()
    if any(not isinstance(each, list) or not all(isinstance(text, str) for text in each) for each in listed):
        return ()
    return tuple(Said(*turn) for turn in zip(*listed, strict=True)) if len(set(map(len, listed))) == 1 else ()


def row(record: VoteRecord) -> dict[str, Any]:
    kind = "tie" if record.kind == "both_bad" else record.kind
    return {
        "id": record.battle,
        "model_a": record.model_a,
        "model_b": record.model_b,
        "prompt": json.dumps([turn.prompt for turn in record.conversation], ensure_ascii=False),
        "response_a": json.dumps([turn.a for turn in record.conversation], ensure_ascii=False),
        "response_b": json.dumps([turn.b for turn in record.conversation], ensure_ascii=False),
        **{name: int(kind == each) for name, each in KINDS.items()},
    }


FORMAT = RowFormat(
    name="lmsys_55k",
    title="lmsys-arena-human-preference-55k",
    documented="https://huggingface.co/datasets/lmsys/lmsys-arena-human-preference-55k",
    parse=parse,
    row=row,
    kinds=dict.fromkeys(KINDS, "int"),
    lacks={"both_bad": "a tie"},
)
