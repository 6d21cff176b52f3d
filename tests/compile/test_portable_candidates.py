"""The Triton kernels that are candidates where there is no kernel for the architecture fit the
shared memory that planning counts with.

A kernel that takes more is compiled by the tuner for nothing, and one that has two main loops takes
twice as much: each loop has buffers of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.compile import test_all_gather_kernels as gathers
from tests.compile import test_exchange_kernels as exchanges
from tests.compile import test_reduction_kernels as reductions
from tests.compile.harness import Compiled

from tileweave.planning.candidates import candidates
from tileweave.planning.machine import H200
from tileweave.planning.problem import MatmulConfig, Problem

STAGES = 3
A100 = replace(H200, name="NVIDIA A100", arch=80, num_sms=108)


def portable_cases() -> list[tuple[str, MatmulConfig]]:
    """(operator, config), once for each kernel that differs: slices and teams are arguments."""
    p, found = Problem(4, 4096, 4096, 4096, 2, "bfloat16"), {}
    for op in ("all_gather_matmul", "matmul_reduce_scatter", exchanges.OUT, exchanges.IN):
        for config in candidates(op, p, A100):
            if config.kernel == "triton" and config.num_stages == STAGES:
                alike = replace(config, num_slices=4, num_producers=32, team=1, group_m=8)
                found[op, alike] = None
    return list(found)


def compile_portable(op: str, config: MatmulConfig) -> Compiled:
    if op == "all_gather_matmul":
        return gathers.compile_case(gathers.Case(config, rows=256), "sm_80")
    if op == "matmul_reduce_scatter":
        return reductions.compile_case(reductions.Case(config, rows=256), "sm_80")
    how = exchanges.QKV if op == exchanges.OUT else exchanges.PROJECTION
    return exchanges.compile_case(exchanges.Case(op, config, how), "sm_80")


@pytest.mark.parametrize(("op", "config"), portable_cases(), ids=str)
def test_a_candidate_takes_the_shared_memory_of_its_ring(op: str, config: MatmulConfig) -> None:
    ring = (config.tile_m + config.tile_n) * config.tile_k * 2 * STAGES
    cut_tile = 4 * config.tile_m * config.tile_n if config.split_tail else 0
    compiled = compile_portable(op, config)
    assert 0 < compiled.shared_bytes <= max(ring, cut_tile)
    assert compiled.fits_shared
