"""Styles of tensor parallelism, for ``torch.distributed.tensor.parallel.parallelize_module`` and
:func:`tileweave.parallelize`.

Parameters become DTensors, as with the styles of torch; activations are plain tensors.

=========================  ==================================  ================================
style                      all-reduce form                     sequence-parallel form
=========================  ==================================  ================================
:class:`Colwise`           x on all ranks; its gradient is     gathers rows of x, fused with the
                           summed in backward                  matmul
:class:`Rowwise`           sum over ranks, fused with the      scatters rows of the sum, fused
                           matmul                              with the matmul
:class:`SequenceParallel`  for modules that see own heads      for modules that see own rows or
                                                               own heads
:class:`Experts`           stacked experts, each rank some     each rank sends its own tokens
                           of them; a slice of the tokens
                           is sent by each
=========================  ==================================  ================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tileweave.errors import require
from tileweave.nn.linear import ColumnParallelLinear, RowParallelLinear, check_recipe
from tileweave.nn.replicated import make_replicated
from tileweave.ops.core.argument_types import checks_types_first
from tileweave.ops.core.registry import name_of
from tileweave.ops.core.replicated import copy_to_group
from tileweave.parallel.experts import check_experts, shard_experts
from tileweave.parallel.fused import SplitLinear, check_parts


class Colwise(ParallelStyle):
    """Shard the output features of an ``nn.Linear``, which becomes a
    :class:`tileweave.nn.ColumnParallelLinear`.

    Parameters
    ----------
    sequence_dim : int, optional
        The dimension of x whose rows are sharded over ranks: they are gathered. None: x is the same
        on every rank.

    fp8 : str, optional
        The recipe of FP8 training, as of the layer.

    parts : mapping of str to int, optional
        For a layer that computes several projections, such as q, k and v: the output features of
        each by name, in their order. The layer becomes one with a linear layer for each, and the
        output has this rank's share of each. The module that calls it must take the numbers of
        heads and features from shapes. One part: an equal split of the output is right, as where
        the q, k and v of a head are next to each other.

    copies : int or mapping of str to int
        How many consecutive ranks compute the same output features, as where there are fewer heads
        of keys and values than ranks: world size / heads. Weight and bias are then whole on every
        rank, and their gradients are summed. With ``parts``: those of each part by name; others
        have 1.

    Raises
    ------
    InputError
        The module is no plain ``nn.Linear``, or its output features are not a multiple of the world
        size.
    """

    @checks_types_first
    def __init__(
        self,
        *,
        sequence_dim: int | None = None,
        fp8: str | None = None,
        parts: Mapping[str, int] | None = None,
        copies: int | Mapping[str, int] = 1,
    ) -> None:
        super().__init__()
        check_recipe(fp8)
        self.sequence_dim, self.fp8, self.parts, self.copies = sequence_dim, fp8, parts, copies
        self._check_copies()

    def _check_copies(self) -> None:
        by_part = self.copies if isinstance(self.copies, Mapping) else {}
        require(
            by_part.keys() <= {*(self.parts or ())},
            f"copies of {', '.join(by_part)}",
            f"the parts: {', '.join(self.parts or ()) or 'none'}",
            "name parts, or pass a number",
        )
        require(
            all(number >= 1 for number in (self.copies_of(""), *by_part.values())),
            f"copies={self.copies!r}",
            "1 or more ranks for the same features",
            "pass world size / heads",
        )

    def copies_of(self, part: str) -> int:
        """How many ranks compute the same features of a part, or of the layer: ``""``."""
        return self.copies.get(part, 1) if isinstance(self.copies, Mapping) else self.copies

    def all_copies(self) -> dict[str, int]:
        """:meth:`copies_of` each part."""
        return {name: self.copies_of(name) for name in self.parts or ()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.parts is not None and len(self.parts) > 1:
            copies = self.all_copies()
            check_parts("a layer with parts", module, self.parts, device_mesh.size(), copies)
            linear: Any = module
            module = SplitLinear(linear, self.parts)
            for name, part in module.named_children():
                self._shard(part, device_mesh, copies[name])
            return module
        return self._shard(module, device_mesh, self.copies_of(""))

    def _shard(self, module: nn.Module, device_mesh: DeviceMesh, copies: int) -> nn.Module:
        gather, dim = self.sequence_dim is not None, self.sequence_dim or 0
        options = {"gather": gather, "dim": dim, "save_gathered": False, "copies": copies}
        source = self.src_data_rank
        made = ColumnParallelLinear.take_over(module, device_mesh, source, **options)
        return made.train_in_fp8(self.fp8)

    def __repr__(self) -> str:
        parts = "" if self.parts is None else f", parts={dict(self.parts)}"
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim}{parts})"


class Rowwise(ParallelStyle):
    """Shard the input features of an ``nn.Linear``, which becomes a
    :class:`tileweave.nn.RowParallelLinear`.

    Parameters
    ----------
    sequence_dim : int, optional
        The dimension of y whose rows are scattered over ranks. None: y is the same on every rank.

    fp8 : str, optional
        The recipe of FP8 training, as of the layer.

    Raises
    ------
    InputError
        The module is no plain ``nn.Linear``, or its input features are not a multiple of the world
        size.
    """

    @checks_types_first
    def __init__(self, *, sequence_dim: int | None = None, fp8: str | None = None) -> None:
        super().__init__()
        check_recipe(fp8)
        self.sequence_dim, self.fp8 = sequence_dim, fp8

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        options = {"scatter": self.sequence_dim is not None, "dim": self.sequence_dim or 0}
        source = self.src_data_rank
        made = RowParallelLinear.take_over(module, device_mesh, source, **options)
        return made.train_in_fp8(self.fp8)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


class Experts(ParallelStyle):
    """Shard stacked experts of transformers by expert: each rank has E / R of them. Tokens are
    sent to them, and the results back, fused with the matmuls.

    Parameters
    ----------
    sequence_dim : int, optional
        Each rank has its own tokens, as many as the others. None: all have the same tokens, of
        which each sends a slice.

    Raises
    ------
    InputError
        The module is not one that transformers' ``use_experts_implementation`` describes, or the
        ranks cannot share its experts.
    """

    @checks_types_first
    def __init__(self, *, sequence_dim: int | None = None) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_experts(type(module).__name__, module, device_mesh.size())
        shard_experts(module, device_mesh, self.sequence_dim is not None, self.src_data_rank)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


class SequenceParallel(ParallelStyle):
    """Apply a module, such as a norm, to this rank's rows or heads. Its parameters are replicated,
    and their gradients summed over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        source = self.src_data_rank
        make_replicated(module, device_mesh, sums=True, source=source)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class LatentKeys(ParallelStyle):
    """The small projection before the keys and values of an attention, whole on every rank, in the
    all-reduce form. Its last ``rotary`` features go to the heads of this rank directly, so their
    gradient is summed over ranks."""

    def __init__(self, rotary: int) -> None:
        super().__init__()
        self.rotary = rotary

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        make_replicated(module, device_mesh, sums=False, source=self.src_data_rank)
        module.register_forward_hook(_SumsLast(self.rotary, name_of(device_mesh)))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rotary})"


class _SumsLast:
    """A hook that sums gradients of the last features over ranks."""

    def __init__(self, features: int, group_name: str) -> None:
        self.features, self.group_name = features, group_name

    def __call__(self, _: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
        return self._with_last(y, lambda last: copy_to_group(last, self.group_name))

    def in_trial(self, _: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
        """The same, where a trial looks for gradients that nothing sums."""
        return self._with_last(y, torch.Tensor.detach)

    def _with_last(
        self, y: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        first, last = y.split([y.shape[-1] - self.features, self.features], -1)
        return torch.cat([first, function(last)], -1)
