"""Compiling at first use: once, safely beside another process, and with a clear word where it cannot be done."""

import logging
import os
import shutil
import stat
import subprocess
import sys

import pytest

import kernels
from kernels.cpu import build
from kernels.reference import ReferenceBackend


def fake_compiler(folder, script):
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


@pytest.fixture
def counting_compiler(tmp_path, monkeypatch):
    """A compiler that notes each call and writes an empty library; comes first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    calls = tmp_path / "calls"
    fake_compiler(
        folder, f'case "$*" in *--version*) echo one;; *) echo call >> {calls}; for out; do :; done; : > "$out";; esac'
    )
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return lambda: len(calls.read_text().splitlines()) if calls.exists() else 0


def test_a_second_start_compiles_nothing(tmp_path, counting_compiler):
    first, second = (build.shared_object("native", tmp_path / "cache") for _ in range(2))
    assert first == second and first.exists() and counting_compiler() == 1


def test_another_instruction_set_or_source_is_another_file(tmp_path, counting_compiler, monkeypatch):
    cache = tmp_path / "cache"
    native = build.shared_object("native", cache)
    assert build.shared_object("scalar", cache) != native
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "kernels.cpp").write_text("// changed")
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    assert build.shared_object("native", cache) != native
    assert counting_compiler() == 3


def test_of_two_processes_that_start_at_once_one_builds_and_both_get_a_whole_library(tmp_path):
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("no C++ compiler")
    calls, cache, sources = tmp_path / "calls", tmp_path / "cache", tmp_path / "sources"
    # the real one, and slow enough that they meet
    fake_compiler(tmp_path, f'case "$*" in *kernels.cpp*) echo call >> {calls}; sleep 1;; esac; exec {compiler} "$@"')
    sources.mkdir()
    (sources / "kernels.cpp").write_text('extern "C" __attribute__((visibility("default"))) void arena_isa() {}')
    load = (
        "import ctypes, pathlib; from kernels.cpu import build;"
        f"build.SOURCE_FOLDER = pathlib.Path({str(sources)!r});"
        f"path = build.shared_object('scalar', pathlib.Path({str(cache)!r}));"
        "ctypes.CDLL(str(path)).arena_isa; print(path)"
    )
    command = [sys.executable, "-c", load]
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    paths = {process.communicate(timeout=240)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert [str(path) for path in cache.iterdir()] == list(paths)  # one file, and no litter
    assert calls.read_text() == "call\n"


def test_without_a_compiler_the_reference_takes_over_and_the_log_says_why(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="kernels"):
        assert kernels.load("auto", cache_folder=tmp_path).name == "reference"
    assert "no C++ compiler found (looked for c++, g++, clang++); Debian's package is g++" in caplog.text
    assert "kernel backend: reference" in caplog.text


def test_a_backend_that_computes_something_else_is_not_taken(monkeypatch, caplog):
    class Wrong(ReferenceBackend):
        name = "wrong"

        def forward(self, decoder, pool, batch):
            return super().forward(decoder, pool, batch) * 1.01

    monkeypatch.setitem(kernels.BACKENDS, "cpu", lambda threads, **options: Wrong())
    assert kernels.load().name == "reference"
    assert "wrong differs from the reference by 1.0e-02 in torch.float32" in caplog.text


def test_asked_for_by_name_the_missing_compiler_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(kernels.BackendUnavailable, match=r"no C\+\+ compiler"):
        kernels.load("cpu", cache_folder=tmp_path)


def test_what_the_compiler_complained_of_is_passed_on(tmp_path, monkeypatch):
    fake_compiler(tmp_path, "echo 'fatal error: stdio.h not found' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(kernels.BackendUnavailable, match=r"stdio\.h not found"):
        build.shared_object("native", tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(kernels.BackendUnavailable, match=f"cannot build in {blocked}"):
        build.shared_object("native", blocked / "kernels")
