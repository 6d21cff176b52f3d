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
=========================  ==================================  ================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tileweave.nn.linear import ColumnParallelLinear, RowParallelLinear
from tileweave.nn.replicated import make_replicated
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

    Raises
    ------
    InputError
        The module is no plain ``nn.Linear``, or its output features are not a multiple of the world
        size.
    """

    def __init__(
        self,
        *,
        sequence_dim: int | None = None,
        fp8: str | None = None,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.sequence_dim, self.fp8, self.parts = sequence_dim, fp8, parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.parts is not None and len(self.parts) > 1:
            check_parts("a layer with parts", module, self.parts, device_mesh.size())
            linear: Any = module
            module = SplitLinear(linear, self.parts)
            for part in module.children():
                self._shard(part, device_mesh)
            return module
        return self._shard(module, device_mesh)

    def _shard(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        gather, dim = self.sequence_dim is not None, self.sequence_dim or 0
        options = {"gather": gather, "dim": dim, "save_gathered": False}
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

    def __init__(self, *, sequence_dim: int | None = None, fp8: str | None = None) -> None:
        super().__init__()
        self.sequence_dim, self.fp8 = sequence_dim, fp8

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        options = {"scatter": self.sequence_dim is not None, "dim": self.sequence_dim or 0}
        source = self.src_data_rank
        made = RowParallelLinear.take_over(module, device_mesh, source, **options)
        return made.train_in_fp8(self.fp8)

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
