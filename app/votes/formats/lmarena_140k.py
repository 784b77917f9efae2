"""arena-human-preference-140k: votes of 2025, each within the session in which it was given.

Columns are documented on the data set's card (huggingface.co/datasets/lmarena-ai/arena-human-preference-140k): id,
model_a, model_b, winner (model_a, model_b, tie, both_bad), evaluation_session_id, evaluation_order, conversation_a and
conversation_b (messages whose content is a list of {type, text, image, mimeType}), full_conversation (with the turns
that earlier models answered), conv_metadata, category_tag, language, is_code, timestamp (UTC, without a zone).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from app.votes.formats.records import VoteRecord, conversation_of, messages
from app.votes.formats.rows import RowFormat, kind_of, needed

WINNERS = {"model_a": "a", "model_b": "b", "tie": "tie", "both_bad": "both_bad"}
WORDS = {kind: word for word, kind in WINNERS.items()}


def parse(columns: dict[str, Any]) -> VoteRecord:
    model_a, model_b, winner = needed(columns, "model_a", "model_b", "winner")
    return VoteRecord(
        model_a=model_a,
        model_b=model_b,
        kind=kind_of(WINNERS, winner),
        battle=columns.get("id"),
        visitor=columns.get("evaluation_session_id"),
        created_at=moment(columns.get("timestamp")),
        conversation=conversation_of(columns.get("conversation_a"), columns.get("conversation_b")),
    )


def row(record: VoteRecord) -> dict[str, Any]:
    return {
        "id": record.battle,
        "model_a": record.model_a,
        "model_b": record.model_b,
        "winner": WORDS[record.kind],
        "evaluation_session_id": record.visitor,
        "conversation_a": in_parts(messages(record.conversation, "a")),
        "conversation_b": in_parts(messages(record.conversation, "b")),
        "timestamp": record.created_at and record.created_at.replace(tzinfo=None).isoformat(),
    }


def in_parts(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "role": message["role"],
            "content": [{"type": "text", "text": message["content"], "image": None, "mimeType": None}],
        }
        for message in listed
    ]


def moment(text: Any) -> datetime | None:
    """Raises ValueError for what is no time."""
    if text in (None, ""):
        return None
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not a time as in 2025-05-29T14:48:41") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


FORMAT = RowFormat(
    name="lmarena_140k",
    title="arena-human-preference-140k",
    documented="https://huggingface.co/datasets/lmarena-ai/arena-human-preference-140k",
    parse=parse,
    row=row,
    kinds={
        "evaluation_order": "int",
        "is_code": "bool",
        **dict.fromkeys(
            ("conversation_a", "conversation_b", "full_conversation", "conv_metadata", "category_tag"), "value"
        ),
    },
)
