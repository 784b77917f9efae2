"""What a choice may say beside what it would: tokens made likelier or less likely, and those of a grammar alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.sampling import SamplingRow
from engine.sequence import SamplingParams

if TYPE_CHECKING:
    from engine.grammar import Grammar


class Constraint:
    """Changes the logits of one choice before its token is drawn, and hears which one it was."""

    def __init__(self, params: SamplingParams, grammar: Grammar | None) -> None:
        tokens, values = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        self._biased = torch.tensor(tokens, dtype=torch.int64)
        self._bias = torch.tensor(values, dtype=torch.float32)
        self._grammar = grammar.copy() if grammar else None

    def apply(self, logits: Tensor, row: SamplingRow) -> None:
        """In place. logits fp32 [vocab]. Where the grammar allows nothing but an end, `min_tokens` gives way to it."""
        logits[self._biased] += self._bias
        if self._grammar:
            allowed = self._grammar.allowed()[: len(logits)]
            logits[torch.from_numpy(~allowed)] = -torch.inf
            if len(row.banned) and np.count_nonzero(allowed) == np.count_nonzero(allowed[list(row.banned)]):
                row.banned = ()

    def accept(self, token: int) -> bool:
        """Whether nothing may follow the token. Raises ValueError where the grammar gives up."""
        return self._grammar is not None and self._grammar.accept(token)
