"""The sequence-parallel form between the blocks of a model: each rank has its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from tileweave.errors import InputError, require
from tileweave.nn.made_classes import forward_by, make_class
from tileweave.nn.shards import in_backward
from tileweave.ops.core.argument_types import OF_OTHER_REASONS
from tileweave.ops.core.registry import group_of
from tileweave.ops.core.replicated import copy_to_group, gather_parts, own_part
from tileweave.parallel.fused import FOREIGN
from tileweave.parallel.hooks import EVERY, guard_hooks, has_hooks, mapped, tensors_of
from tileweave.parallel.shared_input import input_of, with_input

_LOG = logging.getLogger("tileweave")
Blocks = list[tuple[str, nn.Module]]


class OwnRows:
    """The hooks of the blocks of a list. A copy of the model has its own, with the copied modules.

    The rows of the first argument are sharded. Other tensors are those of all rows, or of none: a
    block computes the gradient of its rows only, so ranks sum them.

    Parameters
    ----------
    blocks : list of (path, module)
        The first one takes this rank's rows of its input, the output of the last one is gathered.

    watched : list of (path, module)
        Modules that see own rows, whose hooks must only read.

    ``open``: the first block has begun, and the last one has not ended. ``shape``: of the rows that
    the last called block got.
    """

    def __init__(self, blocks: Blocks, watched: Blocks, group_name: str, dim: int) -> None:
        self.path, first = blocks[0]
        self.first, self.last, self.open = first, blocks[-1][0], False
        self.watched, self.group_name, self.dim = watched, group_name, dim
        self.shape = torch.Size()
        # before other hooks: a block may gather its input again
        for _, block in blocks:
            block.register_forward_pre_hook(self.sum_gradients, with_kwargs=True, prepend=True)
        first.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
        blocks[-1][1].register_forward_hook(self.end)

    def begin(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling():
            for path, module in self.watched:
                if has_hooks(module):
                    guard_hooks(module, path, EVERY, "the rows of one rank")
        self.open = True
        key, x = _rows_of(args, kwargs)
        return with_input(key, self._own(x), args, kwargs)

    def sum_gradients(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _, x = _rows_of(args, kwargs)
        self.shape = x.shape
        if not torch.is_grad_enabled():
            return args, kwargs
        group = self.group_name

        def has_all(t: torch.Tensor) -> bool:
            if t is x or not t.requires_grad:
                return False
            own = t.dim() == x.dim() and t.shape[self.dim] == x.shape[self.dim]
            if own and block is self.first:  # what comes from elsewhere has all rows
                raise InputError(
                    f"asked: {self.path} with another tensor {tuple(t.shape)}, which needs a "
                    f"gradient and has as many rows as a rank has of x, {tuple(x.shape)}; allowed: "
                    "one tensor whose rows are sharded; remedy: pass sequence_parallel=False to "
                    "tileweave.parallelize"
                )
            return not own

        def summed(argument: Any) -> Any:
            if not any(map(has_all, tensors_of(argument))):
                return argument  # itself: blocks may write into a dict
            return mapped(argument, lambda t: copy_to_group(t, group) if has_all(t) else t)

        return tuple(map(summed, args)), {name: summed(each) for name, each in kwargs.items()}

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size(group_of(self.group_name))
        if x.shape[self.dim] % size:
            raise InputError(
                f"asked: {self.path} of x {tuple(x.shape)}, whose rows (dimension {self.dim}) are "
                f"sharded over {size} ranks; allowed: a multiple of {size}; remedy: pad the "
                "sequence; for calls with few rows, as those of generate, pass "
                "sequence_parallel=False to tileweave.parallelize"
            )
        return own_part(x, self.dim, self.group_name)

    def end(self, _: nn.Module, args: tuple[Any, ...], y: Any) -> Any:
        self.open = False
        first, shape = y if isinstance(y, torch.Tensor) else y[0], self.shape
        if first.dim() != len(shape) or first.shape[self.dim] != shape[self.dim]:
            raise InputError(
                f"asked: {self.last} with sequence_parallel=True, which returns "
                f"{tuple(first.shape)} for {tuple(shape)}, the rows of one rank; allowed: as "
                "many rows; remedy: pass sequence_parallel=False to tileweave.parallelize"
            )
        whole = gather_parts(first, self.dim, self.group_name)
        return whole if isinstance(y, torch.Tensor) else (whole, *y[1:])

    def refuse(self, path: str, missing: str) -> NoReturn:
        """Raise :class:`InputError`: ``path`` runs without the block ``missing``."""
        raise InputError(
            f"asked: {path} without {missing}, which ran with sequence_parallel=True when the "
            f"model was sharded; allowed: forwards that run {self.path}, where each rank takes its "
            f"rows, and {self.last}, where they are gathered; remedy: remove or skip blocks "
            "between them only, remove blocks before tileweave.parallelize, or pass "
            "sequence_parallel=False"
        )


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, torch.Tensor]:
    """The argument of a block that has rows, and where it is."""
    if args:
        return 0, args[0]
    key = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return key, kwargs[key]


class OwnRowsBlock(nn.Module):
    """A block whose hidden states are this rank's rows: errors of its forward get its path."""

    _rows_path: str
    _rows: list[OwnRows]  # of each list that has it


@cache
def _class_of(cls: Any) -> type:
    return make_class(cls, OwnRowsBlock, {"forward": forward_by(cls, _call)}, _class_of)


def _call(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not any(rows.open for rows in module._rows) and not in_backward():
        module._rows[0].refuse(module._rows_path, module._rows[0].path)
    try:
        return forward(module, *args, **kwargs)
    except FOREIGN as error:
        if isinstance(error, OF_OTHER_REASONS):
            raise
        raise InputError(
            f"asked: {module._rows_path} with sequence_parallel=True, whose forward raised "
            f"{type(error).__name__}: {error}; allowed: a forward that takes the rows of one "
            "rank, and no other tensor with all rows; remedy: pass sequence_parallel=False to "
            "tileweave.parallelize"
        ) from error


class AllRows:
    """The hooks of a module that takes the rows of all ranks, and of whose output each rank takes
    its own. A copy of the module has its own hooks."""

    def __init__(self, path: str, why: str, module: nn.Module, group_name: str, dim: int) -> None:
        self.path, self.group_name, self.dim = path, group_name, dim
        module.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
        module.register_forward_hook(self.end, with_kwargs=True)
        _LOG.warning("%s takes all rows on every rank with sequence_parallel=True: %s", path, why)

    def begin(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key, x = input_of(self.path, args, kwargs)
        for name, other in (*enumerate(args), *kwargs.items()):
            require(
                other is x or not isinstance(other, torch.Tensor) or other.shape != x.shape,
                f"{self.path} with argument {name!r}, of the shape of its input, with "
                "sequence_parallel=True",
                "one tensor with the rows of one rank, which are gathered for it",
                "pass sequence_parallel=False to tileweave.parallelize",
            )
            trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(other))
            require(
                other is x or not trains,
                f"{self.path} with argument {name!r}, which needs a gradient, with "
                "sequence_parallel=True",
                "such tensors in modules of the plan: ranks would sum gradients that each has "
                "whole",
                "pass sequence_parallel=False to tileweave.parallelize",
            )
        return with_input(key, gather_parts(x, self.dim, self.group_name), args, kwargs)

    def end(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
        x = input_of(self.path, args, kwargs)[1]
        first, *others = (y,) if isinstance(y, torch.Tensor) else y
        more = [t for t in others if isinstance(t, torch.Tensor) and t.dim() == x.dim()]
        require(
            isinstance(first, torch.Tensor)
            and first.shape == x.shape
            and all(t.shape[self.dim] != x.shape[self.dim] for t in more),
            f"{self.path} with sequence_parallel=True, which returns something else than one "
            "tensor of the shape of its input",
            "such a tensor, of which each rank takes its rows",
            "pass sequence_parallel=False to tileweave.parallelize",
        )
        own = own_part(first, self.dim, self.group_name)
        return own if isinstance(y, torch.Tensor) else (own, *others)


def shard_rows(
    model: nn.Module, outer: list[Blocks], inner: set[str], group_name: str, dim: int, check: bool
) -> list[nn.Module]:
    """Shard rows where the blocks of a list begin, and gather them where it ends. Return the
    modules whose activations have this rank's rows.

    Parameters
    ----------
    outer : list of lists of (path, module)
        The blocks of each list. Empty: the model takes and returns this rank's rows.

    inner : set of str
        Paths of the modules around sharded layers: modules in them see other parts.

    check : bool
        Hooks that users register must not change rows of one rank.
    """
    inside = tuple(f"{path}." if path else "" for path in inner)
    for blocks in outer:
        watched = [
            (name, part)
            for path, block in blocks
            for name, part in block.named_modules(prefix=path)
            if check and not name.startswith(inside) and any(True for _ in part.parameters())
        ]
        rows = OwnRows(blocks, watched, group_name, dim)
        for path, block in blocks:
            if not isinstance(block, OwnRowsBlock):
                block.__class__ = _class_of(type(block))
                block._rows_path, block._rows = path, []  # type: ignore[assignment]
            block._rows.append(rows)  # type: ignore[union-attr]
    for part in model.modules():
        if hasattr(type(part), "_can_record_outputs"):  # a model of transformers
            part.register_forward_pre_hook(_refuse_states, with_kwargs=True)
    return [block for blocks in outer for _, block in blocks] or [model]


def _refuse_states(module: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """transformers records the output of each block and each router, which is of this rank's
    rows."""
    for name in ("output_hidden_states", "output_router_logits"):
        asked = kwargs.get(name)
        if asked is None:
            asked = getattr(module.config, name, False)
        require(
            not asked,
            f"{name} of {type(module).__name__} with sequence_parallel=True",
            "its logits or last hidden state: others have the rows of one rank",
            "pass sequence_parallel=False to tileweave.parallelize",
        )
