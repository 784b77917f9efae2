"""compar:IA's votes: what visitors of the French ministry's arena preferred, one row a conversation.

Columns are documented on the data set's card (huggingface.co/datasets/ministere-culture/comparia-votes): id, timestamp,
model_a_name, model_b_name, chosen_model_name (empty where both_equal is true), both_equal, opening_msg, conversation_a
and conversation_b (messages), visitor_id, conversation_pair_id, and qualities of a side as conv_useful_a and more.
"""

from __future__ import annotations

from typing import Any

from app.votes.formats.lmarena_140k import moment
from app.votes.formats.records import VoteRecord, conversation_of, messages
from app.votes.formats.rows import RowFormat, needed


def parse(columns: dict[str, Any]) -> VoteRecord:
    model_a, model_b = needed(columns, "model_a_name", "model_b_name")
    return VoteRecord(
        model_a=model_a,
        model_b=model_b,
        kind=kind_of(columns, model_a, model_b),
        battle=columns.get("conversation_pair_id") or _id(columns),
        visitor=columns.get("visitor_id") or None,
        created_at=moment(columns.get("timestamp")),
        conversation=conversation_of(columns.get("conversation_a"), columns.get("conversation_b")),
    )


def _id(columns: dict[str, Any]) -> str | None:
    return None if columns.get("id") is None else str(columns["id"])


def kind_of(columns: dict[str, Any], model_a: str, model_b: str) -> str:
    chosen, equal = columns.get("chosen_model_name") or None, columns.get("both_equal")
    if equal and chosen:
        raise ValueError(f"both_equal is true, and {chosen!r} was chosen")
    if equal:
        return "tie"
    if model_a == model_b or chosen not in (model_a, model_b):
        raise ValueError(f"chosen_model_name is {chosen!r}, and not {model_a!r} or {model_b!r}")
    return "a" if chosen == model_a else "b"


def row(record: VoteRecord) -> dict[str, Any]:
    return {
        "timestamp": record.created_at and record.created_at.replace(tzinfo=None).isoformat(),
        "model_a_name": record.model_a,
        "model_b_name": record.model_b,
        "chosen_model_name": {"a": record.model_a, "b": record.model_b}.get(record.kind),
        "both_equal": record.kind in ("tie", "both_bad"),
        "opening_msg": record.conversation[0].prompt if record.conversation else None,
        "conversation_a": messages(record.conversation, "a"),
        "conversation_b": messages(record.conversation, "b"),
        "visitor_id": record.visitor,
        "conversation_pair_id": record.battle,
    }


FORMAT = RowFormat(
    name="comparia_votes",
    title="compar:IA's votes",
    documented="https://huggingface.co/datasets/ministere-culture/comparia-votes",
    parse=parse,
    row=row,
    kinds={"conversation_a": "value", "conversation_b": "value", "both_equal": "bool"},
    lacks={"both_bad": "both_equal"},
)
