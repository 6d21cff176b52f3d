"""Checks launches: calls of one variant are alike in all that Triton specialises for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tileweave.kernels.runtime.launch import Launcher, flat


def launch_checked(launcher: Launcher, given: tuple[Any, ...]) -> None:
    """Launch; calls of one variant must be alike in all that Triton specialises for, since later
    ones run what was compiled for the first. So must calls be that differ only in the alignment of
    one tensor, which are packed and not launched."""
    variant, values, arguments = _packed(launcher, given)
    kinds = launcher.__dict__.setdefault("explored", {})
    new = variant not in kinds
    _one_kind(launcher, kinds, variant, values)
    for other in _moved(given) if new else ():
        _one_kind(launcher, kinds, *_packed(launcher, other)[:2])
    launcher.kernel[(launcher.programs,)](*arguments, **launcher._options)


def _packed(launcher: Launcher, given: tuple[Any, ...]) -> tuple[Any, dict[str, Any], list[Any]]:
    """(variant, what the kernel is given by dotted names, its arguments) of a call. The words that
    a later launch of this variant would change must be those of the arguments that they name."""
    if launcher.programs < 1:
        raise ValueError(f"{launcher.kernel}: a launch of no programs, which ends no call")
    variant, words, changing, _ = launcher._pack(*given)
    named = {**launcher.fixed, **changing()}
    values = flat(named)
    names = launcher._names[0]
    told = [
        value.data_ptr() if isinstance(value := values.get(name), torch.Tensor) else value
        for name in names
    ]
    if told != list(words):
        raise ValueError(f"{launcher.kernel}: the words are not those of {names}")
    return variant, values, [named[name] for name in launcher.kernel.arg_names]


def _one_kind(
    launcher: Launcher, kinds: dict[Any, Any], variant: Any, values: dict[str, Any]
) -> None:
    alike = tuple(_specialised(value) for value in values.values())
    if kinds.setdefault(variant, alike) != alike:
        raise ValueError(f"{launcher.kernel}: variant {variant} is of two kinds")


def _moved(given: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The same call with one tensor each that begins one element later, hence where no 16 bytes
    do, or, if it was there already, where they do."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        apart = int(x.data_ptr() % 16 == 0)
        extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
        whole = torch.empty(max(extent, 1) + 1, dtype=x.dtype)
        return whole.as_strided(x.shape, x.stride(), apart)

    for i, one in enumerate(given):
        if isinstance(one, torch.Tensor):
            yield (*given[:i], moved(one), *given[i + 1 :])
        elif isinstance(one, (tuple, list)):
            for inner in _moved(tuple(one)):
                yield (*given[:i], inner, *given[i + 1 :])


def _specialised(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**31
    return value if isinstance(value, (bool, str, type(None))) else None
