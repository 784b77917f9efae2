"""The board as a file: CSV, JSON, Markdown, and a picture that stands by itself. A new one is a line in EXPORTS."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from html import escape

from app.leaderboard.sheet import Sheet
from app.numbers import axis_numbers, many
from app.ratings import METHODS, Row


@dataclass(frozen=True)
class Export:
    media_type: str
    write: Callable[[Sheet], str]


def as_document(sheet: Sheet) -> dict:
    """The JSON of the commands and the web API: the board, and how anyone gets it again."""
    return sheet.board.as_dict() | {"selection": sheet.selection.as_query(), "command": command(sheet)}


def command(sheet: Sheet) -> str:
    return shlex.join(["arena", "leaderboard", *sheet.file, *sheet.selection.as_flags(), "--json"])


def as_json(sheet: Sheet) -> str:
    return json.dumps(as_document(sheet), ensure_ascii=False, indent=2) + "\n"


def as_csv(sheet: Sheet) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [field.name for field in fields(Row)]
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in sheet.board.rows)
    return text.getvalue()


def as_markdown(sheet: Sheet) -> str:
    lines = ["| rank | model | rating | 95% interval | votes | wins | ties | both bad | Elo |"]
    lines += ["|---:|---|---:|---|---:|---:|---:|---:|---:|"]
    for row in sheet.board.rows:
        name = row.model.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
        lines.append(
            f"| {spread(row.rank_best, row.rank_worst)} | {name} | {row.rating:.0f} | {row.lower:.0f} – {row.upper:.0f}"
            f" | {row.votes:,} | {row.wins:,} | {row.ties:,} | {row.both_bad:,} | {row.elo:.0f} |"
        )
    return "\n".join([*lines, "", made_of(sheet), *(f"- {note}" for note in sheet.board.notes), ""])


def made_of(sheet: Sheet) -> str:
    board = sheet.board
    return (
        f"{many(board.votes, 'vote')}, {METHODS[board.method].label}, {board.ci} intervals; `{command(sheet)}`; "
        f"version {board.version}; input sha256 {board.input_sha256}"
    )


def spread(best: int, worst: int) -> str:
    return f"{best}" if best == worst else f"{best}–{worst}"


ROW, LEFT, WIDTH, TOP = 26, 260, 860, 48


def as_svg(sheet: Sheet) -> str:
    """Ratings with their intervals; plain shapes and text, no font or file of others."""
    rows = sheet.board.rows
    low = min((row.lower for row in rows), default=900) - 10
    high = max((row.upper for row in rows), default=1100) + 10
    end = TOP + ROW * max(len(rows), 1)  # of the rows; below it the axis, and what the picture was made of
    height = end + 60

    def x(rating: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 30) * (rating - low) / (high - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="28" font-size="17" font-weight="600">{METHODS[sheet.board.method].label}, '
        f"95% intervals, {many(sheet.board.votes, 'vote')}</text>",
    ]
    for rating in axis_numbers(low, high):
        parts += [
            f'<line x1="{x(rating)}" x2="{x(rating)}" y1="{TOP - 4}" y2="{end}" stroke="#eee"/>',
            f'<text x="{x(rating)}" y="{end + 16}" text-anchor="middle" fill="#666" font-size="11">{rating:g}</text>',
        ]
    for place, row in enumerate(rows):
        y = TOP + ROW * place + 14
        parts += [
            f'<text x="16" y="{y + 4}" fill="#666">{spread(row.rank_best, row.rank_worst)}</text>',
            f'<text x="64" y="{y + 4}">{escape(row.model[:28])}</text>',
            f'<line x1="{x(row.lower)}" x2="{x(row.upper)}" y1="{y}" y2="{y}" stroke="#b9cbf2" stroke-width="7" '
            'stroke-linecap="round"/>',
            f'<circle cx="{x(row.rating)}" cy="{y}" r="5" fill="{"#999" if row.provisional else "#2558c4"}"/>',
            f"<title>{escape(row.model)}: {row.rating:.0f} ({row.lower:.0f} to {row.upper:.0f})</title>",
        ]
    parts.append(
        f'<text x="16" y="{height - 14}" fill="#666" font-size="11">{escape(command(sheet))} · version '
        f"{escape(sheet.board.version)} · input sha256 {escape(sheet.board.input_sha256[:16])}</text></svg>\n"
    )
    return "\n".join(parts)


EXPORTS = {
    "json": Export("application/json", as_json),
    "csv": Export("text/csv; charset=utf-8", as_csv),
    "md": Export("text/markdown; charset=utf-8", as_markdown),
    "svg": Export("image/svg+xml", as_svg),
}
