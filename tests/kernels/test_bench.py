"""`python -m kernels.bench` runs, on shapes that take no time."""

from kernels import bench
from kernels.bench import Load
from tests.kernels.comparison import TRAITS


def test_a_load_is_timed_beside_pytorch(monkeypatch, capsys):
    monkeypatch.setattr(bench, "LOADS", [Load("prefill 5 of 20", 2, 5, 20)])
    monkeypatch.setitem(bench.SHAPES, "smollm2-135m", lambda: TRAITS["gemma3, 64"])
    monkeypatch.setattr(bench, "machine_limits", lambda dtype: (1.0, 1.0))
    monkeypatch.setattr("sys.argv", ["bench", "--backend", "reference", "--threads", "1", "--seconds", "0.01"])
    bench.main()
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert row[1].strip() == "prefill 5 of 20" and float(row[2]) > 0
