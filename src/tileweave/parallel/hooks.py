"""Hooks that users register on parts of a sharded model after ``tileweave.parallelize``.

Where a module has the features or the rows of one rank, a hook sees those only. It may read them,
which is said once. A hook that changes them is an error: a mean over features, for instance, would
be that of one rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tileweave.errors import InputError

_LOG = logging.getLogger("tileweave")
FORWARD = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
EVERY = (*FORWARD, *BACKWARD)
# Of FSDP, checkpointing and the like, and transformers' hooks that record results.
KNOWN = ("torch.", "tileweave.", "transformers.utils.output_capturing")


def has_hooks(module: Any) -> bool:
    """Whether ``module`` has hooks of any kind."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def guard_hooks(module: nn.Module, path: str, kinds: tuple[str, ...], part: str) -> None:
    """Let hooks of ``module`` only read from now on.

    Parameters
    ----------
    kinds : tuple of str
        The dictionaries of hooks that see a part of a tensor.

    part : str
        What they see, such as "the features of one rank".
    """
    for kind in kinds:
        hooks = getattr(module, kind)
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _Reads) and not _origin(hook).startswith(KNOWN):
                hooks[key] = _Reads(hook, path, part)
                _LOG.warning("%s has hooks: they see %s", path, part)


def _origin(hook: Any) -> str:
    """The module in which the function of ``hook`` is defined."""
    while hasattr(hook, "func"):  # of functools.partial
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__


class _Reads:
    """A hook that sees a part of a tensor, and must not change it."""

    def __init__(self, hook: Any, path: str, part: str) -> None:
        self.hook, self.path, self.part = hook, path, part

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        # a tensor made in inference mode has no version
        before = [(t, 0 if t.is_inference() else t._version) for t in tensors_of(given)]
        made = self.hook(module, *given)
        same = all(any(t is one for one, _ in before) for t in tensors_of(made))
        if same and all(t.is_inference() or t._version == v for t, v in before):
            return made
        raise InputError(
            f"asked: a hook of {self.path} that changes what it sees, {self.part}; allowed: hooks "
            "that read; remedy: register it on a module whose input and output every rank has "
            "whole, as that around the sharded layers in the all-reduce form, or change the "
            "forward before tileweave.parallelize; check=False if it changes each element for "
            "itself"
        )


def leaves_of(given: Any) -> Iterator[Any]:
    """What tuples, lists and dicts in each other have in them."""
    if isinstance(given, (tuple, list, dict)):
        for item in given.values() if isinstance(given, dict) else given:
            yield from leaves_of(item)
    else:
        yield given


def tensors_of(given: Any) -> list[torch.Tensor]:
    """The tensors among :func:`leaves_of`."""
    return [leaf for leaf in leaves_of(given) if isinstance(leaf, torch.Tensor)]


def mapped(given: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``given``, tuples, lists and dicts in each other, with ``function`` of each tensor."""
    if type(given) in (tuple, list):
        return type(given)(mapped(item, function) for item in given)
    if isinstance(given, tuple):  # a named one
        return type(given)(*(mapped(item, function) for item in given))
    if isinstance(given, dict):
        return {key: mapped(item, function) for key, item in given.items()}
    return function(given) if isinstance(given, torch.Tensor) else given
