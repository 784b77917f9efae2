"""A GGUF file, read and nothing else: its metadata, and its tensors as arrays of numbers or of quantised blocks.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Every length in the
file is checked against the file's size before it is believed, so a broken or cut file raises CheckpointError here.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.errors import CheckpointError

# value type -> little-endian numpy type; 8 is a string, 9 an array
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
QUANTIZATIONS = {kind.value: kind for kind in GGMLQuantizationType}
CHUNK_ELEMENTS = 1 << 22  # dequantised at a time: 16 MiB of fp32


@dataclass(frozen=True)
class TensorInfo:
    """shape: rows first, as in PyTorch. start: byte in the file."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


class GGUFFile:
    """`metadata`: plain values, lists of text, numpy arrays of numbers. `tensors`: by name, in the file's order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        reader = Reader(self._bytes, path.name)
        if reader.take(4) != b"GGUF":
            raise CheckpointError(f"{path.name} is not a GGUF file")
        version = reader.number("<u4")
        if version not in (2, 3):
            raise CheckpointError(f"{path.name} is GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_values = reader.number("<u8"), reader.number("<u8")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = reader.text()
            self.metadata[key] = reader.value(reader.number("<u4"))
        self.tensors = self._read_tensors(reader, num_tensors)

    def values(self, name: str) -> Iterator[np.ndarray]:
        """The tensor dequantised to fp32, as consecutive pieces of rows [rows, columns] (or the whole vector [n]).
        Raises CheckpointError where its type is one that holds no weights, or that nobody has written a reader for."""
        info = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, info.num_bytes, info.start)
        columns = info.shape[-1]
        rows = raw.reshape(math.prod(info.shape[:-1]), -1)
        step = max(1, CHUNK_ELEMENTS // columns)
        for first in range(0, len(rows), step):
            try:
                piece = dequantize(rows[first : first + step], info.type).reshape(-1, columns)
            except NotImplementedError as error:
                why = f"{self.path.name}: tensor {name} is of type {info.type.name}, which is not read"
                raise CheckpointError(why) from error
            yield piece if len(info.shape) > 1 else piece[0]

    def _read_tensors(self, reader: Reader, count: int) -> dict[str, TensorInfo]:
        entries = []
        for _ in range(count):
            name = reader.text()
            shape = tuple(reader.number("<u8") for _ in range(reader.number("<u4")))[::-1]
            entries.append((name, shape, reader.number("<u4"), reader.number("<u8")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path.name} is broken: its alignment is {alignment!r}")
        data_start = -(-reader.at // alignment) * alignment
        tensors = {}
        for name, shape, number, offset in entries:
            if number not in QUANTIZATIONS:
                raise CheckpointError(f"{self.path.name}: tensor {name} is of unknown type {number}")
            kind = QUANTIZATIONS[number]
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or min(shape) < 1 or shape[-1] % block:
                raise CheckpointError(f"{self.path.name} is broken: tensor {name} has shape {shape} in {kind.name}")
            info = TensorInfo(shape, kind, data_start + offset, math.prod(shape) // block * block_bytes)
            if info.start + info.num_bytes > len(self._bytes):
                raise CheckpointError(
                    f"{self.path.name} is cut short: it has {len(self._bytes):,} bytes, "
                    f"and tensor {name} ends at {info.start + info.num_bytes:,}"
                )
            tensors[name] = info
        return tensors


class Reader:
    """Takes values off a mapped file, one after the other."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.at = 0
        self._data = data
        self._name = name

    def take(self, count: int) -> bytes:
        if self.at + count > len(self._data):
            raise CheckpointError(f"{self._name} is cut short or broken: its header does not end within the file")
        taken = self._data[self.at : self.at + count]
        self.at += count
        return taken

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0].item()

    def numbers(self, kind: str, count: int) -> np.ndarray:
        return np.frombuffer(self.take(np.dtype(kind).itemsize * count), kind)

    def text(self) -> str:
        length = struct.unpack("<Q", self.take(8))[0]
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.text()
        inner, count = (self.number("<u4"), self.number("<u8")) if kind == ARRAY else (kind, 0)
        if inner in NUMBERS:
            return self.numbers(NUMBERS[inner], count)
        if inner == STRING:
            return [self.text() for _ in range(count)]
        raise CheckpointError(f"{self._name} is broken: its metadata has a value of unknown type {inner}")
