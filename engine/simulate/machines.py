"""Models on machines: how many tokens of KV there is room for, and how long a step takes at best."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9
GIB = 2**30
MEMORY_USED = 0.9  # share of an accelerator's memory for weights and KV, where the paper does not print the slots


@dataclass(frozen=True)
class Chip:
    memory_bytes: float
    bytes_per_second: float
    operations_per_second: float  # dense, 16-bit


CHIPS = {
    "A100-40GB": Chip(40 * GIB, 1555 * GB, 312e12),
    "A100-80GB": Chip(80 * GIB, 2039 * GB, 312e12),
    "H100": Chip(80 * GIB, 3350 * GB, 989e12),
    "H200": Chip(141 * GB, 4800 * GB, 989e12),
}


@dataclass(frozen=True)
class Machine:
    """One model on `chips` chips, 16-bit weights and KV. `printed_slots`: as the paper's Table 1 has them."""

    model: str
    parameters: float
    layers: int
    kv_width: int  # kv heads * head_dim
    context_length: int  # tokens
    chip: str
    chips: int
    printed_slots: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_width * 2

    @property
    def slots(self) -> int:
        """Tokens whose KV fits."""
        if self.printed_slots:
            return self.printed_slots
        free = MEMORY_USED * CHIPS[self.chip].memory_bytes * self.chips - 2 * self.parameters
        return int(free / self.kv_bytes_per_token)

    def step_seconds(self, tokens: int, context_tokens: int) -> float:
        """A lower bound: `tokens` go through all weights, `context_tokens` of KV are read; nothing else costs time."""
        chip = CHIPS[self.chip]
        reading = 2 * self.parameters / (chip.bytes_per_second * self.chips)
        computing = 2 * self.parameters * tokens / (chip.operations_per_second * self.chips)
        return max(reading, computing) + self.context_seconds(context_tokens)

    def context_seconds(self, context_tokens: int) -> float:
        """To read the KV of so many tokens once."""
        return context_tokens * self.kv_bytes_per_token / (CHIPS[self.chip].bytes_per_second * self.chips)


MACHINES = {
    "opt-13b": Machine("OPT-13B", 13e9, 40, 5120, 2048, "A100-40GB", 1, 15_728),
    "opt-66b": Machine("OPT-66B", 66e9, 64, 9216, 2048, "A100-40GB", 4, 9_700),
    "opt-175b": Machine("OPT-175B", 175e9, 96, 12288, 2048, "A100-80GB", 8, 60_100),
    "llama-13b": Machine("LLaMA-13B", 13e9, 40, 5120, 2048, "A100-40GB", 1, 15_728),
    "llama-3-8b-h100": Machine("Llama-3-8B", 8.03e9, 32, 1024, 8192, "H100", 1),
    "llama-3-8b-h200": Machine("Llama-3-8B", 8.03e9, 32, 1024, 8192, "H200", 1),
    "llama-3-70b-h100": Machine("Llama-3-70B", 70.6e9, 80, 1024, 8192, "H100", 4),
    "llama-3-70b-h200": Machine("Llama-3-70B", 70.6e9, 80, 1024, 8192, "H200", 2),
}
