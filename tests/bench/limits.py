"""What the machine itself can do: bytes read a second, and floating-point operations a second of bf16 products.

    python -m tests.bench.limits

A token one at a time has to read all weights once: W3 ends at (bytes a second) / (bytes of the weights). A prompt or a
large batch has to multiply: W1 ends at (operations a second) / (two for each weight and token).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from engine.bench import machine
from kernels.processors import processor_count

WEIGHTS = 134_515_008  # of SmolLM2-135M, the embedding counted once: it is the head too


def best_seconds(work: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def bytes_read_per_second(size_bytes: int = 2**30) -> float:
    """A sum over more than any cache holds."""
    numbers = torch.ones(size_bytes // 4)
    return size_bytes / best_seconds(numbers.sum, 10)


def bf16_operations_per_second(size: int = 2048) -> float:
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16)
    return 2 * size**3 / best_seconds(lambda: a @ b, 10)


def main() -> None:
    torch.set_num_threads(processor_count())
    read, multiply = bytes_read_per_second(), bf16_operations_per_second()
    limits = {
        "read_gb_per_second": round(read / 1e9, 1),
        "bf16_gflop_per_second": round(multiply / 1e9),
        "tokens_per_second_one_at_a_time": round(read / (2 * WEIGHTS)),
        "tokens_per_second_multiplying_alone": round(multiply / (2 * WEIGHTS)),
    }
    print(json.dumps(limits | {"machine": machine()}))


if __name__ == "__main__":
    main()
