"""``TILEWEAVE_DEBUG=1``: operators compare their calls between ranks before anything is sent.

A rank that refuses its own arguments takes part, with its refusal: so all ranks raise at once, and nobody waits for a call
that does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from tileweave.errors import InputError, PeerTimeout, RankMismatchError
from tileweave.ops.registry import agree, debugging, group_of


def check_together(op: str, group_name: str, signature: Mapping[str, object], check: Callable[[], None]) -> None:
    """Collective, for who debugs: ``check()``, which raises :class:`InputError`, must pass on every rank, and signatures be the
    same; else every rank raises, its own error or :class:`RankMismatchError`."""
    try:
        check()
    except InputError as error:
        tell_peers(op, group_name, error)
        raise
    agree(group_of(group_name), {"op": op, **signature})


def tell_peers(op: str, group_name: str, error: InputError) -> None:
    """What a rank does with its own error before it raises it: peers may be waiting to agree. Nothing while torch traces."""
    if torch.compiler.is_compiling() or not debugging():
        return
    with suppress(RankMismatchError, PeerTimeout):  # the own one says more
        agree(group_of(group_name), {"op": op, "refused": str(error)})
