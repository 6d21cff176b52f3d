"""The kernels of the NVSHMEM rail, compiled with functions of the same names in place of NVSHMEM's:
what is ordered before and after these, and where waits end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.compile.harness import compile_kernel

from tileweave.kernels.rail import CHANNELS, UNITS, put_kernel, take_kernel

# A signal is set (9) and awaited to be at least a value (5), by NVSHMEM's headers; other numbers
# would leave "wrong" in the code.
LIBRARY = """
define i32 @nvshmemx_putmem_signal_block(i64 %target, i64 %source, i64 %nbytes, i64 %signal,
                                         i64 %value, i32 %operation, i32 %pe) {
  %set = icmp eq i32 %operation, 9
  br i1 %set, label %right, label %wrong
right:
  call void asm sideeffect "// put $0 $1 $2 $3 $4 $5", "l,l,l,l,l,r"(i64 %target, i64 %source,
    i64 %nbytes, i64 %signal, i64 %value, i32 %pe)
  ret i32 0
wrong:
  call void asm sideeffect "// wrong", ""()
  ret i32 0
}
define i64 @nvshmem_signal_wait_until(i64 %signal, i32 %comparison, i64 %value) {
  %least = icmp eq i32 %comparison, 5
  br i1 %least, label %right, label %wrong
right:
  call void asm sideeffect "// awaited $0 $1", "l,l"(i64 %signal, i64 %value)
  ret i64 %value
wrong:
  call void asm sideeffect "// wrong", ""()
  ret i64 %value
}
"""


@pytest.fixture
def library(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "library.ll"
    path.write_text(LIBRARY, "ascii")
    return {"libnvshmem_device": str(path)}


@pytest.mark.parametrize(("target", "unit"), [("sm_80", UNITS[-1]), ("sm_90", UNITS[0])])
def test_the_order_of_a_transfer(target: str, unit: int, library: dict[str, str]) -> None:
    how: dict[str, Any] = dict(
        UNIT=unit, BLOCK=2048, target=target, num_warps=8, extern_libs=library
    )
    words = [1 << 40] * 10
    made = compile_kernel(put_kernel, (CHANNELS,), *words, 1, **how)
    ptx = str(made.ptx)
    put = ptx.index("// put")
    stored = [at.start() for at in re.finditer(r"st\.global\.", ptx)]
    fence = ptx.index("fence.acq_rel.sys")
    assert stored and max(stored) < fence < put, "staging is written, fenced, and put"
    assert ptx.count("// put") == 1 and "// wrong" not in ptx and made.spills == 0

    made = compile_kernel(take_kernel, (CHANNELS,), *words, 1, **how)
    ptx = str(made.ptx)
    first, awaited, expired = map(ptx.index, ("ld.volatile.global", "// awaited", "exch.b32"))
    acquired = ptx.index("fence.ac", awaited)
    barrier = ptx.index("bar.sync")
    loads = [at.start() for at in re.finditer(rf"ld\.global\.(v2\.)?b{8 * unit}\b", ptx[barrier:])]
    assert first < ptx.index("globaltimer") < awaited < acquired < barrier and loads
    assert expired < barrier and ptx.count("bar.sync") == 1, "warps that give up meet at no barrier"
    assert "// wrong" not in ptx and made.spills == 0
