"""A real engine process over tiny random checkpoints, for tests of the engine, of the app and in the browser.

    with EngineProcess(models=[TinyModel("a"), TinyModel("b", family="gemma3")]) as engine:
        httpx.get(engine.url + "/v1/models")

It listens on a free port of loopback; `kill9` ends it as a crash would, `restart` brings it back on the same port with
no model registered, as after a crash. Checkpoints are made once and kept for the whole test run.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.child import EngineChild, call, register
from engine.errors import EngineError
from tests.engine.tiny import IM_END, VOCAB_SIZE, tiny_gemma3, tiny_llama, tiny_tokenizer

SPOKEN = "🙈ñ語ب"  # more tokens than characters, and no token twice


def tiny_speaker(folder: Path, *, seed: int = 0) -> Path:
    """A llama that says SPOKEN and ends, whatever it is asked and however it is sampled: each token is followed by the
    next of the text."""
    tiny_llama(folder, seed=seed, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()  # what a token says of itself goes straight to the head
    said = [*tiny_tokenizer(adds_bos=False).encode(SPOKEN).ids, IM_END]
    assert len(set(said)) == len(said) > 2 * len(SPOKEN)
    rows = torch.randn(
        VOCAB_SIZE, weights["model.embed_tokens.weight"].shape[1], generator=torch.Generator().manual_seed(0)
    )
    other = rows[said[-1]]  # one row for every token that does not belong to the text, the last one included
    embedding = other.repeat(VOCAB_SIZE, 1)
    head = torch.zeros_like(embedding)
    head[said[0]] = other
    for token, following in pairwise(said):
        embedding[token] = head[following] = rows[token]
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embedding, head
    weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


FAMILIES = {"llama": tiny_llama, "gemma3": tiny_gemma3, "speaker": tiny_speaker}
FOLDER = tempfile.TemporaryDirectory(prefix="paged-arena-tiny-")


@functools.cache
def tiny_folder(family: str = "llama", seed: int = 0) -> Path:
    return FAMILIES[family](Path(tempfile.mkdtemp(prefix=f"{family}-", dir=FOLDER.name)), seed=seed)


@dataclass(frozen=True)
class TinyModel:
    name: str
    family: str = "llama"
    seed: int = 0  # of the weights; models of one family and seed share the checkpoint
    system_prompt: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    context_length: int | None = None
    precision: str | None = None
    adapter: str | None = None

    @property
    def source(self) -> str:
        return f"path:{tiny_folder(self.family, self.seed)}"

    def as_dict(self) -> dict[str, Any]:
        """The body of PUT /models/{name}, and its name."""
        return {
            "name": self.name,
            "source": self.source,
            "system_prompt": self.system_prompt,
            "sampling": self.sampling,
            "chat_template": self.chat_template,
            "context_length": self.context_length,
            "precision": self.precision,
            "adapter": self.adapter,
        }


class EngineProcess:
    """`settings` are fields of EngineConfig. By default: a pool of 16 MiB, fp32, reference kernels, one thread."""

    def __init__(self, models: Sequence[TinyModel] = (), *, api_key: str = "", admin_key: str = "", **settings: Any):
        self._keys = {"ARENA_ENGINE_API_KEY": api_key, "ARENA_ENGINE_ADMIN_KEY": admin_key}
        self.admin_key = admin_key or api_key
        defaults = {"kv_memory_bytes": 16 * 1024**2, "dtype": "float32", "backend": "reference", "threads": 1}
        self._settings = {**defaults, "check_integrity": True, "log_level": "warning", **settings}
        self._child = self._start()
        try:
            for model in models:
                self.put(model)
        except BaseException:
            self.close()
            raise

    def _start(self, port: int = 0) -> EngineChild:
        arguments = ["--port", str(port)]
        for name, value in self._settings.items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                arguments += [flag, str(value)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ARENA_ENGINE_")}
        return EngineChild(arguments, environment={**environment, **self._keys, "OMP_NUM_THREADS": "1"})

    @property
    def url(self) -> str:
        return self._child.url

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def put(self, model: TinyModel) -> None:
        """Registers the model and waits until it is ready."""
        register(self.url, model.as_dict(), self.admin_key)

    def kv(self) -> dict[str, Any]:
        return call(self.url + "/kv", key=self.admin_key)

    def kill9(self) -> None:
        self._child.process.send_signal(signal.SIGKILL)
        self._child.process.wait()

    def restart(self) -> None:
        port = int(self.url.rsplit(":", 1)[1])
        self.close()
        try:
            self._child = self._start(port)
        except EngineError:  # for as long as it was free, another program's connection may have had the port
            time.sleep(1)
            self._child = self._start(port)

    def close(self) -> None:
        self._child.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
