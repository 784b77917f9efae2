"""chatbot_arena_conversations: 33,000 conversations of Chatbot Arena with their votes, April to June 2023.

Columns are documented on the data set's card (huggingface.co/datasets/lmsys/chatbot_arena_conversations): question_id,
model_a, model_b, winner (model_a, model_b, tie, tie (bothbad)), judge, conversation_a and conversation_b (lists of
{content, role}), turn, anony, language, tstamp (seconds), openai_moderation, toxic_chat_tag.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from app.votes.formats.records import VoteRecord, conversation_of, messages
from app.votes.formats.rows import RowFormat, kind_of, needed

WINNERS = {"model_a": "a", "model_b": "b", "tie": "tie", "tie (bothbad)": "both_bad"}
WORDS = {kind: word for word, kind in WINNERS.items()}


def parse(columns: dict[str, Any]) -> VoteRecord:
    model_a, model_b, winner = needed(columns, "model_a", "model_b", "winner")
    return VoteRecord(
        model_a=model_a,
        model_b=model_b,
        kind=kind_of(WINNERS, winner),
        battle=columns.get("question_id"),
        visitor=columns.get("judge"),
        created_at=moment(columns.get("tstamp")),
        conversation=conversation_of(columns.get("conversation_a"), columns.get("conversation_b")),
    )


def row(record: VoteRecord) -> dict[str, Any]:
    return {
        "question_id": record.battle,
        "model_a": record.model_a,
        "model_b": record.model_b,
        "winner": WORDS[record.kind],
        "judge": record.visitor,
        "conversation_a": messages(record.conversation, "a"),
        "conversation_b": messages(record.conversation, "b"),
        "turn": len(record.conversation),
        "anony": True,
        "tstamp": record.created_at and record.created_at.timestamp(),
    }


def moment(seconds: Any) -> datetime | None:
    """Raises ValueError for what is no time."""
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(float(seconds), UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        raise ValueError(f"{seconds!r} is not a time in seconds") from None


FORMAT = RowFormat(
    name="lmsys_33k",
    title="chatbot_arena_conversations (33k)",
    documented="https://huggingface.co/datasets/lmsys/chatbot_arena_conversations",
    parse=parse,
    row=row,
    kinds={
        "conversation_a": "value",
        "conversation_b": "value",
        "turn": "int",
        "anony": "bool",
        "tstamp": "float",
        "openai_moderation": "value",
        "toxic_chat_tag": "value",
    },
)
