"""``TILEWEAVE_DEBUG=1``: operators compare their calls between ranks before anything is sent.

A rank that refuses its own arguments takes part, with its refusal: so all ranks raise at once, and
nobody waits for a call that does not come.
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
    """Collective, for who debugs: ``check()``, which raises :class:`InputError`, must pass on every
    rank, and signatures be the same; else every rank raises, its own error or
    :class:`RankMismatchError`."""
    try:
        check()
    except InputError as error:
        if not torch.compiler.is_compiling():
            _tell(op, group_name, error)
        raise
    agree(group_of(group_name), {"op": op, **signature})


def check_own(op: str, group_name: str, check: Callable[..., T], *args: object) -> T:
    """``check(*args)``, of this rank's arguments, before the operator itself. Its
    :class:`InputError` is written down, as what breaks off, and told to peers first where somebody
    debugs. Not while torch traces."""
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
    """Around what ranks do together outside of operators: what is raised there is written down as
    in one."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            REGISTRY.break_off(group_name, device, False, sys.exc_info()[1])


def _tell(op: str, group_name: str, error: InputError) -> None:
    """Peers may be waiting to agree."""
    with suppress(RankMismatchError, PeerTimeout):  # the own one says more
        agree(group_of(group_name), {"op": op, "refused": str(error)})
