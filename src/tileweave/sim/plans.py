"""The configs with which matmul operators are simulated: those that tileweave plans.

The planner decides, for the simulated device and number of ranks, as in a call. Only a cell that
was measured with another config (``tables.py``) is simulated with that one.
"""

from __future__ import annotations

from functools import cache

from tileweave.errors import InputError
from tileweave.planning import choices, matmul
from tileweave.planning.machine import Machine
from tileweave.planning.problem import MatmulConfig, Plan, Problem
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.scatter import Exchange
from tileweave.sim.machine import Device
from tileweave.sim.tables import Table, nearest


def machine_of(device: Device) -> Machine:
    """The machine that tileweave's planner would see. Each device is taken as one that has our
    kernels for Hopper."""
    return Machine(f"NVIDIA {device.name.upper()}", "cuda", 90, device.num_sms)


@cache  # a plan takes about 1 ms, and models ask again for the same shapes
def plan_of(op: str, problem: Problem, machine: Machine) -> Plan[MatmulConfig]:
    """What tileweave plans."""
    return getattr(matmul, f"plan_{op}")(problem, machine, False)


choices.on_change(plan_of.cache_clear)


def fused_config(
    op: str, problem: Problem, machine: Machine, entries: Table | None = None
) -> MatmulConfig:
    """The config of a fused call: the one that is planned, where the plan is unfused the candidate
    that is expected to be fastest, or the one by a table of ``entries``.

    Raises
    ------
    InputError
        if nothing fused can run the problem.
    """
    if entries is not None:
        return nearest(op, problem, entries).config
    plan = plan_of(op, problem, machine)
    candidates = (plan.config, *(one.config for one in plan.candidates))
    found = next((config for config in candidates if config is not None), None)
    if found is None:
        raise InputError(
            f"asked: the time of a fused {op} of {problem.rows} rows, {problem.cols} columns and "
            f"K = {problem.depth} on {problem.world_size} ranks; allowed: what has a fused path: "
            f"{plan.reason}; remedy: ask for the unfused time"
        )
    return found


# The problem of one rank, as planners count it; see ``planning.matmul``.


def gather_problem(world: int, m: int, n: int, k: int, itemsize: int = 2) -> Problem:
    """Of an all-gather of ``m`` rows and a matmul with ``n`` local columns."""
    return Problem(world, max(m // world, 1), n, k, itemsize, "bfloat16")


def scatter_problem(kind: str, world: int, m: int, n: int, k: int, itemsize: int = 2) -> Problem:
    """Of x [m, k] @ w [n, k].T, then ``kind`` over rows."""
    if kind == "all_to_all":
        return exchange_after(Exchange(0, 0), world, m, n, k, itemsize)
    rows = m if kind == "all_reduce" else cdiv(m, world)
    return Problem(world, rows, n, k, itemsize, "bfloat16")


def exchange_after(
    exchange: Exchange, world: int, m: int, n: int, k: int, itemsize: int = 2
) -> Problem:
    """Of x [m, k] @ w [n, k].T with an exchange after it."""
    rows, cols = exchange.part(m, n, world)
    return Problem(world, rows, cols, k, itemsize, "bfloat16")


def exchange_before(
    exchange: Exchange, world: int, m: int, n: int, k: int, itemsize: int = 2
) -> Problem:
    """Of an exchange of x [m, k], then a matmul with w of ``n`` rows."""
    rows, depth = exchange.part(m, k, world)
    return Problem(world, rows, n, depth, itemsize, "bfloat16")
