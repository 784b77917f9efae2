"""What the documents say of the code: every setting, command and table of extension is named there, and no other."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest

from app.cli import build_parser
from app.config import AppConfig
from engine.bench import MEASURED
from engine.config import PRECISIONS, EngineConfig
from engine.schema import ModelRequest
from tests.bench.report import ratio, rounds_of, rows
from tests.bench.rounds import OURS

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "docs" / "settings.md"


def settings_table(config: type, prefix: str) -> str:
    """The Markdown table of a config class: the very text that docs/settings.md must hold."""
    lines = ["| setting | environment | default | |", "|---|---|---|---|"]
    for field in dataclasses.fields(config):
        default = "" if field.metadata.get("secret") or field.default in ("", None, ()) else f"`{field.default}`"
        unit = field.metadata.get("unit") or ""
        if unit and default and unit != "port":
            default += f" {unit}"
        lines.append(f"| `{field.name}` | `{prefix}{field.name.upper()}` | {default} | {field.metadata['sentence']} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("config", "prefix"), [(AppConfig, "ARENA_"), (EngineConfig, "ARENA_ENGINE_")])
def test_settings_page_has_every_setting_as_the_code_has_it(config, prefix):
    """To mend it: python -m tests.test_docs"""
    assert settings_table(config, prefix) in SETTINGS.read_text(encoding="utf-8")


def model_table() -> str:
    """What can be said of a model where it is registered with an engine."""
    lines = ["| field | default | |", "|---|---|---|"]
    for name, field in ModelRequest.model_fields.items():
        default = f"`{field.default}`" if isinstance(field.default, float) else ""
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines)


def test_settings_page_has_every_field_of_a_model_as_the_code_has_it():
    """To mend it: python -m tests.test_docs"""
    assert model_table() in SETTINGS.read_text(encoding="utf-8")


def test_readme_names_every_make_target_it_promises():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    promised = set(re.findall(r"`make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert promised <= targets


def parsers_below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """By the word that chooses it."""
    choices = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return {word: below for each in choices for word, below in each.items()}


@pytest.mark.parametrize("command", parsers_below(build_parser()))
def test_readme_has_a_row_for_every_command_and_what_it_can_do(command):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| `arena {command}\b([^`]*)`", readme, re.MULTILINE)
    verbs = parsers_below(parsers_below(build_parser())[command])
    assert rows and verbs.keys() <= set(re.findall(r"[a-z]+", " ".join(rows)))


def test_readme_leads_to_every_page_of_the_documents():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(re.findall(r"\(docs/([\w.]+)\)", readme))


def test_what_the_containers_must_be_told_is_in_the_documents():
    needed = set(re.findall(r"\$\{(\w+):\?", (ROOT / "compose.yaml").read_text()))
    assert needed == set(re.findall(r"([A-Z_]+)=%s", (ROOT / "docs" / "running.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_files_that_a_document_points_to_exist(document):
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:app|db|engine|kernels|static|tests|docs)/[\w./-]*)`", text)
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_headline_is_what_was_measured():
    """Of each load against the next best in the tables; of one alone against llama.cpp."""
    records = json.loads(MEASURED.read_text(encoding="utf-8"))["peers"]["records"]

    def next_best(load: str) -> float:
        return min(each.ratio.median for each in rows(records, load) if not each.engine.startswith(OURS))

    def alone(ours: str, theirs: str) -> float:
        return ratio(records, "W3", f"llama.cpp-{theirs}", ours).median

    sixteen = min(next_best("W1"), next_best("W2"))
    headline = (
        f"{sixteen:.1f} times the tokens of the next best with 16 at a time, {next_best('W4'):.1f} times the battles, "
        f"and for one alone {alone(OURS, 'bf16'):.1f} times llama.cpp's in bf16, "
        f"{alone(f'{OURS}-compact', 'bf16'):.1f} with the same bits kept compact, "
        f"and with int8 weights {alone(f'{OURS}-int8', 'q4_0'):.1f} times its Q4_0"
    )
    assert headline in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounds_that_are_told_of_are_those_of_the_records(precision):
    """Of the weights' precisions, in docs/performance.md: each line a round, its speeds as they were measured."""
    records = json.loads(MEASURED.read_text(encoding="utf-8"))["peers"]["records"]
    page = MEASURED.with_suffix(".md").read_text(encoding="utf-8")
    section = re.split(rf"^## {precision} weights$", page, flags=re.MULTILINE | re.IGNORECASE)[1]
    told = re.findall(r"^\| (W\d) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert told
    for load, number, *speeds in told:
        measured = [rounds_of(records, load, name)[int(number)] for name in (OURS, f"{OURS}-{precision}")]
        assert speeds == [f"{each['tokens_per_second']:.1f}" for each in measured]


def write_settings_page() -> None:
    SETTINGS.write_text(
        "# Settings\n\n"
        "Read once at start: defaults < a TOML file (`arena --config FILE`, or `ARENA_CONFIG`) < environment < flags. "
        "A key that is unknown refuses to start and is named.\n\n"
        f"## Website: table `[web]`\n\n{settings_table(AppConfig, 'ARENA_')}\n\n"
        f"## Engine: table `[engine]`\n\n{settings_table(EngineConfig, 'ARENA_ENGINE_')}\n\n"
        f"## A model: body of the engine's `PUT /models/{{name}}`\n\n{model_table()}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    write_settings_page()
