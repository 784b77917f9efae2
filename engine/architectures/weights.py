"""The weights of a checkpoint under the kernels' names, read from safetensors one by one as they are asked for.

Knows files, names and shapes; what is done with a weight is the backend's affair. Never unpickles anything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.architectures.architecture import Architecture
from engine.errors import CheckpointError
from kernels.spec import KEPT_BYTES, DecoderTraits, is_matrix, weight_shapes

STORED_TYPES = {"F32": 4, "F16": 2, "BF16": 2}
UNUSED = ("rotary_emb.inv_freq",)  # buffers that older files carry


class CheckpointWeights(Mapping[str, torch.Tensor]):
    """A mapping from `kernels.spec` names to tensors mapped from the files.

    Raises CheckpointError when made, if the files hold anything but exactly the weights the traits ask for.
    `progress(done, total, "tensors")` is called at each first read.
    """

    def __init__(
        self,
        folder: Path,
        architecture: Architecture,
        traits: DecoderTraits,
        *,
        tied: bool,
        progress: Callable[[int, int, str], None],
    ) -> None:
        self._files = open_files(folder)
        self._names = stored_names(self._files, architecture, traits, tied=tied)
        self._rows = stacked_rows(self._names, weight_shapes(traits))
        self._progress = progress
        self._read: set[str] = set()
        self._embedding: torch.Tensor | None = None
        self._check(weight_shapes(traits), tied=tied)

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._names[name]
        if stored == self._names["embedding"]:  # a tied head is the very same tensor
            if self._embedding is None:
                self._embedding = self._tensor(stored)
            return self._embedding
        return self._tensor(stored, self._rows.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def num_bytes(self, dtype: torch.dtype, *, precision: str | None = None) -> int:
        """Of all weights as a backend keeps them, a tied one counted once."""
        tied = self._names["head"] == self._names["embedding"]
        stored = {stored: name for name, stored in self._names.items()}

        def size(name: str, weight: StoredTensor) -> int:
            if precision and is_matrix(name, weight.shape, tied=tied):
                return KEPT_BYTES[precision](*weight.shape)
            return weight.numel * dtype.itemsize

        return sum(size(name, self._slice(one)) for one, name in stored.items())

    def _tensor(self, stored: str, rows: slice | None = None) -> torch.Tensor:
        try:
            file = self._files[stored]
            tensor = file.get_slice(stored)[rows] if rows else file.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"weight {stored} cannot be read: {error}") from error
        self._read.add(stored)
        self._progress(len(self._read), len(set(self._names.values())), "tensors")
        return tensor

    def _slice(self, stored: str) -> StoredTensor:
        view = self._files[stored].get_slice(stored)
        return StoredTensor(tuple(view.get_shape()), view.get_dtype())

    def _check(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        missing = [stored for stored in self._names.values() if stored not in self._files]
        if missing:
            raise CheckpointError(f"weights are missing: {some(missing)}")
        ignored = (*UNUSED, "lm_head.weight") if tied else UNUSED
        extra = [s for s in self._files if s not in set(self._names.values()) and not s.endswith(ignored)]
        if extra:
            raise CheckpointError(f"weights that this architecture does not have: {some(extra)}")
        for name, stored in self._names.items():
            found = self._slice(stored)
            if found.dtype not in STORED_TYPES:
                raise CheckpointError(f"weight {stored} is stored as {found.dtype}; read are {', '.join(STORED_TYPES)}")
            height = sum(shapes[other][0] for other in self._rows if self._names[other] == stored)
            expected = (height or shapes[name][0], *shapes[name][1:])
            if found.shape != expected:
                raise CheckpointError(f"weight {stored} has shape {found.shape}; config.json says {expected}")


class StoredTensor:
    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        self.numel = torch.Size(shape).numel()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order of name. Raises CheckpointError, also for pickled weights."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [folder / Path(name).name for name in named]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index.name} is broken: {error}") from error
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{folder} lacks {some(absent)}")
    if not files:
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        why = f"; {pickled[0]} is a pickle, which could run code and is never read" if pickled else ""
        raise CheckpointError(f"{folder} has no .safetensors file{why}")
    return files


def open_files(folder: Path) -> dict[str, safe_open]:
    """Which open file holds each stored tensor. The data is mapped, not read."""
    holders = {}
    for path in weight_files(folder):
        try:
            file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name} is broken or cut short: {error}") from error
        holders.update(dict.fromkeys(file.keys(), file))
    return holders


def stored_names(
    files: Mapping[str, object], architecture: Architecture, traits: DecoderTraits, *, tied: bool
) -> dict[str, str]:
    """Our name -> the file's. A bare model (not a ...ForCausalLM) is saved without the `model.` in front."""
    prefix = "" if "embed_tokens.weight" in files else "model."
    names = {"embedding": f"{prefix}embed_tokens.weight", "final_norm": f"{prefix}norm.weight"}
    names["head"] = names["embedding"] if tied else "lm_head.weight"
    for i in range(traits.num_layers):
        for ours, theirs in architecture.layer_weights.items():
            names[f"layers.{i}.{ours}"] = f"{prefix}layers.{i}.{theirs}"
    return names


def stacked_rows(names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, slice]:
    """Of our weights that share one of the file: which rows of it. A tied head is the whole of the embedding."""
    shared = Counter(stored for name, stored in names.items() if name != "head")
    rows, ends = {}, Counter[str]()
    for name, stored in names.items():
        if name != "head" and shared[stored] > 1:
            rows[name] = slice(ends[stored], ends[stored] + shapes[name][0])
            ends[stored] = rows[name].stop
    return rows


def some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
