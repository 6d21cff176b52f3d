"""How tests of CPU worlds call: for the text of a refusal, and on either path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import walk_packages
from typing import Any
from unittest import mock

from tests.support.worlds import Member, World

import tileweave as tw
from tileweave import kernels


def refusal(function: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The name of the error and the error, "" if there is none."""
    try:
        function(*args, **kwargs)
    except tw.TileweaveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def unfused(me: Member) -> Iterator[None]:
    """Collective: calls inside go as on a CPU that interprets no kernels.

    Triton decides when a kernel is made who runs it, and ranks serve many tests: so all kernels are
    made before. What was accepted is kept, its path with it: so nothing accepted is left at either
    end.
    """
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    tw.close()
    with mock.patch.dict(os.environ, TRITON_INTERPRET="0"):
        yield
    me.barrier()
    tw.close()


def call_unfused(me: Member, body: Callable[..., Any], *arguments: object) -> Any:
    with unfused(me):
        return body(me, *arguments)


def run_either(
    world: World, interpreted: bool, body: Callable[..., object], *arguments: object
) -> list:
    """``body`` on every rank, with interpreted kernels or unfused; the values, by rank."""
    return world.run(body, *arguments) if interpreted else world.run(call_unfused, body, *arguments)
