"""The layout of the tree is a promise: who may import whom, what lies at the top, what the web process loads."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from app.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {"app": {"db"}, "db": set(), "engine": {"kernels"}, "kernels": set()}
TOP_LEVEL = {
    "app", "db", "engine", "kernels", "static", "tests", "docs",
    "pyproject.toml", "constraints.txt", "Dockerfile", "compose.yaml", "Makefile",
    "README.md", "CHANGELOG.md", "LICENSE", ".ci", ".gitignore", ".dockerignore",
}  # fmt: skip


def imported_packages(path: Path) -> set[str]:
    """The top-level packages that a source file imports, lazily or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_the_layout_allows(package):
    forbidden = set(MAY_IMPORT) | {"tests"}
    forbidden -= MAY_IMPORT[package] | {package}
    offenders = {
        str(path.relative_to(ROOT)): crossing
        for path in (ROOT / package).rglob("*.py")
        if (crossing := imported_packages(path) & forbidden)
    }
    assert offenders == {}


def test_only_the_config_modules_read_the_environment():
    allowed = {"app/config.py", "engine/config.py"}
    readers = {
        str(path.relative_to(ROOT))
        for package in ("app", "engine", "db")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"os\.environ(\.get|\[[^\]]+\](?! = ))|os\.getenv", path.read_text(encoding="utf-8"))
    }
    assert readers - allowed == set()


def test_web_process_never_loads_torch():
    """Nor scipy.stats, which takes a second."""
    heavy = ("torch", "transformers", "engine", "scipy.stats")
    code = f"import sys, app.cli, app.web; sys.exit(any(name in sys.modules for name in {heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_transformers_does_not_take_our_kernels_for_the_package_of_that_name():
    code = (
        "from transformers.utils.import_utils import is_kernels_available; import sys; sys.exit(is_kernels_available())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_version_stays_clear_of_the_range_that_transformers_probes_for():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert not version.startswith("0.18.")


def test_top_level_holds_only_what_the_map_names():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} <= TOP_LEVEL


def test_every_folder_with_code_is_a_package_that_gets_installed():
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")}
    assert all(f"{package}*" in include for package in MAY_IMPORT)
    assert {str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_image_ends_in_what_make_run_ends_in_with_nothing_between():
    """A shell or make as the first process of a container would keep its signals to itself."""
    command = json.loads(re.findall(r"^CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[-1])
    assert command[:2] == ["arena", "serve"]
    assert build_parser().parse_args(command[1:]).host == "0.0.0.0"
    recipe = re.search(r"^run:.*\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert recipe == "exec $(BIN)/arena serve $(ARGS)"


def test_containers_have_the_driver_of_their_database():
    driver = re.search(r"ARENA_DATABASE_URL: postgresql\+(\w+)", (ROOT / "compose.yaml").read_text())[1]
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert driver in {re.match(r"[\w-]+", each)[0] for each in dependencies}


def test_arena_waits_until_its_database_listens_to_the_network():
    """While PostgreSQL sets itself up it is ready on its socket alone."""
    database = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["database"]["healthcheck"]
    assert database["test"][:4] == ["CMD", "pg_isready", "-h", "127.0.0.1"]
    assert int(database["interval"].rstrip("s")) * database["retries"] >= 60


@pytest.mark.parametrize("ignored", [".gitignore", ".dockerignore"])
def test_passwords_of_the_containers_get_into_no_commit_and_no_image(ignored):
    assert ".env" in (ROOT / ignored).read_text().splitlines()
