"""What a choice may say beside what it would: tokens made likelier or less likely (`logit_bias`)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampling import SamplingRow
from engine.sequence import SamplingParams


class Constraint:
    """Changes the logits of one choice before its token is drawn, and hears which one it was."""

    def __init__(self, params: SamplingParams) -> None:
        tokens, values = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        self._biased = torch.tensor(tokens, dtype=torch.int64)
        self._bias = torch.tensor(values, dtype=torch.float32)

    def apply(self, logits: Tensor, row: SamplingRow) -> None:
        """In place. logits fp32 [vocab]."""
        logits[self._biased] += self._bias

    def accept(self, token: int) -> bool:
        """Whether nothing may follow the token."""
        return False
