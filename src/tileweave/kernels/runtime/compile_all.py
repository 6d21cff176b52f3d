"""Compile the kernels of many calls in parallel, before any of them is launched.

Triton compiles a kernel in its first launch, which takes 0.3 to 8 s. Most of that is spent outside
Python: in passes, which release the interpreter lock, and in ptxas, which is another process. So
threads are enough.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triton import AsyncCompileMode, knobs

from tileweave.kernels.runtime.launch import Planned


def compile_all(launches: list[Planned], rank: int, world_size: int) -> list[Any]:
    """Compile what ``launches`` need, each variant once. Returns the kernel of each; none where
    kernels are interpreted.

    Ranks of one host share Triton's cache on disk. So each begins at another place, and finds there
    what others have compiled.
    """
    if knobs.runtime.interpret or not launches:
        return []
    begin = rank * len(launches) // world_size
    threads = max(1, (os.cpu_count() or 1) // world_size)
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool):
        for planned in launches[begin:] + launches[:begin]:
            planned.compile()
    return [planned.compile() for planned in launches]
