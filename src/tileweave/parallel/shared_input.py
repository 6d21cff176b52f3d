"""One gather, or one sum of gradients, for the linear layers that take the input of a module: q, k
and v of an attention, gate and up of an MLP.

With a gather the module gets the gathered input, so that it may take shapes from it. Its linear
layers take what was computed with the gather: one operator call for all of them, and no copy of
weights. Without one the module gets its input as it is: it may use it for something else, whose
gradient is whole. Its linear layers take one copy, whose gradient is summed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tileweave.errors import InputError, require
from tileweave.nn.linear import ColumnParallelLinear, under_autocast
from tileweave.nn.shards import in_backward
from tileweave.ops.core.replicated import copy_to_group
from tileweave.ops.matmul.all_gather_matmul import all_gather_matmul
from tileweave.ops.matmul.scaled_training import linear as in_fp8
from tileweave.parallel.plans import Block

INPUTS = ("hidden_states", "x", "input", "inputs", "query")


class SharedColumn(ColumnParallelLinear):
    """A column-parallel layer whose module has the input for it.

    ``given``: the input of the module, and in its place the output of this layer (with a gather) or
    what to multiply.
    """

    given: tuple[torch.Tensor, torch.Tensor] | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.given is None:
            if self.gather and in_backward():
                self._refuse_recomputation()
            return super().forward(input)
        x, instead = self.given
        if input is x:
            if self.gather:
                return instead
            x, w, bias = under_autocast(instead, *self.parts())
            if self.fp8 is not None:
                return in_fp8(x, w, bias, self.fp8)
            return nn.functional.linear(x, w, bias)
        if self.gather:
            raise InputError(
                f"asked: {self.path} of another tensor than the input of its module; allowed: the "
                "same tensor; remedy: for a cross attention, sequence_parallel=False; remove hooks "
                "of this layer that make another one (forward pre-hooks, full backward hooks); or, "
                "if the other one has this rank's rows, too, pass a plan that gives this layer a "
                "style of its own, tw.parallel.Colwise(sequence_dim=...)"
            )
        return super().forward(input)

    def _refuse_recomputation(self) -> None:
        """In a backward the module has no input for this layer: it is only recomputed in part."""
        path = self.path.rpartition(".")[0]
        raise InputError(
            f"asked: {self.path} in backward without its module, as a checkpoint inside the "
            f"forward of {path} recomputes it; allowed: a checkpoint around {path} or the block "
            "that has it, since its layers share one gather; remedy: move "
            "torch.utils.checkpoint.checkpoint there, or pass sequence_parallel=False"
        )

    def train_in_fp8(self, recipe: str | None) -> Any:
        require(
            recipe is None or not self.gather,
            f"fp8={recipe!r} for {self.path}, which shares the gather of its module's input",
            "layers with a gather of their own",
            "pass a plan with tw.parallel.Colwise(sequence_dim=..., fp8=...) for this layer",
        )
        return super().train_in_fp8(recipe)


class _SharedInput:
    """The hooks of a module whose column-parallel layers share its input. A copy of the module has
    its own, with the copied layers."""

    def __init__(self, path: str, layers: list[SharedColumn]) -> None:
        self.path, self.layers = path, layers

    def before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key, x = input_of(self.path, args, kwargs)
        layers, first = self.layers, self.layers[0]
        if first.gather:
            first.require_rows(x)
            cast = under_autocast(x, *(part for layer in layers for part in layer.parts()))
            instead, x = all_gather_matmul(
                cast[0],
                list(cast[1::2]),
                list(cast[2::2]),
                group=first.group_name,
                return_gathered=True,
                gather_dim=first.dim,
            )
        else:
            instead = [copy_to_group(x, first.group_name)] * len(layers)
        if module._input_parts > 1:
            x = first_part(x, module._input_parts)
        for layer, y in zip(layers, instead, strict=True):
            layer.given = (x, y)
        return with_input(key, x, args, kwargs)

    def after(self, *_: Any) -> None:
        for layer in self.layers:
            layer.given = None


def share_input(model: nn.Module, block: Block) -> None:
    """Let the column-parallel layers of ``block`` share the input of the module that has them."""
    path = block.taking
    module: Any = model.get_submodule(path)
    start = len(block.within) + 1 if block.within else 0
    names = [name[start:] for name in block.columns]
    layers: list[SharedColumn] = []
    for name in names:
        layer: Any = module.get_submodule(name)
        layer.__class__ = SharedColumn
        layer.given = None
        layer.train_in_fp8(layer.fp8)
        layers.append(layer)
    module._input_parts = 1  # a trial may change it: the module sees one part of the features
    shared = _SharedInput(path, layers)
    module.register_forward_pre_hook(shared.before, with_kwargs=True)
    module.register_forward_hook(shared.after, always_call=True)


def first_part(x: torch.Tensor, parts: int) -> torch.Tensor:
    """The first of so many equal parts of the features of x."""
    return x.narrow(-1, 0, x.shape[-1] // parts)


def input_of(
    path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int | str, torch.Tensor]:
    """The input of a module and where it is: the first argument (0), or the one of a usual
    name."""
    if args and isinstance(args[0], torch.Tensor):
        return 0, args[0]
    named = [name for name in INPUTS if isinstance(kwargs.get(name), torch.Tensor)]
    require(
        bool(named),
        f"a call of {path} with arguments {', '.join(kwargs)}",
        f"a tensor as first argument, or one named {', '.join(INPUTS)}",
        "pass the input first",
    )
    return named[0], kwargs[named[0]]


def with_input(
    key: int | str, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``x`` in place of the input, which is in the place ``key`` that
    :func:`input_of` returned; also where other arguments are that input, such as key and value."""
    before = args[key] if isinstance(key, int) else kwargs[key]
    return (
        tuple(x if each is before else each for each in args),
        {name: x if each is before else each for name, each in kwargs.items()},
    )
