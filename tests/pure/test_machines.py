"""Facts of a machine that take kernels away: TILEWEAVE_KERNELS, and devices without peer access."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tileweave.errors import InputError
from tileweave.planning.candidates import candidates
from tileweave.planning.combine import plan_combine
from tileweave.planning.machine import H200
from tileweave.planning.matmul import plan_all_gather_matmul, plan_matmul_all_reduce
from tileweave.planning.problem import Problem
from tileweave.planning.schedules.grouped import GroupedProblem, plan_dispatch, routes_fused
from tileweave.planning.sharding import plan_embedding
from tileweave.transport.workspace import kernels_allowed


def test_machine_without_hopper_kernels_plans_none_of_them() -> None:
    portable = replace(H200, kernels="portable")
    assert H200.hopper and not portable.hopper
    for op, p in (
        ("all_gather_matmul", Problem(2, 4096, 4096, 8192, 2, "bfloat16")),
        ("matmul_all_reduce", Problem(2, 4, 4096, 8192, 2, "bfloat16")),
    ):
        kernels = {config.kernel for config in candidates(op, p, portable)}
        assert kernels and "hopper" not in kernels
        plan = (plan_all_gather_matmul if op == "all_gather_matmul" else plan_matmul_all_reduce)(
            p, portable, False
        )
        assert plan.config is None or plan.config.kernel != "hopper"


def test_devices_without_peer_access_run_unfused() -> None:
    machine = replace(H200, unreachable="GPU 0 has no peer access to GPU 1")
    p = Problem(2, 4096, 4096, 8192, 2, "bfloat16")
    experts = GroupedProblem(2, 4096, 8, 32, 4096, 1536, 2, "bfloat16")
    plans = [
        plan_all_gather_matmul(p, machine, False),
        plan_matmul_all_reduce(p, machine, False),
        plan_dispatch(experts, machine, False),
        plan_combine(experts, machine, False),
        plan_embedding(2, 512, 8.0, machine, False),
    ]
    assert [(plan.path, plan.reason) for plan in plans] == [("unfused", machine.unreachable)] * 5
    assert not routes_fused(2, machine, False) and routes_fused(2, H200, False)


def test_variable_names_known_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, allowed in (("", "all"), ("all", "all"), ("portable", "portable")):
        monkeypatch.setenv("TILEWEAVE_KERNELS", text)
        assert kernels_allowed() == allowed
    monkeypatch.setenv("TILEWEAVE_KERNELS", "Portable")
    with pytest.raises(InputError, match="'Portable'; allowed: all, portable; remedy"):
        kernels_allowed()
