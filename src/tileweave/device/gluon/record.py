"""Entries of what programs did, in Gluon; see ``device/triton/record.py``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.triton.record import ENTER_BEGAN, ENTER_LEFT, ENTER_WAITED, STAMPED


@gluon.jit
def began(control, epoch):
    """This partition has read the epoch."""
    if STAMPED:
        _write(control, epoch * 0, epoch * 0, epoch.to(gl.int64), ENTER_BEGAN)


@gluon.jit
def left(control, epoch):
    """This partition leaves the call."""
    if STAMPED:
        _write(control, epoch * 0, epoch * 0, epoch.to(gl.int64), ENTER_LEFT)


@gluon.jit
def waited(control, signal, unit, epoch, started):
    """This partition (one of its warps) waited for ``signal`` from ``started`` until now."""
    if STAMPED:
        _write(control, epoch * 0 + signal, epoch * 0 + unit, started, ENTER_WAITED)


@gluon.jit
def _write(control, signal, unit, begin, ENTRY: gl.constexpr):
    gl.inline_asm_elementwise(
        ENTRY, "=r,l,r,r,l", [control, signal, unit, begin], dtype=gl.int32, is_pure=False, pack=1
    )
