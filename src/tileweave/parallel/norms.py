"""Which modules are norms."""

from __future__ import annotations

from torch import nn

# Norms that mix rows.
MIXING = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` normalises each row for itself."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, MIXING)
