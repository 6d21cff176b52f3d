"""Tensor descriptors that the Hopper kernels keep between launches, and which tensors TMA can
read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileweave.kernels.runtime.peers import lines

_KINDS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def fits(*tensors: torch.Tensor) -> bool:
    """Whether TMA can reach these tensors (rows at multiples of 16 bytes); if not, the Triton
    kernel runs."""
    return all(
        t.data_ptr() % 16 == 0 and lines(t.stride())[0] * t.element_size() % 16 == 0
        for t in tensors
    )


def weight(
    address: int,
    dtype: torch.dtype,
    cols: int,
    depth: int,
    strides: Sequence[int],
    tile: list[int],
    parts: int = 1,
) -> TensorDescriptor:
    """A weight [cols, depth], loaded by the ``tile`` of those; both the other way round where its
    lines run along N.

    ``parts`` > 1: of [cols, parts, depth], a dimension more, so that a tile of one part ends where
    the part does: TMA fills what is past its end with zeros.
    """
    stride, depth_first = lines(strides)
    if parts > 1:
        (tile_n, tile_k), of_part = tile, depth * stride if depth_first else depth
        if depth_first:
            shape, pitches, block = [parts, depth, cols], [of_part, stride], [1, tile_k, tile_n]
        else:
            shape, pitches, block = [cols, parts, depth], [stride, of_part], [tile_n, 1, tile_k]
        return _descriptor(address, dtype, shape, pitches, block)
    if depth_first:
        return descriptor(address, dtype, [depth, cols], stride, tile[::-1])
    return descriptor(address, dtype, [cols, depth], stride, tile)


class Pointer:
    """Stands for a tensor in a cached descriptor, so that the cache keeps no memory alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address


def descriptor(
    address: int, dtype: torch.dtype, shape: list[int], stride: int, tile: list[int]
) -> TensorDescriptor:
    """A matrix of ``shape`` at ``address``, rows ``stride`` elements apart, loaded or stored by the
    ``tile``."""
    return _descriptor(address, dtype, shape, [stride], tile)


def _descriptor(
    address: int, dtype: torch.dtype, shape: list[int], strides: list[int], tile: list[int]
) -> TensorDescriptor:
    """Of any number of dimensions; the last one is contiguous and not in ``strides``."""
    layout = gl.NVMMASharedLayout.get_default_for(tile, _KINDS[dtype])
    return TensorDescriptor(Pointer(address, dtype), shape, [*strides, 1], tile, layout)


def based(
    held: Sequence[TensorDescriptor], addresses: Sequence[int]
) -> tuple[TensorDescriptor, ...]:
    """``held``, each at its address."""
    return tuple(
        replace(one, base=Pointer(at, one.base.dtype))
        for one, at in zip(held, addresses, strict=True)
    )
