"""arena-human-preference-100k: votes of June to August 2024 with the tags of style control.

Columns are documented on the data set's card (huggingface.co/datasets/lmarena-ai/arena-human-preference-100k): those of
the 33k set, with judge_hash in place of judge, and conv_metadata, category_tag, is_code, is_refusal, dedup_tag.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from app.votes.formats import lmsys_33k
from app.votes.formats.records import VoteRecord
from app.votes.formats.rows import RowFormat


def parse(columns: dict[str, Any]) -> VoteRecord:
    return replace(lmsys_33k.parse(columns), visitor=columns.get("judge_hash"))


def row(record: VoteRecord) -> dict[str, Any]:
    columns = lmsys_33k.row(record)
    return {"judge_hash" if name == "judge" else name: value for name, value in columns.items()}


FORMAT = RowFormat(
    name="lmarena_100k",
    title="arena-human-preference-100k",
    documented="https://huggingface.co/datasets/lmarena-ai/arena-human-preference-100k",
    parse=parse,
    row=row,
    kinds={
        **lmsys_33k.FORMAT.kinds,
        **dict.fromkeys(("conv_metadata", "category_tag", "dedup_tag"), "value"),
        **dict.fromkeys(("is_code", "is_refusal"), "bool"),
    },
)
