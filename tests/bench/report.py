"""Records in, tables out: medians over rounds, and for each engine our figure divided by its own, round by round.

The ratio of a round compares what was measured minutes apart on one machine; its spread over the rounds says how much
of it is noise. Engines that failed are named with their log; nothing stands in for them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.rounds import OURS, Record, failed

UNITS = {"tokens_per_second": "tokens/s", "battles_per_minute": "battles/min"}


@dataclass(frozen=True)
class Ratio:
    """Ours divided by theirs: the median of the rounds that both have, and the least and the greatest."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}–{self.most:.2f})"


@dataclass(frozen=True)
class Row:
    engine: str
    precision: str
    version: str
    rounds: int
    speed: float
    figures: dict[str, float | None]  # medians, by the headings of COLUMNS
    ratio: Ratio | None  # none for ourselves, and without a round in common


COLUMNS: dict[str, Callable[[Record], float | None]] = {
    "first token ms": lambda record: record["ttft_ms"]["median"],
    "its 95th": lambda record: record["ttft_ms"]["p95"],
    "between tokens ms": lambda record: record["itl_ms"]["median"],
    "95th": lambda record: record["itl_ms"]["p95"],
    "peak PSS MiB": lambda record: record["peak_pss_mib"],
    "launch to ready s": lambda record: record["launch_seconds"],
}


def speed_of(load: str) -> str:
    """Which figure a load is judged by."""
    return "battles_per_minute" if load == "W4" else "tokens_per_second"


def rows(records: Sequence[Record], load: str) -> list[Row]:
    """One row for each engine that was measured on the load, the fastest first."""
    names = dict.fromkeys(each["engine"] for each in records if each["load"] == load and not failed(each))
    return sorted((row(records, load, name) for name in names), key=lambda each: -each.speed)


def row(records: Sequence[Record], load: str, engine: str) -> Row:
    rounds = rounds_of(records, load, engine)
    some = next(iter(rounds.values()))
    return Row(
        engine,
        some["precision"],
        some["version"],
        len(rounds),
        statistics.median(each[speed_of(load)] for each in rounds.values()),
        {name: median(map(of, rounds.values())) for name, of in COLUMNS.items()},
        None if engine == OURS else ratio(records, load, engine),
    )


def rounds_of(records: Sequence[Record], load: str, engine: str) -> dict[int, Record]:
    return {
        record["round"]: record
        for record in records
        if (record["load"], record["engine"]) == (load, engine) and not failed(record)
    }


def ratio(records: Sequence[Record], load: str, theirs: str, ours: str = OURS) -> Ratio | None:
    """None without a round that both have."""
    one, other = (rounds_of(records, load, name) for name in (ours, theirs))
    ratios = [one[each][speed_of(load)] / other[each][speed_of(load)] for each in one.keys() & other.keys()]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def median(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def failures(records: Sequence[Record]) -> list[Record]:
    """The last failure of each engine and load that no round has figures of."""
    measured = {(record["engine"], record["load"]) for record in records if not failed(record)}
    last = {(record["engine"], record["load"]): record for record in records if failed(record)}
    return [record for pair, record in last.items() if pair not in measured]


def markdown(records: Sequence[Record], command: str) -> str:
    """The fragment of docs/performance.md: a table for each load, then what failed, then where and when."""
    parts = [table(records, load) for load in sorted({record["load"] for record in records})]
    for record in failures(records):
        why = record.get("failure") or f"{record['errors']} errors, the first: {record['first_error']}"
        parts.append(
            f"Not measured: **{record['engine']}** on {record['load']} (round {record['round']}, {record['date']}): "
            f"{one_line(why)}." + end_of_log(record.get("log_end", ()))
        )
    machines = {f"{each['machine']['cores']} cores of {each['machine']['processor']}" for each in records}
    dates = sorted({record["date"] for record in records})
    versions = sorted({f"{record['engine']}: {record['version']}" for record in records})
    parts.append(
        f"`{command}`, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {'; '.join(sorted(machines))}. "
        f"Versions: {', '.join(versions)}."
    )
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def table(records: Sequence[Record], load: str) -> str:
    found = rows(records, load)
    headings = ["engine", "weights", UNITS[speed_of(load)], "ours / its", *COLUMNS, "rounds"]
    lines = [f"**{load}**", "", "| " + " | ".join(headings) + " |", "|---|---|" + "---:|" * (len(headings) - 2)]
    for each in found:
        name = f"**{each.engine}**" if each.engine.startswith(OURS) else each.engine
        cells = [name, each.precision, f"{each.speed:.1f}", str(each.ratio or "")]
        cells += [number(value) for value in each.figures.values()]
        lines.append("| " + " | ".join([*cells, str(each.rounds)]) + " |")
    return "\n".join(lines) if found else f"**{load}**: nothing was measured."


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def end_of_log(lines: Sequence[str]) -> str:
    return " The end of its log:\n\n" + "".join(f"    {line}\n" for line in lines) if lines else ""


def one_line(words: str) -> str:
    return " ".join(words.split())[:300].rstrip(".")


def document(records: Sequence[Record], command: str) -> dict[str, Any]:
    """What docs/performance.json keeps of a run: the records, less where their logs lay."""
    kept = [{name: value for name, value in record.items() if name != "log"} for record in records]
    return {"command": command, "records": kept}
