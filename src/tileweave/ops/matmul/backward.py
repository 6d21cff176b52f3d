"""Products of the backward: each operator's input gradient is its dual operator, with w transposed.

Forward and backward contract a weight along different dimensions. Kernels read either layout
(``DEPTH_FIRST``), so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tileweave.ops import reference
from tileweave.ops.core import collectives
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import group_of
from tileweave.ops.matmul.concurrent_gather import begin_gather_of_backward, too_large
from tileweave.ops.matmul.inputs import plan_for
from tileweave.planning.matmul import (
    plan_all_gather_matmul,
    plan_all_to_all_matmul,
    plan_matmul_all_to_all,
    plan_matmul_reduce_scatter,
)
from tileweave.planning.schedules.scatter import Exchange


def gather_and_multiply(
    grad: torch.Tensor, w: torch.Tensor, group_name: str, keep: bool, cols: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """gather(grad) @ w for grad [m, n] and w [n, K], and gather(grad) if ``keep``.

    ``cols``: the largest K of any rank, where ranks differ; 0: all have the same.
    """
    group = group_of(group_name)
    if cols:
        (y,), gathered = torch.ops.tileweave.all_gather_matmul_list(
            grad, [w.t()], [], [], group_name, keep, [cols]
        )
    elif (
        plan_for(
            plan_all_gather_matmul,
            grad,
            grad.shape[0],
            w.shape[1],
            known_topology_of(group_name),
        ).config
        is None
    ):
        y, gathered = reference.all_gather_matmul(grad, w.t(), None, group)
    else:
        y, gathered = operator("all_gather_matmul").within(grad, w.t(), None, group_name, keep)
    return y, gathered if keep else None


@dataclass(slots=True)
class GatherBackward:
    """The backward of y_i = gather(x) @ w_i.T, for one weight or several.

    grads : gradients [M, n_i] of the results; None for a result that the loss does not use, on all
        ranks alike.

    grad_gathered : gradient [M, K] of gather(x), or None.

    gathered : gather(x) [M, K] if it was kept, else None.

    depth : the largest sum of n_i of any rank, where ranks differ; 0: all have the same.

    main_grads : fp32 tensors to which weight gradients are added, one per weight, or none.
    """

    grads: Sequence[torch.Tensor | None]
    grad_gathered: torch.Tensor | None
    x: torch.Tensor
    weights: Sequence[torch.Tensor]
    gathered: torch.Tensor | None
    group_name: str
    depth: int = 0
    main_grads: Sequence[torch.Tensor] = ()

    def run(
        self, need_x: bool, need_w: Sequence[bool]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Return gx, the gradients of the weights, and ``grads`` made contiguous.

        gx = reduce_scatter(sum of grad_i @ w_i) is one product of concatenated gradients and
        weights, so it is rounded once. gw_i = grad_i.T @ gather(x), with one gather for all. None
        for a gradient that is not needed.
        """
        grads = [None if grad is None else grad.contiguous() for grad in self.grads]
        need_w = [need and grad is not None for need, grad in zip(need_w, grads, strict=True)]
        gathers = any(need_w) and self.gathered is None
        grad, w = self._joined(grads) if need_x else (None, None)
        fused = (
            grad is not None
            and w is not None
            and self.grad_gathered is None
            and self.scatters_fused(grad, w)
            and not (gathers and too_large(self.x))
            # over nodes a gather of x by NCCL is hidden by the matmul of the input gradient
            and not (gathers and known_topology_of(self.group_name).nodes > 1)
        )
        if fused and grad is not None and w is not None:
            gx, gathered = self._scatter_fused(grad, w, gathers)
            gw = self._weight_gradients(grads, gathered, need_w)
        else:
            gx, gw = self._overlapped(grads, grad, w, need_x, need_w)
        return gx, gw, grads

    def _joined(
        self, grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients [M, n] and the weights [n, K] of all results that the loss uses."""
        used = [(g, w) for g, w in zip(grads, self.weights, strict=True) if g is not None]
        if len(used) <= 1:
            return used[0] if used else (None, None)
        return torch.cat([g for g, _ in used], dim=1), torch.cat([w for _, w in used])

    def _scatter_fused(
        self, grad: torch.Tensor, w: torch.Tensor, gathers: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """gx in one kernel, while copy engines gather x; and gather(x).

        No kernel of NCCL may run concurrently with a kernel that waits for peers.
        """
        gathered = self.gathered
        gathering = begin_gather_of_backward(self.x, self.group_name) if gathers else None
        try:
            gx = self.multiply_and_scatter(grad, w)
        finally:  # also when memory runs out: the next gather would find the signals of this one
            if gathering is not None:
                gathered = gathering.wait()
        return gx, gathered

    def _overlapped(
        self,
        grads: Sequence[torch.Tensor | None],
        grad: torch.Tensor | None,
        w: torch.Tensor | None,
        need_x: bool,
        need_w: Sequence[bool],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Matmuls of torch that overlap with collectives.

        x is gathered while the input gradient is computed, gx is scattered while the weight
        gradients are computed.
        """
        group = group_of(self.group_name)
        gathering = scattering = gx = None
        gathered = self.gathered
        if any(need_w) and gathered is None:
            gathered, gathering = collectives.begin_all_gather(self.x, group)
        if need_x:
            full = None if grad is None or w is None else self.multiply(grad, w)
            if full is None:
                full = self.grad_gathered
            elif self.grad_gathered is not None:
                full += self.grad_gathered
            assert full is not None, "a backward has the gradient of some result"
            gx, scattering = collectives.begin_reduce_scatter(full, group)
        if gathering is not None:
            gathering.wait()
        gw = self._weight_gradients(grads, gathered, need_w)
        if scattering is not None:
            scattering.wait()
        return gx, gw

    def _weight_gradients(
        self,
        grads: Sequence[torch.Tensor | None],
        gathered: torch.Tensor | None,
        need_w: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """gw_i for each weight that needs it and is not added to ``main_grads``."""
        found: list[torch.Tensor | None] = [None] * len(self.weights)
        for at, (grad, needs) in enumerate(zip(grads, need_w, strict=True)):
            if not needs or grad is None or gathered is None:
                continue
            if self.main_grads:
                add_product(self.main_grads[at], grad, gathered)
            else:
                found[at] = self.weight_gradient(grad, gathered)
        return found

    # The matmuls, which those of FP8 replace.

    def scatters_fused(self, grad: torch.Tensor, w: torch.Tensor) -> bool:
        """Whether :meth:`multiply_and_scatter` is one fused kernel."""
        return scatters_fused(grad, w, self.group_name, self.depth)

    def multiply_and_scatter(self, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over ranks of grad [M, n] @ w [n, K]."""
        return multiply_and_scatter(grad, w, self.group_name, self.depth)

    def multiply(self, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """grad [M, n] @ w [n, K]."""
        return grad @ w

    def weight_gradient(self, grad: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        """grad.T [n, M] @ gathered [M, K]."""
        return grad.t() @ gathered


def add_product(main_grad: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    """main_grad [n, K] += grad [M, n].T @ rows [M, K], in the precision of ``main_grad``.

    On a GPU one matmul of cuBLAS, which adds its fp32 sums to ``main_grad``. On the CPU through
    fp32 copies.
    """
    if main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), rows)
    elif main_grad.is_cuda:
        torch.ops.aten.addmm.dtype_out(main_grad, grad.t(), rows, main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(grad.t().to(main_grad.dtype), rows.to(main_grad.dtype))


def scatters_fused(grad: torch.Tensor, w: torch.Tensor, group_name: str, depth: int = 0) -> bool:
    """Whether :func:`multiply_and_scatter` is one fused kernel.

    While such a kernel runs, no other work may need a multiprocessor.
    """
    ranks = known_topology_of(group_name)
    return (
        plan_for(
            plan_matmul_reduce_scatter,
            grad,
            grad.shape[0] // ranks.size,
            w.shape[1],
            ranks,
            depth or grad.shape[1],
        ).config
        is not None
    )


def multiply_and_scatter(
    grad: torch.Tensor, w: torch.Tensor, group_name: str, depth: int = 0
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of grad @ w, by the fused operator; grad [M, n], w [n,
    K].

    ``depth``: the largest n of any rank, where ranks differ; 0: all have the same.
    """
    return operator("matmul_reduce_scatter").within(grad, w.t(), None, group_name, depth, None)


def exchange_and_multiply(
    grad: torch.Tensor, w: torch.Tensor, how: Exchange, group_name: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(exchanged grad) @ w for w [n, K], and the exchanged grad if ``keep``."""
    group = group_of(group_name)
    ranks = known_topology_of(group_name)
    rows, depth = how.part(grad.shape[0], grad.shape[1], ranks.size)
    chosen = plan_for(plan_all_to_all_matmul, grad, rows, w.shape[1], ranks, depth)
    if chosen.config is None:
        y, exchanged = reference.all_to_all_matmul(
            grad, w.t(), None, group, how.scatter_dim, how.gather_dim
        )
    else:
        y, exchanged = operator("all_to_all_matmul").within(
            grad, w.t(), None, how.scatter_dim, how.gather_dim, group_name, keep
        )
    return y, exchanged if keep else None


def multiply_and_exchange(
    grad: torch.Tensor, w: torch.Tensor, how: Exchange, group_name: str
) -> torch.Tensor:
    """The exchanged grad @ w, for grad [m, n] and w [n, K]."""
    group = group_of(group_name)
    ranks = known_topology_of(group_name)
    rows, cols = how.part(grad.shape[0], w.shape[1], ranks.size)
    if plan_for(plan_matmul_all_to_all, grad, rows, cols, ranks).config is None:
        return reference.matmul_all_to_all(
            grad, w.t(), None, group, how.scatter_dim, how.gather_dim
        )
    return operator("matmul_all_to_all").within(
        grad, w.t(), None, how.scatter_dim, how.gather_dim, group_name
    )
