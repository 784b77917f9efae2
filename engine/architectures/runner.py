"""A loaded checkpoint: what the engine needs to know of it, and its forward. Owned by the engine thread.

A folder holds config.json, *.safetensors, tokenizer.json and, mostly, generation_config.json, tokenizer_config.json
and chat_template.jinja: the Hugging Face layout. Nothing in it is executed or unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from engine.architectures.architecture import Config, NotFused
from engine.architectures.decoders import Decoders
from engine.architectures.fields import refuse_unread
from engine.architectures.rope import context_length
from engine.architectures.table import architecture_name, known_architecture
from engine.architectures.weights import CheckpointWeights, weight_files
from engine.chat import BASE_FORMAT, CHAT_FORMATS, OWN_FORMAT, ChatFormat
from engine.errors import CheckpointError
from engine.kv.geometry import GroupGeometry, KVGeometry
from kernels.spec import Backend, DecoderTraits, StepBatch, layer_groups

if TYPE_CHECKING:
    from engine.architectures.adapters import Adapter

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
DIGEST_FILE = ".sha256.json"


@dataclass(frozen=True, eq=False, repr=False)
class Runner:
    """One loaded checkpoint. Only `forward` needs the engine thread; the rest may be read from any."""

    digest: str  # sha256 over config and weights, their precision, an adapter: the root of the prefix hashes
    architecture: str  # as config.json names it
    traits: DecoderTraits
    geometry: KVGeometry
    context_length: int  # tokens the checkpoint was made for
    dtype: torch.dtype  # of KV, and of weights that have no precision of their own
    weight_bytes: int  # of all weights as they are kept, an adapter's not among them
    tokenizer: Tokenizer
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    chat: ChatFormat  # the checkpoint's own, or BASE_FORMAT where it has none
    backend: Backend
    decoder: Any  # the backend's packed weights, which runners of other adapters share
    adapter: Adapter | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding. The tokenizer may know fewer tokens, or (rarely) more."""
        return self.traits.vocab_size

    def forward(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Writes the batch's KV into `pool` (uint8 [page, page_bytes]); returns fp32 logits [wanted, vocab]."""
        logits = self.backend.forward(self.decoder, pool, batch)
        return logits.cpu() if self.on_device else logits

    @cached_property
    def on_device(self) -> bool:
        """Whether logits come elsewhere than to the processor."""
        return self.backend.device.type != "cpu"

    def chat_format(self, name: str | None) -> ChatFormat:
        """The named format over this checkpoint's tokenizer; None is `chat`. Raises CheckpointError."""
        if name is None or name == self.chat.name:
            return self.chat
        if name not in CHAT_FORMATS:
            raise CheckpointError(f"there is no chat format {name!r}; there are: {', '.join(CHAT_FORMATS)}")
        return CHAT_FORMATS[name].bind(self.tokenizer, self.chat.special_tokens)


@dataclass(frozen=True)
class Computed:
    """A checkpoint's decoder, and what is known of it; the fields are those of Runner."""

    traits: DecoderTraits
    context_length: int
    weight_bytes: int
    decoder: Any


def load_checkpoint(
    folder: Path,
    *,
    dtype: torch.dtype,
    backend: Backend,
    progress: Progress,
    precision: str | None = None,
    decoders: Decoders | None = None,
) -> Runner:
    """Reads a folder into a Runner; `precision` is one of PRECISIONS, or None for weights of `dtype`. Weights
    that `decoders`, of one dtype and backend, has in memory are not read again. What the fused decoder does not compute
    is left to transformers' modules.

    Raises CheckpointError in the words of what is wrong with the folder, or with it for this backend.
    """
    config = read_json(folder / "config.json")
    if config.get("quantization_config"):
        raise CheckpointError("the weights are quantised (quantization_config); only plain float weights are read")
    name = architecture_name(config)
    tokenizer = read_tokenizer(folder)
    tokenizer_config = read_json(folder / "tokenizer_config.json", missing={})
    generation_config = read_json(folder / "generation_config.json", missing={})
    specials = special_tokens(tokenizer_config, read_json(folder / "special_tokens_map.json", missing={}))
    chat = own_chat_format(folder, tokenizer_config, tokenizer, specials)
    digest = checkpoint_digest(folder) + (f" {precision}" if precision else "")
    once = partial((decoders or Decoders()).get, digest)
    try:
        kind, computed = Runner, fuse(folder, config, dtype, backend, progress, once, precision)
    except NotFused as reason:
        kind, computed = borrow_instead(folder, config, reason, dtype, backend, progress, precision)
    return kind(
        digest=digest,
        architecture=name,
        traits=computed.traits,
        geometry=geometry_of(computed.traits, dtype),
        context_length=computed.context_length,
        dtype=dtype,
        weight_bytes=computed.weight_bytes,
        tokenizer=tokenizer,
        bos_token_id=bos_token_id(config, specials, tokenizer),
        eos_token_ids=eos_token_ids(config, generation_config, specials, tokenizer),
        chat=chat,
        backend=backend,
        decoder=computed.decoder,
    )


def fuse(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    backend: Backend,
    progress: Progress,
    once: Callable[[Callable[[], Any]], Any],
    precision: str | None,
) -> Computed:
    """Has the weights packed, `once` where others use them, for the backend's own decoder. Raises NotFused where that
    computes something else."""
    architecture = known_architecture(config)
    config = Config(config, architecture.defaults)
    traits = architecture.traits(config, dtype)
    refuse_unread(config)
    if reason := backend.unsupported(traits, dtype, precision=precision):
        refusal = CheckpointError if precision else NotFused
        raise refusal(f"the {backend.name} kernels cannot run this checkpoint: {reason}")
    tied = bool(config.get("tie_word_embeddings"))
    weights = CheckpointWeights(folder, architecture, traits, tied=tied, progress=progress)
    return Computed(
        traits=traits,
        context_length=context_length(config),
        weight_bytes=weights.num_bytes(dtype, precision=precision),
        decoder=once(partial(backend.pack, traits, weights, dtype, precision=precision)),
    )


def borrow_instead(
    folder: Path,
    config: Mapping[str, Any],
    reason: NotFused,
    dtype: torch.dtype,
    backend: Backend,
    progress: Progress,
    precision: str | None,
) -> tuple[type[Runner], Computed]:
    """The same through transformers' modules. Raises CheckpointError, which says both why not so and why so at all."""
    if precision:
        raise CheckpointError(f"only the fused decoder has {precision} weights; {reason}")
    from engine.architectures.borrowed import BorrowedRunner, borrow  # takes seconds, that most need not wait for

    log.info("%s runs through transformers' modules, for %s", folder, reason)
    try:
        return BorrowedRunner, borrow(folder, config, dtype=dtype, backend=backend, progress=progress)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (read through transformers, for {reason})") from error


def geometry_of(traits: DecoderTraits, dtype: torch.dtype) -> KVGeometry:
    return KVGeometry(
        tuple(
            GroupGeometry(group.window, len(group.layers), traits.num_kv_heads, traits.head_dim, dtype.itemsize)
            for group in layer_groups(traits)
        )
    )


def checkpoint_digest(folder: Path) -> str:
    """sha256 over config.json and the weights. File digests are kept beside them, valid while size and time agree."""
    kept = folder / DIGEST_FILE
    known = {}
    with contextlib.suppress(CheckpointError):  # one that is broken is written anew
        known = read_json(kept, missing={})
    digests = {}
    for path in (folder / "config.json", *weight_files(folder)):
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        entry = known.get(path.name)
        if not (isinstance(entry, list) and entry[:2] == stamp):
            with path.open("rb") as file:
                entry = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
        digests[path.name] = entry
    if digests != known:
        with contextlib.suppress(OSError):  # a folder we may not write to: computed again next time
            making = kept.with_name(f"{DIGEST_FILE}.{threading.get_native_id()}")
            making.write_text(json.dumps(digests))
            making.replace(kept)  # whole, for who reads it at this moment
    return hashlib.sha256(json.dumps({name: entry[2] for name, entry in digests.items()}).encode()).hexdigest()


def read_json(path: Path, missing: Any = None) -> Any:
    """An object; `missing` where there is no such file and it may be absent. Raises CheckpointError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return document


def read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token ... as text, as chat templates name them; the first config that has one wins."""
    found: dict[str, str] = {}
    for config in configs:
        for key, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found.setdefault(key, text)
    return found


def bos_token_id(config: Mapping[str, Any], specials: Mapping[str, str], tokenizer: Tokenizer) -> int | None:
    by_name = tokenizer.token_to_id(specials["bos_token"]) if "bos_token" in specials else None
    return by_name if by_name is not None else config.get("bos_token_id")


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], specials: Mapping[str, str], tokenizer: Tokenizer
) -> frozenset[int]:
    """All that end an answer: those of both configs and the tokenizer's own."""
    ids: set[int] = set()
    for written in (config.get("eos_token_id"), generation_config.get("eos_token_id")):
        ids.update(written if isinstance(written, list) else [] if written is None else [written])
    if "eos_token" in specials and (own := tokenizer.token_to_id(specials["eos_token"])) is not None:
        ids.add(own)
    return frozenset(ids)


def own_chat_format(
    folder: Path, tokenizer_config: Mapping[str, Any], tokenizer: Tokenizer, specials: dict[str, str]
) -> ChatFormat:
    """The checkpoint's template: chat_template.jinja before tokenizer_config's; of several, the one named default."""
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    file = folder / "chat_template.jinja"
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    if not template:
        return CHAT_FORMATS[BASE_FORMAT].bind(tokenizer, specials)
    return ChatFormat(OWN_FORMAT, template, stop=(), tokenizer=tokenizer, special_tokens=specials)
