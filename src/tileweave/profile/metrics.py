"""The metrics of an overlapped operator. Times may have any unit, the same for all.

``t_gemm`` is the time of the fastest matmul of the whole problem, whose inputs are local;
``t_unfused`` that of the collective and then that matmul; ``t_corun`` (the co-run bound) that of
the matmul while copies of the same size run concurrently and independently. No overlap can be
faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def e_overlap(t_fused: float, t_gemm: float, t_unfused: float) -> float:
    """The fraction of the communication that is hidden: ``1 - (t_fused - t_gemm) / (t_unfused -
    t_gemm)`` (arXiv 2406.06858).

    1: the fused operator takes no longer than its matmul. 0: it is as fast as the unfused path.
    Below 0: it is slower. NaN if the unfused path is not slower than the matmul, so that there is
    nothing to hide.
    """
    exposed = t_unfused - t_gemm
    if not exposed > 0.0:
        return math.nan
    return 1.0 - (t_fused - t_gemm) / exposed


def limit_ratio(t_corun: float, t_fused: float) -> float:
    """Overlap efficiency: ``t_corun / t_fused``; 1 is at the co-run bound."""
    return t_corun / t_fused if t_fused > 0.0 else math.nan


def speed_up(t_peer: float, t_fused: float) -> float:
    """``t_peer / t_fused``: above 1 the fused operator is faster."""
    return t_peer / t_fused if t_fused > 0.0 else math.nan


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of the positive finite values; NaN if there are none."""
    kept = [value for value in values if math.isfinite(value) and value > 0.0]
    return math.exp(sum(map(math.log, kept)) / len(kept)) if kept else math.nan
