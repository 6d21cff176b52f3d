"""Calls in CPU worlds: the text of a refusal, and calls on the fused or the unfused path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pkgutil import walk_packages
from typing import Any
from unittest import mock

from tests.support.worlds import Member, World

import tileweave as tw
from tileweave import kernels

# Errors are promised within the time-out and 2 s; more ranks than processors take turns.
SLACK = 2.0 if (os.cpu_count() or 1) >= 8 else 4.0


def refusal(function: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The name and the text of the error that a call raises, or ""."""
    try:
        function(*args, **kwargs)
    except tw.TileweaveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def unfused(me: Member) -> Iterator[None]:
    """Collective: calls inside run as on a CPU that does not interpret kernels.

    Triton decides at decoration time whether a kernel is interpreted, and ranks serve many tests.
    So all kernels are imported first. Accepted calls are cached together with their path, so these
    caches are cleared at both ends.
    """
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    tw.close()
    with mock.patch.dict(os.environ, TRITON_INTERPRET="0"):
        yield
    me.barrier()
    tw.close()


def on_path(me: Member, interpreted: bool) -> AbstractContextManager[None]:
    """Calls inside are with interpreted kernels, or :func:`unfused`."""
    return nullcontext() if interpreted else unfused(me)


def call_unfused(me: Member, body: Callable[..., Any], *arguments: object) -> Any:
    with unfused(me):
        return body(me, *arguments)


def run_either(
    world: World, interpreted: bool, body: Callable[..., object], *arguments: object
) -> list:
    """Run ``body`` on every rank, with interpreted kernels or unfused. Return the values by
    rank."""
    return world.run(body, *arguments) if interpreted else world.run(call_unfused, body, *arguments)
