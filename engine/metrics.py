"""Prometheus metrics under vLLM's names with our prefix. Knows events and counts, no HTTP and no engine thread.

Counters and histograms are fed by `RequestTimer`, one a request, on the event loop; gauges are read when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.sequence import GenerationEvent

PREFIX = "paged_arena:"
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
STEP_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)


class Metrics:
    """`load` and `kv` are the engine's own questions, asked at each scrape."""

    def __init__(self, load: Callable[[], dict[str, Any]], kv: Callable[[], dict[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        self._load, self._kv = load, kv
        self.registry.register(self)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between one token and the next.", STEP_SECONDS
        )
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", SECONDS)
        self.prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.answer_size = self._histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens taken in, cached ones included.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.success = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")

    def _histogram(self, name: str, sentence: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, sentence, ("model_name",), buckets=buckets, registry=self.registry)

    def _counter(self, name: str, sentence: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, sentence, ("model_name", *labels), registry=self.registry)

    def collect(self) -> Iterable[Metric]:
        load, pages = self._load(), self._kv()["pages"]
        held = (pages["total"] - pages["free"] - pages["cached"]) / pages["total"]
        yield GaugeMetricFamily(PREFIX + "num_requests_running", "Sequences in the running batch.", load["running"])
        yield GaugeMetricFamily(PREFIX + "num_requests_waiting", "Requests that wait for pages.", load["waiting"])
        yield GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", "Share of KV pages in use; 1 is all of them.", held)
        yield CounterMetricFamily(
            PREFIX + "num_preemptions", "Sequences put back to be computed again.", load["preemptions"]
        )
        yield CounterMetricFamily(
            PREFIX + "spec_decode_num_draft_tokens", "Tokens guessed ahead and checked.", load["drafted_tokens"]
        )
        yield CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens", "Of these, those that were right.", load["accepted_tokens"]
        )

    def describe(self) -> Iterable[Metric]:
        """Nothing: keeps the registry from asking the engine for gauges while it is being built."""
        return ()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def timer(self, model: str, choices: int = 1) -> RequestTimer:
        return RequestTimer(self, model, choices)


class RequestTimer:
    """Watches the events of one request from its arrival on. `choices`: answers to each of its prompts."""

    def __init__(self, metrics: Metrics, model: str, choices: int) -> None:
        self._metrics, self._model, self._choices = metrics, model, choices
        self._arrival = time.monotonic()
        self._begun: set[int] = set()  # prompts of which a token came
        self._last_token: dict[int, float] = {}  # of each choice
        self._inter_token = metrics.inter_token.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)

    def observe(self, event: GenerationEvent, now: float) -> None:
        if event.token_ids:
            prompt = event.index // self._choices
            if prompt not in self._begun:
                self._begun.add(prompt)
                self._metrics.time_to_first_token.labels(self._model).observe(now - self._arrival)
            elif event.index in self._last_token:
                self._inter_token.observe(now - self._last_token[event.index])
            self._last_token[event.index] = now
            self._generation_tokens.inc(len(event.token_ids))
        if event.finish_reason is not None:
            self._finish(event, now)

    def _finish(self, event: GenerationEvent, now: float) -> None:
        of, model = self._metrics, self._model
        of.end_to_end.labels(model).observe(now - self._arrival)
        of.answer_size.labels(model).observe(event.completion_tokens)
        if event.index % self._choices == 0:  # the prompt is that of all its choices
            of.prompt_size.labels(model).observe(event.prompt_tokens)
            of.prompt_tokens.labels(model).inc(event.prompt_tokens)
            of.prefix_queries.labels(model).inc(event.prompt_tokens)
            of.prefix_hits.labels(model).inc(event.cached_tokens)
        of.success.labels(model, event.finish_reason).inc()
