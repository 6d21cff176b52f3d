"""The two layers of ``tensor_parallel_block.py`` as collectives of NCCL and matmuls of cuBLAS: in
16 bits, or by a recipe of FP8 training."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tileweave.nn import ColumnParallelLinear, RowParallelLinear
from tileweave.ops.core import collectives, registry
from tileweave.ops.matmul.scaled import FP8, Scaled
from tileweave.ops.matmul.scaled_training import Recipe, by_rows, multiply


@dataclass(frozen=True)
class Sent:
    """Collectives of the group."""

    group: dist.ProcessGroup

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_gather(x, self.group)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.reduce_scatter(x, self.group)

    def begin_all_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        return collectives.begin_all_gather(x, self.group)

    def begin_reduce_scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        return collectives.begin_reduce_scatter(x, self.group)


@dataclass(frozen=True)
class Unsent(Sent):
    """Nothing is sent, so results are wrong: what is left is the time of everything else."""

    kept: dict[Any, torch.Tensor] = field(default_factory=dict)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        key = tuple(x.shape), x.dtype
        if key not in self.kept:
            self.kept[key] = torch.cat([x.detach()] * dist.get_world_size(self.group))
        return self.kept[key]

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x[: x.shape[0] // dist.get_world_size(self.group)]

    def begin_all_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.all_gather(x), None

    def begin_reduce_scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.reduce_scatter(x), None


class How(NamedTuple):
    """How a rival computes.

    overlap : each matmul of backward of a column-parallel layer runs concurrently with a
        collective, as in Megatron-LM.
    recipe : of FP8 training; None: 16 bits.
    sends_fp8 : x is quantised before it is gathered in forward, not afterwards.
    """

    sent: Sent
    overlap: bool = False
    recipe: Recipe | None = None
    sends_fp8: bool = False

    def gather_and_multiply(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """gather(x) @ w.T."""
        if self.recipe is None or not self.sends_fp8:
            return self.multiply(self.sent.all_gather(x), w)
        own = by_rows(x)
        data = self.sent.all_gather(own.data.view(torch.uint8)).view(FP8)
        whole = Scaled(data, self.sent.all_gather(own.scale), own.kind)
        return multiply(whole, by_rows(w), x.dtype, self.recipe.fast_accum)

    def multiply(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x @ w.T."""
        if self.recipe is None:
            return x @ w.t()
        return multiply(by_rows(x), by_rows(w), x.dtype, self.recipe.fast_accum)

    def input_gradient(self, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return grad @ w if self.recipe is None else self.recipe.input_gradient(grad, w)

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad.t() @ x if self.recipe is None else self.recipe.weight_gradient(grad, x)


class _GatherMatmul(torch.autograd.Function):
    """All-gather, then matmul."""

    @staticmethod
    def forward(ctx, x, w, how):
        ctx.save_for_backward(x, w)
        ctx.how = how
        return how.gather_and_multiply(x, w)

    @staticmethod
    def backward(ctx, grad):
        (x, w), how, sent = ctx.saved_tensors, ctx.how, ctx.how.sent
        if not how.overlap:
            gx = sent.reduce_scatter(how.input_gradient(grad, w))
            return gx, how.weight_gradient(grad, sent.all_gather(x)), None
        gathered, gathering = sent.begin_all_gather(x)
        gx = how.input_gradient(grad, w)
        wait(gathering)
        gx, scattering = sent.begin_reduce_scatter(gx)
        gw = how.weight_gradient(grad, gathered)
        wait(scattering)
        return gx, gw, None


class _MatmulScatter(torch.autograd.Function):
    """Matmul, then reduce-scatter. Backward gathers the gradient first, because both of its matmuls
    need it."""

    @staticmethod
    def forward(ctx, x, w, how):
        ctx.save_for_backward(x, w)
        ctx.how = how
        return how.sent.reduce_scatter(how.multiply(x, w))

    @staticmethod
    def backward(ctx, grad):
        (x, w), how = ctx.saved_tensors, ctx.how
        gathered = how.sent.all_gather(grad.contiguous())
        return how.input_gradient(gathered, w), how.weight_gradient(gathered, x), None


def wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def gather_matmul(x: torch.Tensor, w: torch.Tensor, how: How) -> torch.Tensor:
    """gather(x) @ w.T of x [m, K], w [n, K]."""
    return _GatherMatmul.apply(x, w, how)


def matmul_scatter(x: torch.Tensor, w: torch.Tensor, how: How) -> torch.Tensor:
    """This rank's rows of the sum over ranks of x @ w.T."""
    return _MatmulScatter.apply(x, w, how)


class UnfusedColumn(ColumnParallelLinear):
    """The layer as an all-gather and a matmul."""

    overlap = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        how = How(Sent(group_of(self)), self.overlap)
        y = gather_matmul(x.flatten(0, -2), self.weight.to_local(), how)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])


class OverlappedColumn(UnfusedColumn):
    """The unfused layer, with collectives and matmuls of backward running concurrently."""

    overlap = True


class UnfusedRow(RowParallelLinear):
    """The layer as a matmul and a reduce-scatter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = matmul_scatter(x.flatten(0, -2), self.weight.to_local(), How(Sent(group_of(self))))
        return y.view(-1, *x.shape[1:-1], y.shape[-1])


def group_of(layer: ColumnParallelLinear | RowParallelLinear) -> dist.ProcessGroup:
    return registry.group_of(layer.group_name)
