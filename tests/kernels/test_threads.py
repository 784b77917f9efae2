"""The team of threads: asleep between steps, off the interpreter's lock during them, one step at a time."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels import BackendUnavailable
from kernels.cpu import CpuBackend, build
from tests.kernels.decoders import Pages, llama_traits, random_weights
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def running() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_idle_threads_use_no_processor():
    def nanoseconds(thread: str) -> int:
        """What the thread has run so far: a suite has other threads too, which are not asked here."""
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])

    others = running()
    backend = CpuBackend(threads=4)
    helpers = running() - others
    assert len(helpers) == 3
    traits = llama_traits()
    decoder, pages = backend.pack(traits, random_weights(traits), torch.float32), Pages(traits, torch.float32)
    backend.forward(decoder, pages.pool, pages.step([(0, [1, 2, 3], 0)]))
    time.sleep(0.05)  # the helpers spin for some microseconds before they sleep
    before = sum(map(nanoseconds, helpers))
    time.sleep(1.0)
    assert sum(map(nanoseconds, helpers)) - before < 1e6


def test_a_closed_backend_leaves_no_thread():
    others = running()
    backend = CpuBackend(threads=5)
    helpers = running() - others
    assert len(helpers) == 4
    del backend
    until(lambda: not helpers & running())  # who was joined is listed for a moment more


def test_threads_that_the_system_does_not_give_are_an_error_and_not_the_end_of_the_process(cpu):
    code = """
import os, resource
from kernels import BackendUnavailable
from kernels.cpu import CpuBackend
from tests.waiting import until

CpuBackend(1)
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**26, resource.RLIM_INFINITY))
try:
    CpuBackend(64)
except BackendUnavailable as reason:
    until(lambda: len(os.listdir("/proc/self/task")) == 1)
    print(reason)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("cannot start 64 threads: ")


def test_callers_of_two_decoders_take_turns(cpu):
    """Each thread decodes its own sequence on the shared backend and must get what it gets alone."""
    traits = llama_traits()
    jobs = []
    for seed, dtype in ((0, torch.float32), (1, torch.bfloat16), (2, torch.float32)):
        decoder = cpu.pack(traits, random_weights(traits, seed), dtype)
        pages = Pages(traits, dtype, seed=seed)
        batches = [pages.step([(0, [i % 300], i)]) for i in range(60)]
        alone = [cpu.forward(decoder, pages.pool, batch).clone() for batch in batches]
        jobs.append((decoder, pages, batches, alone, []))

    def decode(decoder, pages, batches, alone, found):
        for batch in batches:
            found.append(cpu.forward(decoder, pages.pool, batch).clone())

    threads = [threading.Thread(target=decode, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for *_, alone, found in jobs:
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def test_python_runs_on_during_a_forward(cpu):
    traits = llama_traits(hidden_size=512, intermediate_size=2048)
    decoder, pages = cpu.pack(traits, random_weights(traits), torch.float32), Pages(traits, torch.float32, total=4000)
    batch = pages.step([(0, [i % 300 for i in range(3000)], 0)], wanted=[2999])
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    started = time.perf_counter()
    cpu.forward(decoder, pages.pool, batch)
    ended = time.perf_counter()
    done.set()
    ticker.join()
    assert sum(started < t < ended for t in ticks) >= 3, f"a forward of {ended - started:.3f} s let nobody run"


@pytest.mark.parametrize("threads", [2, 5])
def test_a_thread_without_a_processor_is_not_waited_for(tmp_path, threads):
    """Helpers held in a signal's handler do nothing, and phases end all the same; let go, they help again."""
    try:
        compiler = build.find_compiler()
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    source, program = Path(__file__).parent / "team_runner.cpp", tmp_path / "team"
    subprocess.run([compiler, "-std=c++17", "-O1", "-pthread", str(source), "-o", str(program)], check=True)
    done = subprocess.run([program, str(threads)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
