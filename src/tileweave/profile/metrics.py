"""The figures by which an overlapped operator is judged; plain arithmetic, any unit of time as long
as it is one.

``t_gemm`` is the fastest matmul that is not split, on inputs already there; ``t_unfused`` the
collective and then that matmul; ``t_corun`` the matmul while copies of the same size run beside it
with no dependence: what no overlap can beat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def e_overlap(t_fused: float, t_gemm: float, t_unfused: float) -> float:
    """Share of the communication that is hidden: ``1 - (t_fused - t_gemm) / (t_unfused - t_gemm)``
    (arXiv 2406.06858).

    1: the fused operator takes no longer than its matmul. 0: nothing was gained. Below 0: it lost.
    NaN where the unfused path is not slower than the matmul, hence nothing was there to hide.
    """
    exposed = t_unfused - t_gemm
    if not exposed > 0.0:
        return math.nan
    return 1.0 - (t_fused - t_gemm) / exposed


def limit_ratio(t_corun: float, t_fused: float) -> float:
    """How near to the physical limit: ``t_corun / t_fused``; 1 is on the bound."""
    return t_corun / t_fused if t_fused > 0.0 else math.nan


def speed_up(t_peer: float, t_fused: float) -> float:
    """``t_peer / t_fused``: above 1 the fused operator is the faster one."""
    return t_peer / t_fused if t_fused > 0.0 else math.nan


def geometric_mean(values: Iterable[float]) -> float:
    """Of the positive finite values; NaN if there are none."""
    kept = [value for value in values if math.isfinite(value) and value > 0.0]
    return math.exp(sum(map(math.log, kept)) / len(kept)) if kept else math.nan
