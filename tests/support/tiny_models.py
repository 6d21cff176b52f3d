"""Tiny models of transformers with random weights, and how far results of two are apart."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def tiny_model(kind: str, task: str, seed: int, options: dict[str, Any]) -> Any:
    """A model such as ``LlamaForCausalLM``, of kind "Llama" and task "ForCausalLM". No parameter
    is zero."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}{task}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference over the largest number of b."""
    return float(((a - b).abs().max() / b.abs().max().clamp_min(1e-6)).detach())
