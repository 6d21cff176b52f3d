"""Matmuls by cuBLAS, as the calls that communicate before or after them take them.

No triton: operators make these in each call, and importing them must not load it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

Tensors = tuple[torch.Tensor, ...]
Storing = Callable[[Tensors, torch.Tensor], torch.Tensor]
_linear: Any = functional.linear  # whose stub lacks out=


class Product(Protocol):
    """A matmul by cuBLAS of rows of x, given by their parts, and what it does not take from x:
    :class:`Plain`, or ``scaled.ScaledProduct``."""

    @property
    def cols(self) -> int:
        """Columns of the result."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """That of the result."""
        ...

    def __call__(self, x: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """The result, in ``out`` if given."""
        ...

    def rows_of(self, x: Tensors, begin: int, rows: int) -> Tensors:
        """The parts of these rows of x."""
        ...

    def repeated(self) -> Storing:
        """This product, for several calls with ``out``."""
        ...


class Plain(NamedTuple):
    """x [rows, K] @ w [n, K].T + bias; x has one part."""

    w: torch.Tensor
    bias: torch.Tensor | None

    @property
    def cols(self) -> int:
        return self.w.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.w.dtype

    def __call__(self, x: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        return multiply(x[0], self.w, self.bias, out)

    def rows_of(self, x: Tensors, begin: int, rows: int) -> Tensors:
        return (x[0][begin : begin + rows],)  # narrow() takes half as long again

    def repeated(self) -> Storing:
        turned, bias = self.w.t(), self.bias  # turned once: each view takes 2 us
        if bias is None:
            return lambda x, out: torch.mm(x[0], turned, out=out)
        return lambda x, out: torch.addmm(bias, x[0], turned, out=out)


class Added(NamedTuple):
    """What is added to the sum, and what it is normalised with; None where there is none."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 0.0
    quantize: str = ""  # "row" or "block": the norm becomes FP8, with scales


NOTHING = Added()


def multiply(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ w.T + bias, in ``out`` if given."""
    if bias is None and out is not None and x.requires_grad and torch.is_grad_enabled():
        return torch.mm(x, w.t(), out=out)  # below autograd, where linear refuses this
    return _linear(x, w, bias, out=out)  # takes 1 us less than mm and a view w.t()
