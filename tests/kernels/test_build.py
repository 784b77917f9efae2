"""Compiling at first use: once, safely beside another process, and with a clear word where it cannot be done."""

import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("left", [0, 20, -1])  # bytes; -1: all but the last
def test_a_library_that_was_cut_short_is_built_anew(tmp_path, counting_compiler, left):
    path = build.shared_object("native", tmp_path / "cache")
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    assert build.shared_object("native", tmp_path / "cache") == path and path.read_bytes() == whole
    assert counting_compiler() == 2


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


@pytest.fixture
def two_threads():
    """PyTorch's, which a kernel backend leaves as they are if it is not taken."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_without_a_compiler_the_reference_takes_over_and_the_log_says_why(tmp_path, monkeypatch, caplog, two_threads):
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="kernels"):
        assert kernels.load("auto", cache_folder=tmp_path).name == "reference"
    assert torch.get_num_threads() == 2
    assert "no C++ compiler found (looked for c++, g++, clang++); Debian's package is g++" in caplog.text
    assert "kernel backend: reference" in caplog.text


def test_where_the_system_does_not_load_the_library_the_reference_takes_over(tmp_path, counting_compiler, caplog):
    assert kernels.load("auto", cache_folder=tmp_path).name == "reference"
    assert "the compiled kernels cannot be loaded" in caplog.text
    with pytest.raises(kernels.BackendUnavailable, match=f"cannot be loaded: {tmp_path}.*file too short"):
        kernels.load("cpu", cache_folder=tmp_path)


def test_a_backend_that_fails_is_not_taken(monkeypatch, caplog, two_threads):
    class Failing(ReferenceBackend):
        def forward(self, decoder, pool, batch):
            raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setitem(kernels.BACKENDS, "cpu", lambda threads, **options: Failing(threads=7))
    assert kernels.load().name == "reference"
    assert "no kernel image is available" in caplog.text
    assert torch.get_num_threads() == 2


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


def test_a_name_that_the_file_system_does_not_take_is_named(tmp_path):
    with pytest.raises(kernels.BackendUnavailable, match=r"cannot build in .*File name too long"):
        build.shared_object("native", tmp_path / ("x" * 300))


def test_a_folder_named_from_where_we_are_is_found_by_the_loader(tmp_path, counting_compiler, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert build.shared_object("native", Path(".")).parent == tmp_path
