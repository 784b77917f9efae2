from __future__ import annotations

import json

import pytest

from engine.bench import MEASURED
from tests.bench import __main__ as command
from tests.bench.report import Ratio, failures, markdown, rows
from tests.bench.rounds import OURS


def record(engine: str, round: int, speed: float, load: str = "W1", **more) -> dict:
    return {
        "engine": engine,
        "precision": "bf16",
        "version": f"{engine} 1",
        "load": load,
        "round": round,
        "date": f"2026-11-{20 + round}",
        "machine": {"processor": "a processor", "cores": 2},
        "tokens_per_second": speed,
        "ttft_ms": {"median": 10.0 * round, "p95": 20.0},
        "itl_ms": {"median": 5.0, "p95": 6.0},
        "peak_pss_mib": 900,
        "launch_seconds": 1.5,
        "errors": 0,
        **more,
    }


ROUNDS = [
    *(record(OURS, number, speed) for number, speed in ((1, 100.0), (2, 120.0), (3, 90.0))),
    *(record("other", number, speed) for number, speed in ((1, 50.0), (2, 40.0), (3, 60.0))),
]


def test_ratios_are_taken_round_by_round():
    ours, other = rows(ROUNDS, "W1")
    assert (ours.engine, ours.speed, ours.ratio, ours.rounds) == (OURS, 100.0, None, 3)
    assert (other.engine, other.speed, other.ratio) == ("other", 50.0, Ratio(2.0, 1.5, 3.0))
    assert str(other.ratio) == "2.00 (1.50–3.00)"


def test_figures_are_medians_of_the_rounds():
    assert [each.figures["first token ms"] for each in rows(ROUNDS, "W1")] == [20.0, 20.0]


def test_only_rounds_that_both_have_are_compared():
    (_, other) = rows([*ROUNDS[:2], record("other", 2, 40.0), record("other", 3, 1.0)], "W1")
    assert other.ratio == Ratio(3.0, 3.0, 3.0)
    (alone,) = rows([record("other", 1, 40.0)], "W1")
    assert alone.ratio is None


def test_battles_are_judged_by_battles_a_minute():
    found = rows(
        [
            record(OURS, 1, 1.0, "W4", battles_per_minute=60.0),
            record("other", 1, 9.0, "W4", battles_per_minute=20.0),
        ],
        "W4",
    )
    assert [(each.engine, each.speed) for each in found] == [(OURS, 60.0), ("other", 20.0)]
    assert found[1].ratio == Ratio(3.0, 3.0, 3.0)


BROKEN = {
    **{name: record("broken", 1, 0.0)[name] for name in ("engine", "precision", "version", "load", "round", "machine")},
    "date": "2026-11-21",
    "failure": "ended with\nstatus 1.",
    "log": "/somewhere/log",
    "log_end": ["no such library"],
}


def test_engine_that_failed_is_named_with_the_end_of_its_log_and_has_no_row():
    text = markdown([*ROUNDS, BROKEN], "make bench-peers")
    assert "Not measured: **broken** on W1 (round 1, 2026-11-21): ended with status 1. The end of its log:" in text
    assert "    no such library\n" in text
    assert "| broken" not in text


def test_measurement_with_errors_counts_as_failed():
    text = markdown([*ROUNDS, record("bad", 1, 70.0, errors=2, first_error="HTTP 500")], "x")
    assert "**bad** on W1 (round 1, 2026-11-21): 2 errors, the first: HTTP 500" in text
    assert "| bad" not in text


def test_failure_that_a_later_round_mended_is_forgotten():
    assert failures([BROKEN]) == [BROKEN]
    assert failures([BROKEN, record("broken", 1, 5.0)]) == []


def test_fragment_says_command_dates_and_hardware():
    text = markdown(ROUNDS, "make bench-peers")
    assert "`make bench-peers`, 2026-11-21 to 2026-11-23, 2 cores of a processor." in text
    assert "| **paged-arena** | bf16 | 100.0 |  | 20.0 |" in text
    assert "| other | bf16 | 50.0 | 2.00 (1.50–3.00) | 20.0 | 20.0 | 5.0 | 6.0 | 900 | 1.5 | 3 |" in text


def test_tables_and_records_are_written_into_the_document_between_their_marks(tmp_path):
    measured = tmp_path / "performance.json"
    measured.write_text(json.dumps({"bench": [1]}))
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{command.BEGIN}\nold\n{command.END}\nafter\n")
    for _ in range(2):
        command.write([*ROUNDS, BROKEN], "make bench-peers", measured)
    text = page.read_text()
    assert text.startswith(f"before\n{command.BEGIN}\n\n**W1**\n") and text.endswith(f"{command.END}\nafter\n")
    assert "old" not in text
    known = json.loads(measured.read_text())
    assert known["bench"] == [1]
    assert rows(known["peers"]["records"], "W1") == rows(ROUNDS, "W1")
    assert "/somewhere" not in measured.read_text()


def test_document_says_what_was_measured():
    """To mend it: make bench-peers ARGS="--report --write" """
    known = json.loads(MEASURED.read_text())
    page = MEASURED.with_suffix(".md").read_text(encoding="utf-8")
    if "peers" in known:
        assert markdown(known["peers"]["records"], known["peers"]["command"]) in page
    for each in known["bench"]:
        assert f"| {each['load']} " in page
        assert f"{each['ratio']:.1f}" in page


@pytest.mark.parametrize(
    ("only", "engines", "loads"),
    [
        ([], list(command.NAMES), ["W1", "W2", "W3", "W4"]),
        (["vllm,W1"], ["vllm"], ["W1"]),
        (["W3,W1"], list(command.NAMES), ["W1", "W3"]),
        (["transformers", "paged-arena,vllm"], [OURS, "vllm", "transformers"], ["W1", "W2", "W3", "W4"]),
    ],
)
def test_only_takes_engines_and_loads_by_name(only, engines, loads):
    options = command.parser().parse_args([part for each in only for part in ("--only", each)])
    assert command.chosen(options.only) == (engines, loads)


def test_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.parser().parse_args(["--only", "vlm"])
    assert "no engine or load is called vlm" in capsys.readouterr().err


def test_report_prints_what_is_there_and_measures_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "checkpoint", lambda config: tmp_path)
    results = tmp_path / "results.jsonl"
    rounds = [each | {"engine": each["engine"].replace("other", "vllm")} for each in ROUNDS]
    results.write_text("".join(json.dumps(each) + "\n" for each in rounds))
    arguments = ["--report", "--results", str(results), "--folder", str(tmp_path)]
    assert command.main(arguments) == 0
    assert "| vllm | bf16 | 50.0 |" in capsys.readouterr().out
    assert command.main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["records"]) == 6
    assert command.main([*arguments, "--only", "transformers"]) == 1
