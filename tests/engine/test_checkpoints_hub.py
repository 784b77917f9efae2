"""The hub, as a small real server on loopback that speaks what its client asks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from engine.checkpoints import fetch
from engine.errors import CheckpointError
from tests.engine.tiny import tiny_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"

FETCH = """
import sys
from pathlib import Path
from engine.checkpoints import fetch
from engine.errors import CheckpointError
seen = []
try:
    print(fetch(sys.argv[1], Path(sys.argv[2]), lambda *counts: seen.append(counts)))
    print(*(seen[-1] if seen else ("nothing", "fetched")))
except CheckpointError as error:
    print("refused:", error)
"""


class Hub(ThreadingHTTPServer):
    """`files`: of the one repository, team/tiny, whose only commit is COMMIT."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.served: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fetch(self, source: str, cache: Path, **environment: str) -> list[str]:
        """What a process prints that fetches from this hub: folder and last progress, or the refusal."""
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(cache / "hub-home"),
            **environment,
        }
        command = [sys.executable, "-c", FETCH, source, str(cache)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/team/tiny/tree/{COMMIT}"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.server.files.items()
            ]
            return self.answer(json.dumps(entries).encode())
        if path.startswith("/api/models/team/tiny"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.server.files.items()]
            return self.answer(json.dumps({"id": "team/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        name = path.removeprefix(f"/team/tiny/resolve/{COMMIT}/")
        if name not in self.server.files:
            return self.answer(b"{}", status=404)
        if self.command == "GET":
            self.server.served.append(name)
        self.answer(self.server.files[name])

    do_HEAD = do_GET

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path):
    folder = tiny_llama(tmp_path / "original")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = Hub({**files, "pytorch_model.bin": b"a pickle", "modeling_tiny.py": b"raise SystemExit", "README.md": b"hi"})
    yield hub
    hub.shutdown()


def test_a_repository_is_fetched_once_without_its_code_and_pickles(hub, tmp_path):
    folder, progress = hub.fetch("hf:team/tiny", tmp_path / "cache")
    wanted = {name: data for name, data in hub.files.items() if name.endswith((".json", ".safetensors"))}
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == wanted
    assert sorted(hub.served) == sorted(wanted)
    total = sum(map(len, wanted.values()))
    assert progress == f"{total} {total} bytes"
    hub.served.clear()
    assert hub.fetch("hf:team/tiny", tmp_path / "cache") == [folder, "nothing fetched"]
    assert hub.served == []


def test_a_repository_of_pickles_is_refused(hub, tmp_path):
    del hub.files["model.safetensors"]
    (said,) = hub.fetch("hf:team/tiny@main", tmp_path / "cache")
    assert said == "refused: team/tiny has no .safetensors file; pickled weights are never read"
    assert hub.served == []


def test_a_repository_that_is_not_there_is_named(hub, tmp_path):
    (said,) = hub.fetch("hf:team/other", tmp_path / "cache")
    assert said.startswith("refused: team/other cannot be fetched from the hub: ")


def test_a_hub_that_does_not_answer_is_named(hub, tmp_path):
    (said,) = hub.fetch("hf:team/tiny", tmp_path / "cache", HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("refused: team/tiny cannot be fetched from the hub: ")


def test_nothing_is_left_of_a_download_that_nobody_waits_for_any_more(tmp_path, monkeypatch):
    """The client goes on, and makes again what was cleared away."""
    go_on, listed = threading.Event(), SimpleNamespace(rfilename="model.safetensors", size=3)

    def snapshot_download(repository: str, *, local_dir: Path, **options) -> None:
        go_on.wait(10)
        local_dir.mkdir(exist_ok=True)
        (local_dir / listed.rfilename).write_bytes(b"123")

    def nobody_waits(*counts) -> None:
        raise CheckpointError("nobody waits")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = SimpleNamespace(sha=COMMIT, siblings=[listed])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *asked, **options: found)
    with pytest.raises(CheckpointError, match="nobody waits"):
        fetch("hf:team/tiny", tmp_path, nobody_waits)
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "hub-download":
            thread.join()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["hf-team--tiny@main.lock"]
