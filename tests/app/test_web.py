"""The web process as a whole: what it loads, logs, documents and answers when it has a bug."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import ArenaError
from app.logs import JsonFormatter, write_logs_to
from tests.app.fake_engine import Script

ROOT = Path(__file__).resolve().parents[2]


def test_log_lines_hold_neither_prompts_nor_answers(visitor, engine, caplog):
    engine.say("alpha", "ANSWER-OF-ALPHA " * 3, Script.of("HALF-AN-ANSWER", end="break"))
    with caplog.at_level(logging.DEBUG, logger="app"):
        battle, _ = visitor.battle("PROMPT-TO-BE-KEPT-QUIET")
        visitor.post(f"/api/battles/{battle}/turns", json={"prompt": "SECOND-PROMPT"})
        visitor.read(battle)
    formatter = JsonFormatter()
    lines = "\n".join(formatter.format(record) for record in caplog.records if record.name.startswith("app"))
    assert "answer ended" in lines
    assert not re.search("PROMPT|ANSWER-OF|HALF-AN", lines)


def test_a_log_line_is_one_json_object(tmp_path):
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    try:
        write_logs_to(tmp_path / "logs" / "web.jsonl")
        try:
            raise RuntimeError("two\nlines")
        except RuntimeError:
            logging.getLogger("app.x").exception("it broke", extra={"battle": "b", "odd": Path("/x")})
    finally:
        root.handlers, root.level = handlers, level
    (line,) = (tmp_path / "logs" / "web.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["event"], entry["battle"], entry["odd"], entry["level"]) == ("it broke", "b", "/x", "error")
    assert "two\nlines" in entry["exception"]


def test_the_api_is_documented_from_this_host_alone(visitor):
    page = visitor.get("/docs")
    assert page.status_code == 200 and "POST /api/battles/{battle_id}/vote" in page.text
    assert "<script" not in page.text and not re.search(r"(src|href)=\"(https?:)?//", page.text)
    paths = visitor.get("/openapi.json").json()["paths"]
    assert all(path in page.text for path in paths)


def test_the_api_documents_errors_in_the_one_shape_that_they_have(visitor):
    document = visitor.get("/openapi.json").json()
    schema = {"$ref": "#/components/schemas/ErrorBody"}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            assert route["responses"]["4XX"]["content"]["application/json"]["schema"] == schema, (path, method)
            assert "422" not in route["responses"], (path, method)
    error = visitor.post("/api/battles", json={}).json()["error"]
    assert set(document["components"]["schemas"]["ErrorDetail"]["required"]) == set(error)


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("/api/leaderboard", {"application/json", "text/csv", "text/markdown", "image/svg+xml"}),
        ("/api/battles/{battle_id}/events", {"text/event-stream"}),
        ("/api/memory/frames", {"application/octet-stream"}),
    ],
)
def test_the_api_documents_what_sort_of_answer_comes(visitor, path, kinds):
    content = visitor.get("/openapi.json").json()["paths"][path]["get"]["responses"]["200"]["content"]
    assert {kind.split(";")[0] for kind in content} == kinds


def test_an_unknown_path_is_answered_in_the_same_shape(visitor):
    for answer in (
        visitor.get("/api/nothing"),
        visitor.post("/api/battles/..%2f..%2fx/vote"),
        visitor.put("/api/status"),
    ):
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_every_error_is_drawn_in_its_modules_docstring():
    import app.errors

    drawn = app.errors.__doc__
    for name, error in vars(app.errors).items():
        if isinstance(error, type) and issubclass(error, ArenaError):
            line = next((line for line in drawn.splitlines() if re.search(rf"\b{name}\b", line)), "")
            assert line, f"{name} is not drawn"
            if "code" in vars(error):
                assert error.code in line
            if "status" in vars(error):
                assert str(error.status) in line


def test_importing_the_website_loads_no_torch_and_calls_nobody():
    code = "import sys, os, app.web; print('torch' in sys.modules, os.environ['GRADIO_ANALYTICS_ENABLED'])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]
