"""Tables for people, and small SVG plots. Knows nothing of what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

COLOURS = ("#2b6cb0", "#90cdf4", "#e2a03f", "#cbd5e0", "#2f855a", "#805ad5", "#c53030", "#718096")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 330, 56, 34, 74


@dataclass
class Table:
    """What an experiment found: rows for people, `document` the same as JSON; and bars, or curves, to draw."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Any]]
    document: dict[str, Any]
    assumed: Sequence[str] = ()
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    axes: tuple[str, str] = ("", "")  # names of x and y


def text_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [[str(column) for column in columns], *([cell(each) for each in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:]])


def cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One bar a key, its parts from the bottom up, in the order of the first bar."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    top = max(sum(bar.values()) for bar in bars.values())
    step = (WIDTH - LEFT - 120) / len(bars)
    drawn = [axis(top, unit)]
    for number, (name, bar) in enumerate(bars.items()):
        x, y = LEFT + step * (number + 0.15), HEIGHT - BOTTOM
        for part in parts:
            height = bar.get(part, 0) / top * (HEIGHT - TOP - BOTTOM)
            y -= height
            colour = COLOURS[parts.index(part)]
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.7:.1f}" height="{height:.1f}" fill="{colour}"/>'
            )
            if height > 12:
                drawn.append(label(x + step * 0.35, y + height / 2 + 4, f"{bar[part]:.1f}", "middle", "#1a202c"))
        drawn.append(slanted(x + step * 0.45, HEIGHT - BOTTOM + 14, name))
    return document(title, drawn + legend(parts))


def lines(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str) -> str:
    """Points joined by lines; the x axis is equally spaced over the points' own values."""
    places = sorted({x for points in curves.values() for x, _ in points})
    top = max(y for points in curves.values() for _, y in points)
    step = (WIDTH - LEFT - 140) / max(1, len(places) - 1)
    drawn = [axis(top, y_name), label((WIDTH - 100) / 2, HEIGHT - BOTTOM + 36, x_name, "middle")]
    drawn += [label(LEFT + step * i, HEIGHT - BOTTOM + 16, f"{x:g}", "middle") for i, x in enumerate(places)]
    for colour, points in zip(COLOURS[::2] + COLOURS[1::2], curves.values(), strict=False):
        path = " ".join(
            f"{LEFT + step * places.index(x):.1f},{HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM):.1f}"
            for x, y in points
        )
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return document(title, drawn + legend(list(curves), COLOURS[::2] + COLOURS[1::2]))


def axis(top: float, unit: str) -> str:
    ticks = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        ticks.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 110}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        ticks.append(label(LEFT - 6, y + 4, f"{top * share:.3g}", "end"))
    return "".join(ticks) + label(8, TOP - 10, unit, "start")


def legend(names: Sequence[str], colours: Sequence[str] = COLOURS) -> list[str]:
    drawn = []
    for number, (name, colour) in enumerate(zip(names, colours, strict=False)):
        y = TOP + 18 * number
        drawn.append(f'<rect x="{WIDTH - 104}" y="{y}" width="10" height="10" fill="{colour}"/>')
        drawn.append(label(WIDTH - 90, y + 9, name, "start"))
    return drawn


def label(x: float, y: float, text: str, anchor: str, colour: str = "#4a5568") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def slanted(x: float, y: float, text: str) -> str:
    """Ends at this point, coming from below left: long names fit beside each other."""
    return f'<g transform="translate({x:.1f} {y:.1f}) rotate(-35)">{label(0, 0, text, "end")}</g>'


def document(title: str, drawn: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{WIDTH / 2}" y="16" text-anchor="middle" font-size="13">{escape(title)}</text>'
        + "".join(drawn)
        + "</svg>\n"
    )
