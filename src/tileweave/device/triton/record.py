"""Entries of what programs did, written by the device functions that begin, wait and leave.

They are compiled in where the process was started with ``TILEWEAVE_STAMPS=1``, as ``tileweave
trace`` starts its ranks.

So every kernel with the protocol can be traced, and none of them has a line for it. Without the
variable the compiler sees nothing of this.

The control block has the address of the record (``transport/protocol.py``). An entry is four int64:

====  ==============================================================================================
0     program (32 bits), multiprocessor (16), warp of the program (8), kind (8)
1     signal (32), unit of work (32): of a wait
2     when it began, nanoseconds of the device's clock
3     when it ended
====  ==============================================================================================

There is no barrier: of a wait the first lane of each warp writes an entry, since warps may wait one
by one; when a program begins and leaves, its first thread.
``profile/device.py`` reads them.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from tileweave.transport import protocol

STAMPED = tl.constexpr(
    os.environ.get("TILEWEAVE_STAMPS") == "1" and not triton.knobs.runtime.interpret
)
HERE = tl.constexpr(protocol.HERE)
ANY = tl.constexpr(protocol.ANY)


def _entry(kind: int) -> str:
    """$1: control; $2, $3: signal, unit; $4: begin. The time is taken first: what follows is not
    counted."""
    return f"""{{
    .reg .pred lead, some, fits;
    .reg .b32 lane, number, most, program, warp, place;
    .reg .b64 at, ended, word;
    mov.u64 ended, %globaltimer;
    mov.u32 $0, 0;
    mov.u32 lane, %{"laneid" if kind == protocol.WAITED else "tid.x"};
    setp.eq.u32 lead, lane, 0;
    ld.global.b64 at, [$1+{4 * protocol.RECORD}];
    setp.ne.and.u64 some, at, 0, lead;
    mov.u32 number, 0;
    mov.u32 most, 0;
    @some atom.relaxed.gpu.global.add.u32 number, [at], 1;
    @some ld.global.b32 most, [at+8];
    setp.lt.u32 fits, number, most;
    mad.wide.u32 at, number, {8 * protocol.RECORD_WORDS}, at;
    mov.u32 program, %ctaid.x;
    mov.u32 warp, %tid.x;
    shr.u32 warp, warp, 5;
    shl.b32 warp, warp, 16;
    mov.u32 place, %smid;
    or.b32 place, place, warp;
    or.b32 place, place, {kind << 24};
    mov.b64 word, {{program, place}};
    @fits st.global.b64 [at+{8 * protocol.RECORD_HEAD}], word;
    mov.b64 word, {{$2, $3}};
    @fits st.global.b64 [at+{8 * protocol.RECORD_HEAD + 8}], word;
    @fits st.global.b64 [at+{8 * protocol.RECORD_HEAD + 16}], $4;
    @fits st.global.b64 [at+{8 * protocol.RECORD_HEAD + 24}], ended;
}}"""


ENTER_BEGAN = tl.constexpr(_entry(protocol.BEGAN))
ENTER_LEFT = tl.constexpr(_entry(protocol.LEFT))
ENTER_WAITED = tl.constexpr(_entry(protocol.WAITED))


@triton.jit
def began(control, epoch):
    """This program has read the epoch."""
    if STAMPED and not is_hip():
        _write(control, epoch * 0, epoch * 0, epoch.to(tl.int64), ENTER_BEGAN)


@triton.jit
def left(control, epoch):
    """This program leaves the call."""
    if STAMPED and not is_hip():
        _write(control, epoch * 0, epoch * 0, epoch.to(tl.int64), ENTER_LEFT)


@triton.jit
def waited(control, signal, unit, epoch, started):
    """This program (one of its warps) waited for ``signal`` from ``started`` until now."""
    if STAMPED and not is_hip():
        _write(control, epoch * 0 + signal, epoch * 0 + unit, started, ENTER_WAITED)


@triton.jit
def _write(control, signal, unit, begin, ENTRY: tl.constexpr):
    tl.inline_asm_elementwise(
        ENTRY, "=r,l,r,r,l", [control, signal, unit, begin], dtype=tl.int32, is_pure=False, pack=1
    )
