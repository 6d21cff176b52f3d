"""``TILEWEAVE_DEBUG=1``: ranks compare their calls before any data is sent.

A rank that refuses its own arguments takes part in the comparison and reports the refusal. So all
ranks raise at once, and no rank waits for a call that does not come.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

from tileweave.errors import InputError, PeerTimeout, RankMismatchError
from tileweave.ops.core.registry import agree, debugging, group_of
from tileweave.transport.workspace import REGISTRY

T = TypeVar("T")


def check_together(
    op: str, group_name: str, signature: Mapping[str, object], check: Callable[[], None]
) -> None:
    """Collective, for debugging: raise on every rank if one rank's check fails or signatures
    differ.

    A rank whose ``check()`` raises :class:`InputError` raises that error, other ranks
    :class:`RankMismatchError`.
    """
    try:
        check()
    except InputError as error:
        if not torch.compiler.is_compiling():
            _tell(op, group_name, error)
        raise
    agree(group_of(group_name), {"op": op, **signature})


def check_own(op: str, group_name: str, check: Callable[..., T], *args: object) -> T:
    """Return ``check(*args)``, which checks this rank's arguments before the torch operator is
    called.

    If it raises :class:`InputError`, the error is recorded as the reason for which this rank left
    the call; with ``TILEWEAVE_DEBUG=1`` peers are told first. Nothing is recorded while torch
    traces.
    """
    try:
        return check(*args)
    except InputError as error:
        if not torch.compiler.is_compiling():
            if debugging():
                _tell(op, group_name, error)
            devices = [a.device for a in args if isinstance(a, torch.Tensor)]
            REGISTRY.break_off(
                group_name, devices[0] if devices else torch.device("cpu"), False, error
            )
        raise


@contextmanager
def breaking_off(group_name: str, device: torch.device) -> Iterator[None]:
    """Context of work that ranks do together outside of operators: an exception is recorded as in
    an operator."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            REGISTRY.break_off(group_name, device, False, sys.exc_info()[1])


def _tell(op: str, group_name: str, error: InputError) -> None:
    """Report the refusal: peers may be waiting in the comparison."""
    with suppress(RankMismatchError, PeerTimeout):  # the error of this rank says more
        agree(group_of(group_name), {"op": op, "refused": str(error)})
