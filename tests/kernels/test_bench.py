"""`python -m kernels.bench` runs, on shapes that take no time."""

import pytest
import torch

import kernels
from kernels import bench
from kernels.bench import Load
from kernels.reference import ReferenceBackend
from tests.kernels.comparison import TRAITS
from tests.kernels.decoders import random_weights


def test_a_load_is_timed_beside_pytorch(monkeypatch, capsys):
    monkeypatch.setattr(bench, "LOADS", [Load("prefill 5 of 20", 2, 5, 20)])
    monkeypatch.setitem(bench.SHAPES, "smollm2-135m", lambda: TRAITS["gemma3, 64"])
    monkeypatch.setattr(bench, "machine_limits", lambda *kind: (1.0, 1.0))
    monkeypatch.setattr("sys.argv", ["bench", "--backend", "reference", "--threads", "1", "--seconds", "0.01"])
    bench.main()
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert row[1].strip() == "prefill 5 of 20" and float(row[2]) > 0


def test_weights_that_the_backend_cannot_keep_are_refused_in_one_line(monkeypatch, capsys):
    flags = ["--backend", "reference", "--precision", "compact", "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", ["bench", *flags])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert capsys.readouterr().err == "bench: compact weights are bfloat16 ones, not torch.float32\n"


def test_a_backend_that_cannot_run_is_named_in_one_line(monkeypatch, capsys):
    def missing(threads, **options):
        raise kernels.BackendUnavailable("no such device")

    monkeypatch.setitem(kernels.BACKENDS, "triton", missing)
    monkeypatch.setattr("sys.argv", ["bench", "--backend", "triton"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert capsys.readouterr().err == "bench: no such device\n"


def test_pages_lie_where_the_backend_computes():
    """On a device that has no memory, as PyTorch's tests know one; a GPU has its own command, tests/gpu/check.py."""
    backend = ReferenceBackend()
    backend.device = torch.device("meta")
    traits = TRAITS["gemma3, 64"]
    step = bench.OurStep(backend, traits, random_weights(traits), torch.float32, 49_152, 10)
    assert step.pool.device == backend.device
