"""compar:IA's reactions: thumbs up or down on single answers. The reactions to both answers of one message are a vote.

Columns are documented on the data set's card (huggingface.co/datasets/ministere-culture/comparia-reactions): id,
timestamp, model_a_name, model_b_name, refers_to_model, msg_index, question_content, response_content, liked, disliked,
conversation_pair_id, msg_rank, visitor_id, and qualities (useful, complete, creative, incorrect and so on). A thumb up
is +1, down -1, no reaction 0: the higher side is preferred, two thumbs up are a tie, two thumbs down both bad.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from app.votes.formats.lmarena_140k import moment
from app.votes.formats.records import BadRow, Row, Said, VoteRecord, as_stored, checked, with_details
from app.votes.formats.rows import Columns, VotesSource, needed

KINDS = {"liked": "bool", "disliked": "bool", "msg_rank": "int", "msg_index": "int"}
THUMBS = {"a": ((1, 0),), "b": ((0, 1),), "tie": ((1, 0), (0, 1)), "both_bad": ((-1, 0), (0, -1))}


class ReactionsFormat:
    name = "comparia_reactions"
    title = "compar:IA's reactions"
    documented = "https://huggingface.co/datasets/ministere-culture/comparia-reactions"

    def read(self, file: VotesSource) -> Iterator[Row]:
        """Votes in the order of their first reactions."""
        groups: dict[tuple, list[tuple[int, Columns]]] = {}
        for line, columns in file.rows(KINDS):
            try:
                if isinstance(columns, BadRow):
                    raise ValueError(columns.reason)
                _thumb(columns)
                groups.setdefault(_message(columns), []).append((line, columns))
            except (ValueError, TypeError) as error:
                yield BadRow(line, str(error))
        for rows in groups.values():
            try:
                yield replace(self._record([columns for _, columns in rows]), line=rows[0][0])
            except ValueError as error:
                yield from (BadRow(line, str(error)) for line, _ in rows)

    def _record(self, rows: list[Columns]) -> VoteRecord:
        first = rows[0]
        sides = {first["model_a_name"]: "a", first["model_b_name"]: "b"}
        thumbs = {"a": 0, "b": 0}
        texts = {"a": "", "b": ""}
        for columns in rows:
            side = sides[columns["refers_to_model"]]
            if thumbs[side]:
                raise ValueError(f"two reactions to the answer of {columns['refers_to_model']!r}")
            thumbs[side] = _thumb(columns)
            texts[side] = columns.get("response_content") or ""
        record = VoteRecord(
            model_a=first["model_a_name"],
            model_b=first["model_b_name"],
            kind=_kind(thumbs["a"], thumbs["b"]),
            battle="/".join(map(str, _message(first))),
            visitor=first.get("visitor_id") or None,
            created_at=moment(first.get("timestamp")),
            conversation=(Said(first.get("question_content") or "", texts["a"], texts["b"]),),
        )
        stored = as_stored(checked(record), self.name)
        return with_details(stored, {"format": self.name, "rows": rows})

    def write(self, records: Iterable[VoteRecord]) -> Iterator[str]:
        for record in records:
            details = record.details or {}
            rows = details["rows"] if details.get("format") == self.name else list(_rows(record))
            yield from (json.dumps(columns, ensure_ascii=False) + "\n" for columns in rows)

    def loses(self, record: VoteRecord) -> str | None:
        if not record.counted:
            return "is not counted, which the format cannot say"
        if len(record.conversation) > 1:
            return "has several turns, of which the format takes the last"
        return None


def _message(columns: Columns) -> tuple[str, Any]:
    pair, rank = needed(columns, "conversation_pair_id")[0], columns.get("msg_rank", columns.get("msg_index"))
    if rank is None:
        raise ValueError("no msg_rank")
    if columns["refers_to_model"] not in needed(columns, "model_a_name", "model_b_name"):
        raise ValueError(f"refers_to_model is {columns['refers_to_model']!r}, and neither of the two models")
    return pair, rank


def _thumb(columns: Columns) -> int:
    needed(columns, "refers_to_model", "model_a_name", "model_b_name")
    up, down = bool(columns.get("liked")), bool(columns.get("disliked"))
    if up == down:
        raise ValueError("exactly one of liked and disliked must be true")
    return 1 if up else -1


def _kind(a: int, b: int) -> str:
    if a == b:
        return "tie" if a > 0 else "both_bad"
    return "a" if a > b else "b"


def _rows(record: VoteRecord) -> Iterator[Columns]:
    said = record.conversation[-1] if record.conversation else Said("", "", "")
    for a, b in THUMBS[record.kind]:
        side, thumb = ("a", a) if a else ("b", b)
        yield {
            "timestamp": record.created_at and record.created_at.replace(tzinfo=None).isoformat(),
            "model_a_name": record.model_a,
            "model_b_name": record.model_b,
            "refers_to_model": record.model_a if side == "a" else record.model_b,
            "question_content": said.prompt,
            "response_content": getattr(said, side),
            "liked": thumb > 0,
            "disliked": thumb < 0,
            "conversation_pair_id": record.battle,
            "msg_rank": max(len(record.conversation), 1),
            "visitor_id": record.visitor,
        }


FORMAT = ReactionsFormat()
