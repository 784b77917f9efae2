from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import pytest

from engine.bench import Ask, Battle, Load
from engine.child import process_trees
from tests.bench import rounds
from tests.bench.peers import Launch, Peer
from tests.bench.place import Place
from tests.bench.rounds import APART, OURS, Contestant, contestant, failed, ours, read, run
from tests.bench.server import Server, ServerError, is_running
from tests.engine.server_fixture import tiny_folder

FAKE = str(Path(__file__).with_name("fake_server.py"))


def load_of(name: str, seed: str) -> Load:
    if name == "W4":
        return Load(name, tuple(Battle(("a", "b"), (f"{seed} {n}", "and?"), 3) for n in range(2)), 2)
    return Load(name, tuple(Ask(({"role": "user", "content": f"{seed} {n}"},), 4) for n in range(3)), 2)


def fake_peer(place: Place, *arguments: str, install=lambda place: None, name: str = "fake") -> Contestant:
    launch = Launch((sys.executable, FAKE, "{port}", *arguments), "bench")
    return contestant(Peer(name, "bf16", "fake 1", "fake", install, lambda place, cores: launch), place)


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path / "fake", tmp_path, jobs=1)


@pytest.fixture
def results(tmp_path) -> Path:
    return tmp_path / "results.jsonl"


def test_every_load_is_measured_in_turns_and_kept(place, results):
    engines = [fake_peer(place, name="one"), fake_peer(place, name="other")]
    records = list(run(engines, ("W1", "W4"), 2, results, load_of))
    expected = [(e, load, n) for n in (1, 2) for load in ("W1", "W4") for e in ("one", "other")]
    assert [(each["engine"], each["load"], each["round"]) for each in records] == expected
    assert read(results) == records
    assert {each["errors"] for each in records} == {0}
    assert {each["output_tokens"] for each in records} == {12, 2 * 2 * 2 * 3}
    assert all(each["peak_pss_mib"] > 0 and each["launch_seconds"] > 0 for each in records)
    assert all(each["battles_per_minute"] > 0 for each in records if each["load"] == "W4")


def counting(name: str, measured: list[str], *, fails: bool = False) -> Contestant:
    def measure(load: Load, warm_up: Load, log: Path) -> dict:
        measured.append(load.asks[0].messages[0]["content"])
        if fails:
            raise ServerError("fell over", log)
        return {"errors": 0, "launch_seconds": 1.26}

    return Contestant(name, "bf16", "1", measure)


def test_interrupted_run_goes_on_where_it_stopped(results):
    measured: list[str] = []
    going = run([counting("one", measured)], ("W1",), 3, results, load_of)
    next(going)
    going.close()
    assert len(list(run([counting("one", measured)], ("W1",), 3, results, load_of))) == 2
    assert measured == ["round 1 0", "round 2 0", "round 3 0"]
    assert list(run([counting("one", measured)], ("W1",), 3, results, load_of)) == []
    assert len(list(run([counting("one", measured), counting("other", measured)], ("W1",), 2, results, load_of))) == 2


def test_engines_get_the_same_words_in_a_round(results):
    measured: list[str] = []
    list(run([counting("one", measured), counting("other", measured)], ("W1",), 2, results, load_of))
    assert measured == ["round 1 0"] * 2 + ["round 2 0"] * 2


def test_failed_measurement_is_recorded_and_tried_again(results):
    (record,) = run([counting("one", [], fails=True)], ("W1",), 1, results, load_of)
    assert failed(record)
    assert record["failure"] == "fell over"
    (again,) = run([counting("one", [])], ("W1",), 1, results, load_of)
    assert not failed(again)
    assert [failed(each) for each in read(results)] == [True, False]


def test_server_that_ends_is_a_failure_with_the_end_of_its_log(place, results):
    engines = [fake_peer(place, "broken"), fake_peer(place, name="fine")]
    broken, fine = run(engines, ("W1",), 1, results, load_of)
    assert broken["failure"] == "ended with status 1 before it was ready"
    assert broken["log_end"] == ["this server is broken"]
    assert Path(broken["log"]).exists()
    assert not failed(fine)


def test_server_that_refuses_is_a_failure(place, results):
    (record,) = run([fake_peer(place, "refuses")], ("W1",), 1, results, load_of)
    assert failed(record)
    assert record["first_error"] == "HTTP 500: no"


def test_install_that_fails_fails_each_load_but_runs_once(place, results):
    def install(place: Place) -> None:
        place.run("sh", "-c", "echo no such wheel; echo once >> tries; exit 3")

    records = list(run([fake_peer(place, install=install)], ("W1", "W3"), 1, results, load_of))
    assert all("status 3" in each["failure"] for each in records)
    assert all(each["log_end"][-1] == "no such wheel" for each in records)
    assert (place.folder / "tries").read_text() == "once\n"


def test_peer_is_started_once_before_it_is_measured_for_the_first_time(place, results):
    starts = place.folder.parent / "starts"
    code = f"open({str(starts)!r}, 'a').write('start '); import runpy; runpy.run_path({FAKE!r}, run_name='__main__')"
    launch = Launch((sys.executable, "-c", code, "{port}"), "bench")
    peer = Peer("fake", "bf16", "fake 1", "fake", lambda place: None, lambda place, cores: launch)
    list(run([contestant(peer, place)], ("W1",), 2, results, load_of))
    assert starts.read_text().split() == ["start"] * 3


@pytest.mark.parametrize(("taken", "is_started"), [(1, True), (2, False)])
def test_server_whose_port_another_program_took_is_started_once_more(tmp_path, taken, is_started):
    (starts := tmp_path / "starts").touch()
    code = (
        f"import errno, os, runpy; starts = open({str(starts)!r}, 'a'); starts.write('.'); starts.flush()\n"
        f"if starts.tell() <= {taken}: raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))\n"
        f"runpy.run_path({FAKE!r}, run_name='__main__')"
    )
    launch = Launch((sys.executable, "-c", code, "{port}"), "bench")
    with contextlib.closing(Server(launch, tmp_path / "log")) as server:
        with contextlib.nullcontext() if is_started else pytest.raises(ServerError, match="ended with status 1"):
            server.wait_until_ready(60)
        assert starts.read_text() == ".."


def test_server_and_what_it_started_are_gone_when_it_is_closed(tmp_path):
    sleep = "import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    server = Server(Launch((sys.executable, "-c", code), "bench"), tmp_path / "log")
    pids: set[int] = set()
    try:
        deadline = time.monotonic() + 60
        while len(pids) < 2 and time.monotonic() < deadline:
            pids = process_trees([server.pid])
    finally:
        server.close()
    assert len(pids) == 2
    assert not [pid for pid in pids if is_running(pid)]


def test_our_engine_fights_battles_with_one_checkpoint_or_two(monkeypatch, results):
    monkeypatch.setattr(rounds, "SOURCE", f"path:{tiny_folder()}")
    settings = ("--kv-memory-bytes", "16777216", "--backend", "reference", "--threads", "1")
    apart = ours(apart=tiny_folder("gemma3"), settings=settings)
    records = list(run([ours(settings=settings), apart], ("W4",), 1, results, load_of))
    records += run([ours(precision="int8", settings=settings), apart], ("W1",), 1, results, load_of)
    assert [(each["engine"], each["load"]) for each in records] == [(OURS, "W4"), (APART, "W4"), (f"{OURS}-int8", "W1")]
    assert [each["precision"] for each in records] == ["bf16", "bf16", "int8"]
    assert {each["errors"] for each in records} == {0}
    assert {each["output_tokens"] for each in records} == {12, 24}
