"""What the documents say of the code: every setting, command and table of extension is named there, and no other."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.config import AppConfig
from engine.config import EngineConfig

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


def test_readme_names_every_make_target_it_promises():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    promised = set(re.findall(r"`make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert promised <= targets


def test_readme_names_every_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    help_text = subprocess.run(
        [sys.executable, "-m", "app.cli", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for command in re.findall(r"^    ([a-z]+) ", help_text, re.MULTILINE):
        assert f"`arena {command}" in readme


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_files_that_a_document_points_to_exist(document):
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:app|db|engine|kernels|static|tests|docs)/[\w./-]*)`", text)
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def write_settings_page() -> None:
    SETTINGS.write_text(
        "# Settings\n\n"
        "Read once at start: defaults < a TOML file (`arena --config FILE`, or `ARENA_CONFIG`) < environment < flags. "
        "A key that is unknown refuses to start and is named.\n\n"
        f"## Website: table `[web]`\n\n{settings_table(AppConfig, 'ARENA_')}\n\n"
        f"## Engine: table `[engine]`\n\n{settings_table(EngineConfig, 'ARENA_ENGINE_')}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    write_settings_page()
