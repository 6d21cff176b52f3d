"""Experts of transformers that are sharded by expert, also those with FP8 weights."""

from __future__ import annotations

from typing import Any

import torch

from tileweave.integrations import _scaled_experts as fp8
from tileweave.parallel import experts as plain


class ExpertParallel(plain.ExpertParallel):
    """Calls the experts of all ranks for this rank's tokens, as an ``EPImplementation`` does."""

    def _compute(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int
    ) -> torch.Tensor:
        experts: Any = self.experts
        if not fp8.is_fp8(experts):
            return super()._compute(x, ids, weights, most)
        activate = None if self._is_swiglu() else self._activate
        return fp8.compute(experts, x, ids, weights, most, self.group, activate)

    def _has_default_gate(self) -> bool:
        return super()._has_default_gate() or fp8.is_plain_swiglu(self.experts)
