"""The tokenizer that a GGUF file describes in llama.cpp's words, as a `tokenizers` one.

Two kinds exist here: byte-level BPE ("gpt2"), and SentencePiece's BPE with byte fallback ("llama"), whose file lists
no merges: they follow from the vocabulary, whose order is the order of merging.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import CheckpointError

CONTROL, USER_DEFINED = 3, 4  # token types
SPACE = "\u2581"  # how SentencePiece writes one
SPECIAL_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def by_regex(split: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digit_by_digit() -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])


# How text is cut before merging, by `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": digit_by_digit,
    "refact": digit_by_digit,  # granite's
    "llama-bpe": lambda: by_regex(LLAMA3_SPLIT),
    "smaug-bpe": lambda: by_regex(LLAMA3_SPLIT),  # smollm3's
    "qwen2": lambda: by_regex(QWEN2_SPLIT),
}
NORMALIZERS = {"qwen2": normalizers.NFC}  # what is done to text before that


def gguf_tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and what belongs in its tokenizer_config.json. Raises CheckpointError."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in BUILDERS or not isinstance(tokens, list):
        raise CheckpointError(f"GGUF tokenizer {kind!r} is not supported; supported: {', '.join(BUILDERS)}")
    try:
        tokenizer = BUILDERS[kind](tokens, metadata)
        add_special_tokens(tokenizer, tokens, metadata)
        config = tokenizer_config(tokens, metadata)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the GGUF file's tokenizer is broken: {error}") from error
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and "bos_token" in config:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer, config


def byte_level(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    cut = metadata.get("tokenizer.ggml.pre")
    if cut not in PRE_TOKENIZERS:
        raise CheckpointError(f"GGUF pre-tokenizer {cut!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[cut]()
    if cut in NORMALIZERS:
        tokenizer.normalizer = NORMALIZERS[cut]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    # Gemma's files spell runs of spaces as spaces, SentencePiece as its own sign.
    vocab = {SPACE * len(t) if t.isspace() and set(t) == {" "} else t: i for i, t in enumerate(tokens)}
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    merges = [pair for token in vocab for pair in halves(token, vocab)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        tokenizer.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(text)
    return tokenizer


def halves(token: str, vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The pairs of tokens that this one can be merged from, longest left half first."""
    for at in range(len(token) - 1, 0, -1):
        if (left := token[:at]) in vocab and (right := token[at:]) in vocab:
            yield left, right


BUILDERS = {"gpt2": byte_level, "llama": sentencepiece}


def add_special_tokens(tokenizer: Tokenizer, tokens: list[str], metadata: dict[str, Any]) -> None:
    """Control tokens become special; user-defined ones are only found whole in text, as llama.cpp does."""
    types = metadata.get("tokenizer.ggml.token_type", ())
    pairs = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == CONTROL]
    )
    whole = [token for token, kind in pairs if kind == USER_DEFINED and tokenizer.token_to_id(token) is not None]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])


def tokenizer_config(tokens: list[str], metadata: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: tokens[metadata[key]] for name, key in SPECIAL_IDS.items() if key in metadata}
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
