from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine import bench
from engine.__main__ import main, parser
from engine.bench import (
    Ask,
    Battle,
    Endpoint,
    Exchange,
    Load,
    Writer,
    child_arguments,
    drive,
    events,
    load_of,
    read,
    response,
    summary,
)
from engine.child import PeakMemory
from engine.config import FIELDS, EngineConfig
from tests.engine.server_fixture import tiny_folder
from tests.engine.tiny import tiny_tokenizer
from tests.waiting import until

TOKENIZER = tiny_tokenizer(adds_bos=False)


def tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("size", [1, 2, 3, 15, 40, 512])
def test_texts_have_exactly_the_tokens_asked_for(size):
    assert tokens(Writer(TOKENIZER, "seed").text(size)) == size


@pytest.mark.parametrize(("name", "requests", "concurrency"), [("W1", 64, 16), ("W2", 64, 16), ("W3", 8, 1)])
def test_lengths_of_a_load_never_change_and_its_words_do(name, requests, concurrency):
    first, second = (load_of(name, TOKENIZER, seed) for seed in ("1", "2"))
    assert (len(first.asks), first.concurrency) == (requests, concurrency)

    def sizes(load: Load) -> list:
        return [([tokens(message["content"]) for message in ask.messages], ask.max_tokens) for ask in load.asks]

    assert sizes(first) == sizes(second)
    assert {ask.messages[-1]["content"] for ask in first.asks}.isdisjoint(
        ask.messages[-1]["content"] for ask in second.asks
    )


def test_w1_shares_a_system_prompt_of_512_tokens():
    load = load_of("W1", TOKENIZER, "0")
    assert {ask.messages[0]["content"] for ask in load.asks} == {load.asks[0].messages[0]["content"]}
    assert tokens(load.asks[0].messages[0]["content"]) == 512
    assert {tokens(ask.messages[1]["content"]) for ask in load.asks} == {40}
    assert {ask.max_tokens for ask in load.asks} == {128}


def test_w2_has_the_mean_lengths_of_chats():
    load = load_of("W2", TOKENIZER, "0")
    assert sum(tokens(ask.messages[0]["content"]) for ask in load.asks) / 64 == pytest.approx(162, abs=1)
    assert sum(ask.max_tokens for ask in load.asks) / 64 == pytest.approx(143, abs=1)


def test_w4_is_of_battles_whose_two_system_prompts_are_shared():
    load = load_of("W4", TOKENIZER, "0")
    assert (len(load.asks), load.concurrency) == (32, 8)
    (systems,) = {battle.systems for battle in load.asks}
    assert list(map(tokens, systems)) == [150, 300]
    assert {tuple(map(tokens, battle.questions)) for battle in load.asks} == {(40, 30)}
    assert len({battle.questions for battle in load.asks}) == 32
    assert sum(battle.wanted_tokens for battle in load.asks) == 32 * 2 * 2 * 128


def chunked(*writes: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(write), write) for write in (*writes, b""))


def delta(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def test_answer_reads_the_same_however_it_was_cut_on_its_way():
    used = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    last = b"data: " + json.dumps({"choices": [], "usage": used}).encode() + b"\n\ndata: [DONE]\n\n"
    raw = chunked(delta("né"), delta("data: \n\n") + delta("c"), last)
    for cut in range(1, len(raw)):
        reading = read(Exchange(10.0, [(11.0, raw[:cut]), (12.0, raw[cut:])]))
        assert (reading.text, reading.tokens, reading.cached_tokens, reading.failure) == ("nédata: \n\nc", 3, 2, "")
        assert reading.times == sorted(reading.times)
    one_by_one = [(float(index), raw[index : index + 1]) for index in range(len(raw))]
    assert read(Exchange(0.0, one_by_one)).text == "nédata: \n\nc"


def test_event_has_the_time_at_which_its_last_byte_came():
    raw = chunked(delta("a"), delta("b"))
    end_of_a = raw.index(delta("a")) + len(delta("a"))
    for cut, expected in ((end_of_a - 1, [2.0, 2.0]), (end_of_a, [1.0, 2.0])):
        status, writes = response([(1.0, raw[:cut]), (2.0, raw[cut:])])
        assert status == "200"
        assert [when for when, _ in events(writes)] == expected


@pytest.mark.parametrize(
    ("raw", "failure"),
    [
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (chunked(delta("a"), b'data: {"error": {"message": "boom"}}\n\n'), "boom"),
        (chunked(delta("a"), b'data: {"error": "boom"}\n\n'), "boom"),
        (chunked(delta("a")), "no answer"),
        (chunked(delta("a"))[:-20], "no answer"),
        (b"", "no answer"),
    ],
)
def test_answer_that_failed_is_counted_as_an_error(raw, failure):
    reading = read(Exchange(0.0, [(1.0, raw)] if raw else []))
    assert failure in reading.failure
    assert summary(Load("x", (Ask((), 1),), 1), [reading], 1.0, None)["errors"] == 1


def test_load_runs_against_a_live_engine(engine):
    asks = tuple(Ask(({"role": "user", "content": f"number {n}"},), 8 + n) for n in range(6))
    load = Load("six", asks, 3)
    exchanges, seconds = asyncio.run(drive(load, [Endpoint(engine.url, "llama")]))
    result = summary(load, [read(each) for each in exchanges], seconds, 100)
    assert (result["errors"], result["output_tokens"]) == (0, sum(ask.max_tokens for ask in asks))
    assert result["tokens_per_second"] > 0
    assert 0 < result["ttft_ms"]["median"] <= result["ttft_ms"]["p95"]
    assert set(result) >= {"load", "tokens_per_second", "ttft_ms", "itl_ms", "peak_pss_mib", "errors"}


def test_unknown_model_is_an_error_of_every_request(engine):
    load = Load("bad", tuple(Ask(({"role": "user", "content": "x"},), 2) for _ in range(3)), 2)
    exchanges, seconds = asyncio.run(drive(load, [Endpoint(engine.url, "nobody")]))
    result = summary(load, [read(each) for each in exchanges], seconds, None)
    assert result["errors"] == 3
    assert "nobody" in result["first_error"]


def test_engine_that_is_not_there_is_an_error_too():
    load = Load("none", (Ask(({"role": "user", "content": "x"},), 2),), 1)
    exchanges, seconds = asyncio.run(drive(load, [Endpoint("http://127.0.0.1:1", "m")]))
    assert summary(load, [read(each) for each in exchanges], seconds, None)["errors"] == 1


def fight(battles: int, endpoints: list[Endpoint]) -> dict:
    asks = tuple(Battle(("be brief", "be long"), (f"number {n}", "and then?"), 5) for n in range(battles))
    load = Load("W4", asks, 2)
    exchanges, seconds = asyncio.run(drive(load, endpoints))
    return summary(load, [read(each) for each in exchanges], seconds, None) | {"exchanges": exchanges}


def test_battles_run_against_two_models_of_a_live_engine(engine):
    result = fight(3, [Endpoint(engine.url, "llama"), Endpoint(engine.url, "gemma")])
    assert (result["errors"], result["output_tokens"], result["wanted_tokens"]) == (0, 60, 60)
    assert result["battles_per_minute"] == pytest.approx(3 * 60 / result["seconds"], rel=0.1)


def test_second_turn_of_a_battle_carries_the_first(engine, monkeypatch):
    asked = []

    async def noting(ask: Ask, endpoint: Endpoint) -> Exchange:
        asked.append((endpoint.model, [(m["role"], m["content"]) for m in ask.messages]))
        return await exchange(ask, endpoint)

    exchange = bench.exchange
    monkeypatch.setattr(bench, "exchange", noting)
    result = fight(1, [Endpoint(engine.url, "llama"), Endpoint(engine.url, "gemma")])
    answers = [read(each).text for each in result["exchanges"]]
    for side, (model, system) in enumerate((("llama", "be brief"), ("gemma", "be long"))):
        first = [("system", system), ("user", "number 0")]
        second = [*first, ("assistant", answers[side]), ("user", "and then?")]
        assert [messages for each, messages in asked if each == model] == [first, second]


def test_battle_ends_where_a_side_fails(engine):
    result = fight(2, [Endpoint(engine.url, "llama"), Endpoint(engine.url, "nobody")])
    assert (result["errors"], len(result["exchanges"])) == (2, 4)
    assert "nobody" in result["first_error"]


def test_child_gets_every_setting_but_where_to_listen():
    config = EngineConfig(kv_memory_bytes=2**22, check_integrity=True, dtype="float32", cache_folder=Path("/c"))
    arguments = child_arguments(config, argparse.Namespace(config=None))
    options = parser().parse_args(["serve", *arguments])
    flags = {name: value for name in FIELDS if (value := getattr(options, name, None)) is not None}
    assert EngineConfig.load(flags, environ={}) == replace(config, host="127.0.0.1", port=8001)


def test_peak_memory_sees_what_was_held_and_given_back():
    code = "held = b'x' * (150 << 20); print(flush=True); input(); del held; print(flush=True); open(0).read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with PeakMemory(process.pid, every_seconds=0.01) as peak:
            until(lambda: peak.mib)
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            time.sleep(0.1)  # it looks on
        with PeakMemory(process.pid) as afterwards:
            pass
        process.stdin.close()
    assert peak.mib > 150 > afterwards.mib


def test_table_shows_every_row_and_the_battles_of_those_that_have_some():
    row = summary(Load("x", (), 1), [], 1.0, None)
    text = bench.table({"ours": row, "theirs": row | {"battles_per_minute": 5.25}})
    assert "ours" in text and "theirs" in text and "5.2 battles a minute" in text


def test_peak_memory_counts_what_a_process_started():
    code = "held = b'x' * (150 << 20); print(flush=True); input()"
    starter = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with PeakMemory(process.pid) as peak:
            pass
        process.stdin.close()
    assert peak.mib > 150


def test_ratio_of_the_document_is_shown_with_where_and_when_it_was_measured(tmp_path):
    document = tmp_path / "performance.json"
    assert bench.measured_before("W1", document) == ""
    one = {"load": "W1", "ratio": 13.1, "date": "2026-11-29", "machine": {"cores": 2, "processor": "an EPYC"}}
    document.write_text(json.dumps({"bench": [one, one | {"load": "W3", "ratio": 9.0}]}))
    assert bench.measured_before("W1", document) == "; the document has 13.10, of 2026-11-29 on 2 cores of an EPYC"


SMALL = Load("W3", tuple(Ask(({"role": "user", "content": f"number {n}"},), 6) for n in range(3)), 2)


def test_same_work_runs_through_transformers():
    result = bench.measure_transformers(SMALL, tiny_folder(), EngineConfig(threads=1))
    assert (result["errors"], result["output_tokens"], result["wanted_tokens"]) == (0, 18, 18)
    assert result["tokens_per_second"] > 0
    assert result["ttft_ms"]["median"] > 0


def test_command_prints_one_json_document_and_nothing_else(engine, monkeypatch, capsys):
    monkeypatch.setattr("engine.checkpoints.fetch", lambda source, cache, progress: tiny_folder())
    monkeypatch.setattr(bench, "load_of", lambda name, tokenizer, seed: SMALL)
    status = main(["bench", "W3", "--json", "--base-url", engine.url + "/v1", "--model", "llama"])
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert status == 0
    assert (result["load"], result["errors"], result["output_tokens"]) == ("W3", 0, 18)
    assert set(result["ttft_ms"]) == set(result["itl_ms"]) == {"median", "p95"}
    assert "tokens/s" in printed.err


BATTLES = Load("W4", (Battle(("be brief", "be long"), ("number", "and then?"), 5),), 2)


@pytest.mark.parametrize("apart", [True, False])
def test_command_fights_battles_on_an_engine_it_starts_itself(apart, monkeypatch, capsys):
    monkeypatch.setattr("engine.checkpoints.fetch", lambda source, cache, progress: tiny_folder())
    monkeypatch.setattr(bench, "SOURCE", f"path:{tiny_folder('gemma3')}")
    monkeypatch.setattr(bench, "load_of", lambda name, tokenizer, seed: BATTLES if name == "W4" else SMALL)
    settings = ["--kv-memory-bytes", "16777216", "--backend", "reference", "--threads", "1"]
    status = main(["bench", "W4", "--json", *settings, *(["--apart"] if apart else [])])
    result = json.loads(capsys.readouterr().out)
    assert (status, result["errors"], result["output_tokens"]) == (0, 0, 20)
    assert result["battles_per_minute"] > 0
    assert result["peak_pss_mib"] > 50


def test_battles_are_not_asked_of_transformers_generate(capsys):
    assert main(["bench", "W4", "--against", "transformers"]) == 1
    assert "W4" in capsys.readouterr().err
