"""The command line, as processes: what it prints, and that it ends at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from app.cli import main
from app.service_file import ServiceFile
from tests.app.fake_engine import FakeEngine
from tests.app.running import Website, fill
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
ARENA = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())"]


def clean_environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ARENA_")} | more


def start(*arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*ARENA, *arguments],
        cwd=ROOT,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def arena(monkeypatch, tmp_path, capsys):
    """Runs a command in this process on a data folder of its own; returns its status, output and errors."""
    for name in [name for name in os.environ if name.startswith("ARENA_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str, folder: Path = tmp_path):
        status = main([*arguments, "--data-folder", str(folder)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    for command in ("serve", "models", "leaderboard", "engine"):
        assert re.search(rf"^ +{command} ", listed, re.MULTILINE)


def test_engine_help_is_the_engines_own():
    shown = subprocess.run([*ARENA, "engine", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "arena engine" in shown and "serve" in shown and "bench" in shown


def test_serve_prints_one_line_when_ready_and_ends_at_once(tmp_path):
    with FakeEngine() as engine:
        arguments = ("serve", "--port", "0", "--data-folder", str(tmp_path), "--engine-url", engine.url)
        process = start(*arguments)
        line = process.stdout.readline()
        address = re.fullmatch(r"Paged Arena is ready: (http://127\.0\.0\.1:\d+)\n", line).group(1)
        assert httpx.get(f"{address}/api/status").json()["enough"]
        second = start(*arguments)
        assert second.wait(60) == 2 and "is running on the data folder" in second.stderr.read()
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert time.monotonic() - began < 10  # half a second on an idle machine
        assert process.returncode == 0 and output == "" and "Traceback" not in errors
        assert len(re.findall(r"Admin password, shown this once: \S+", errors)) == 1
    lines = (tmp_path / "logs" / "web.jsonl").read_text().splitlines()
    assert lines and all(isinstance(json.loads(line), dict) for line in lines)


def test_serve_ends_its_engine_with_it_and_leaves_none_behind(tmp_path):
    """A real child: also when the web process is killed and can end nothing."""
    fill(f"sqlite:///{tmp_path}/arena.sqlite3", [("alpha", "path:/nowhere")], {})
    environment = {"ARENA_ENGINE_BACKEND": "reference", "ARENA_ENGINE_PORT": "0"}
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start("serve", "--port", "0", "--data-folder", str(tmp_path), **environment)
        note = tmp_path / "service.json"
        url = until(partial(engine_of, note), seconds=60)
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        process.send_signal(number)
        process.communicate(timeout=60)
        until(partial(is_silent, f"{url}/health"))


def engine_of(note: Path) -> str | None:
    try:
        return json.loads(note.read_text()).get("engine_url")
    except (OSError, json.JSONDecodeError):
        return None


def is_silent(url: str) -> bool:
    try:
        httpx.get(url, timeout=2)
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        return False
    return False


def test_serve_refuses_a_port_that_is_taken(tmp_path):
    with FakeEngine() as engine:
        port = engine.url.rsplit(":", 1)[1]
        process = start("serve", "--port", port, "--data-folder", str(tmp_path), "--engine-url", engine.url)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and output == ""
    assert "cannot listen" in errors and port in errors and "Traceback" not in errors


def test_serve_refuses_a_guessable_password(tmp_path):
    process = start("serve", "--data-folder", str(tmp_path), ARENA_ADMIN_PASSWORD="admin")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "ARENA_ADMIN_PASSWORD" in errors and "Traceback" not in errors


def test_models_are_listed_added_and_taken_away(arena, tmp_path):
    (tmp_path / "weights").mkdir()
    source = f"path:{tmp_path / 'weights'}"
    status, out, _ = arena("models", "add", "mine", source, "--sampling", '{"temperature": 0.2}', "--json")
    added = json.loads(out)
    assert status == 0 and added["sampling"] == {"temperature": 0.2} and added["status"] == "waiting"
    status, out, _ = arena("models", "list", "--json")
    assert status == 0 and len(json.loads(out)["models"]) >= 4, "with those that are shipped"
    assert json.loads(arena("models", "disable", "mine", "--json")[1])["status"] == "disabled"
    assert json.loads(arena("models", "enable", "mine", "--json")[1])["enabled"] is True
    assert json.loads(arena("models", "remove", "mine", "--json")[1])["status"] == "retired"
    assert "mine" not in arena("models", "list")[1]
    assert "mine" in arena("models", "list", "--retired")[1]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("add", "x", "path:/nowhere"), "no file or folder"),
        (("add", "x", "nothing"), "a source is one of"),
        (("add", "x", "hf:a/b", "--adapter", "path:/nowhere"), "no file or folder at /nowhere"),
        (("add", "x/y", "hf:a/b"), "a model's name is"),
        (("add", "x", "hf:a/b", "--sampling", "{"), "not JSON"),
        (("add", "x", "hf:a/b", "--sampling", '{"heat": 1}'), "no 'heat'"),
        (("add", "x", "hf:a/b", "--system-prompt", "@/nowhere"), "--system-prompt"),
        (("add", "smollm2-135m-brief", "hf:a/b"), "exists already"),
        (("remove", "nobody"), "nobody"),
        (("enable", "nobody"), "nobody"),
    ],
)
def test_what_models_refuses_is_said_in_one_line(arena, arguments, why):
    status, out, err = arena("models", *arguments)
    assert status == 1 and out == "" and why in err and err.count("\n") == 1


def test_a_running_arena_follows_the_command_line(arena, tmp_path):
    with FakeEngine() as engine, Website(tmp_path, engine_url=engine.url) as site:
        site.ready()
        note = ServiceFile(tmp_path)  # as `arena serve` leaves it
        note.write(url=site.url, key=site.services.local_key)
        (tmp_path / "weights").mkdir()
        added = arena("models", "add", "mine", f"path:{tmp_path / 'weights'}", "--json")[1]
        assert json.loads(added)["status"] == "ready" and "mine" in engine.models
        assert json.loads(arena("models", "disable", "mine", "--json")[1])["status"] == "disabled"
        until(lambda: "mine" not in engine.models)
        arena("models", "enable", "mine")
        status, _, err = arena("models", "add", "long", f"path:{tmp_path / 'weights'}", "--context-length", "1001")
        assert status == 1 and "is 1,001 tokens" in err and "allows 1,000" in err
        engine.failures["path:/alpha"] = "it rusted"
        until(lambda: "alpha" in arena("models", "list")[1] and "it rusted" in arena("models", "list")[1])
        engine.failures["path:/alpha"] = "rust, " * 20
        until(lambda: "rust, rust" in arena("models", "list")[1])
        assert len(arena("models", "list")[1].splitlines()[0]) < 100
        assert "rust, " * 20 in arena("models", "list", "--json")[1]
        note.close()
        assert "no arena runs" in arena("models", "list")[1]


def test_a_running_arena_that_does_not_tell_is_not_taken_for_none(arena, tmp_path):
    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b"Nothing could be saved.")

        def log_message(self, *_) -> None:
            pass

    arena("models", "add", "mine", "hf:a/b")
    note = ServiceFile(tmp_path)
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.handle_request).start()
        note.write(url=f"http://127.0.0.1:{server.server_port}", key="key")
        told = arena("models", "list", "--json")[1]
    assert "HTTP 503 Nothing could be saved." in told and "no arena runs" not in told
    told = arena("models", "list", "--json")[1]
    assert "does not answer" in told and "no arena runs" not in told
    note.close()


def test_a_database_that_is_not_there_is_not_made_by_a_listing(arena, tmp_path):
    status, _, err = arena("models", "list", folder=tmp_path / "typo")
    assert status == 1 and "there is no database" in err and not (tmp_path / "typo").exists()
    status, _, err = arena("models", "list")
    assert status == 1 and "arena serve makes one" in err and list(tmp_path.iterdir()) == []
