"""How many threads are worth starting: the processors of this process, and a container's share of them."""

import os

import pytest

from kernels.processors import processor_count

ALL = {0, 1, 2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 8),
        ("0::/a.slice/b\n", {"a.slice/cpu.max": "300000 100000\n", "a.slice/b/cpu.max": "max 100000\n"}, 3),
        ("0::/not/seen/inside\n", {"cpu.max": "400000 100000\n"}, 4),
        ("3:cpuset:/\n2:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "150000\n"}, 2),
        ("2:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n"}, 8),
        ("3:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "150000\n", "a/cpu.max": "100000 100000\n"}, 8),
        (None, {"cpu.max": "200000 100000\n"}, 8),
    ],
)
def test_no_more_than_the_quota_pays_for_and_one_at_least(tmp_path, monkeypatch, groups, files, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: ALL)
    own = tmp_path / "own"
    if groups is not None:
        own.write_text(groups)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if name.endswith("quota_us"):
            file.with_name("cpu.cfs_period_us").write_text("100000\n")
    assert processor_count(tmp_path / "cgroup", own) == count


def test_here_it_is_some_of_the_processors_that_this_process_may_run_on():
    assert 1 <= processor_count() <= len(os.sched_getaffinity(0))
