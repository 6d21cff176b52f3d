"""Linear layers that all ranks apply to the same rows, such as the head of a language model: each
rank computes a part of the output features, and the parts are gathered.

The weight stays whole on every rank: it may be that of the embedding, too, and a loss may read it
without the layer. In the backward the parts of its gradient are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.functional import linear

from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.registry import machine_of, rank_and_size
from tileweave.ops.core.replicated import copy_to_group, gather_features, own_view
from tileweave.parallel.plans import CONTAINERS
from tileweave.planning.machine import H200

# Of two H200 in one host: 16-bit matmuls, reading a weight, copying a result (read and written),
# NCCL over NVLink, and what the host or a small collective takes, in inference and in training.
_FLOPS, _MEMORY, _COPY, _LINK, _LATENCY, _LATENCY_TRAINED = 7.5e14, 4.2e12, 1.9e12, 3e11, 4e-5, 3e-4


class GatheredLinear(nn.Linear):
    """``nn.Linear`` of which each rank computes its own output features, where that is faster."""

    group_name: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        _, size = rank_and_size(self.group_name)
        known = not input.is_cuda or resembles_measured(self.group_name)
        if not (known and pays(input, self.weight, size)):
            return linear(input, self.weight, self.bias)
        weight = own_view(self.weight, self.group_name)
        bias = None if self.bias is None else own_view(self.bias, self.group_name)
        y = linear(copy_to_group(input, self.group_name), weight, bias)
        return gather_features(y, self.group_name)


def resembles_measured(group_name: str) -> bool:
    """Whether the group is one of Hopper GPUs in one host, which map each other's memory: elsewhere
    layers stay whole. A constant for torch.compile."""
    machine = machine_of(torch.device("cuda", torch.cuda.current_device()))
    one_host = known_topology_of(group_name).nodes == 1
    return machine.arch == H200.arch and not machine.unreachable and one_host


resembles_measured._dynamo_marked_constant = True  # type: ignore[attr-defined]


def pays(x: torch.Tensor, w: torch.Tensor, size: int) -> bool:
    """Whether it is predicted to be faster that each of ``size`` ranks multiplies x [..., K] by its
    rows of w [N, K] than that all multiply by the whole w. Without a GPU always, where x has rows
    and ranks can share those of w."""
    features, depth = w.shape
    if x.numel() == 0 or features % size:  # the weight may be another one than at first
        return False
    if x.device.type == "cpu":
        return True
    rows, each = x.numel() // depth, w.element_size()
    result, weight = rows * features * each, features * depth * each
    matmul = 2 * rows * features * depth / _FLOPS
    saved, sent, taken = max(matmul, weight / _MEMORY), result, _LATENCY + 2 * result / _COPY
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        # two matmuls more, and the gradient of the weight is gathered
        saved, sent, taken = saved + 2 * matmul, sent + weight, taken + _LATENCY_TRAINED
    return (1 - 1 / size) * (saved - sent / _LINK) > taken


def gather_outputs(
    model: nn.Module, styled: Iterable[str], by_row: Callable[[str], bool], group_name: str
) -> None:
    """Make linear layers of which all ranks have the same input a :class:`GatheredLinear`, in
    place: those outside of lists of blocks, and of modules with sharded layers.

    Parameters
    ----------
    styled : iterable of str
        Paths of sharded layers: what is near them may have this rank's heads or features.

    by_row : callable
        Whether the module at a path has this rank's rows.
    """
    _, size = rank_and_size(group_name)
    around = {path.rpartition(".")[0] for path in styled}
    inside = [f"{path}." if path else "" for path in around]
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        if isinstance(module, CONTAINERS) and any(p.startswith(dot) for p in around):
            inside.append(dot)
    for path, module in model.named_modules():
        if (
            type(module) is nn.Linear
            and size > 1
            and module.out_features % size == 0
            and not path.startswith(tuple(inside))
            and not by_row(path)
        ):
            module.__class__ = GatheredLinear
            module.group_name = group_name  # type: ignore[assignment]
