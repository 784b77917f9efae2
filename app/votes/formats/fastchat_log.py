"""FastChat's log: one JSON object a line for everything that its arena's web servers did; the votes are among them.

Fields as FastChat's own reader takes them (fastchat/serve/monitor/clean_battle_data.py): tstamp (seconds), type
(leftvote, rightvote, tievote, bothbad_vote; chat, upvote and the like are no votes between two), models, states (two,
each with model_name, conv_id, roles, messages as [role, text], offset), ip.
"""

from __future__ import annotations

from typing import Any

from app.votes.formats.lmsys_33k import moment
from app.votes.formats.records import Said, VoteRecord
from app.votes.formats.rows import NoVote, RowFormat

TYPES = {"leftvote": "a", "rightvote": "b", "tievote": "tie", "bothbad_vote": "both_bad"}
WORDS = {kind: word for word, kind in TYPES.items()}
ROLES = ("USER", "ASSISTANT")


def parse(columns: dict[str, Any]) -> VoteRecord:
    if columns.get("type") not in TYPES:
        raise NoVote(f"type {columns.get('type')!r} is no vote between two models")
    states = columns.get("states")
    if not isinstance(states, list) or len(states) != 2:
        raise ValueError("states must be the two conversations")
    names = [
        state.get("model_name") or name for state, name in zip(states, columns.get("models", ["", ""]), strict=True)
    ]
    if not all(names):
        raise ValueError("a model has no name")
    return VoteRecord(
        model_a=names[0],
        model_b=names[1],
        kind=TYPES[columns["type"]],
        battle=states[0].get("conv_id"),
        visitor=columns.get("ip"),
        created_at=moment(columns.get("tstamp")),
        conversation=conversation_of(*states),
    )


def conversation_of(a: dict[str, Any], b: dict[str, Any]) -> tuple[Said, ...]:
    sides = [_exchange(state) for state in (a, b)]
    if None in sides or [prompt for prompt, _ in sides[0]] != [prompt for prompt, _ in sides[1]]:
        return ()
    return tuple(Said(prompt, said, other) for (prompt, said), (_, other) in zip(*sides, strict=True))


def _exchange(state: dict[str, Any]) -> list[tuple[str, str]] | None:
    said = state.get("messages", [])[state.get("offset", 0) :]
    roles = list(state.get("roles", ROLES))
    if [message[0] for message in said] != roles * (len(said) // 2):
        return None
    if not all(isinstance(message[1], str) for message in said):
        return None
    return [(said[i][1], said[i + 1][1]) for i in range(0, len(said), 2)]


def row(record: VoteRecord) -> dict[str, Any]:
    return {
        "tstamp": record.created_at and record.created_at.timestamp(),
        "type": WORDS[record.kind],
        "models": ["", ""],
        "states": [
            {
                "roles": list(ROLES),
                "messages": [pair for turn in record.conversation for pair in _said(turn, side)],
                "offset": 0,
                "conv_id": record.battle,
                "model_name": name,
            }
            for side, name in (("a", record.model_a), ("b", record.model_b))
        ],
        "ip": record.visitor,
    }


def _said(turn: Said, side: str) -> list[list[str]]:
    return [[ROLES[0], turn.prompt], [ROLES[1], getattr(turn, side)]]


FORMAT = RowFormat(
    name="fastchat_log",
    title="FastChat's log",
    documented="https://github.com/lm-sys/FastChat/blob/main/fastchat/serve/monitor/clean_battle_data.py",
    parse=parse,
    row=row,
)
