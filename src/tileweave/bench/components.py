"""Measurements for the calibration of the simulator.

Components are fused operators, whole layers, matmuls, collectives, lookups, top-k sums, and kernels
that store tiles to their owners.

    python -m tileweave.bench.components --json docs/results/components.json

measures in worlds of 2 and 4 GPUs, the most important components first, and writes what ``tileweave
simulate trust`` and ``calibrate`` read. ``--seconds`` limits the whole run: no component is started
after the time of its world. ``--groups`` selects groups of component_cells.py. ``tileweave bench``
measures more shapes of the operators. ``--smoke`` tries the code without GPUs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tileweave as tw
from tileweave.bench.component_cells import GROUPS, Component, components, smoke
from tileweave.bench.console import Steps
from tileweave.bench.environment import environment
from tileweave.bench.prerequisites import file_for
from tileweave.bench.subjects import worst
from tileweave.errors import require
from tileweave.files import write_text
from tileweave.launcher import (
    Member,
    default_device_type,
    default_world_size,
    end_with,
    is_main_process,
    launch,
    under_torchrun,
)
from tileweave.ops import reference
from tileweave.ops.core.registry import name_of
from tileweave.ops.matmul import matmul_all_to_all_fused, matmul_reduce_scatter_fused
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.scatter import Exchange
from tileweave.profile.timing import Timing, measure
from tileweave.transport.torch_collectives import all_gather_flat, reduce_scatter_flat

_COPIES_BYTES = 160 << 20  # operands rotate through this many bytes, more than any L2 holds


class _Maker:
    """Functions of one rank, by operator."""

    def __init__(self, member: Member) -> None:
        self.member, self.size, self.device = member, member.world_size, member.device
        self.dtype = torch.bfloat16 if member.on_gpu else torch.float32

    def function(self, component: Component) -> Callable[[], object]:
        op, fused = component.op, component.quantity == "fused"
        if op == "layer":
            return self.layer(*component.shape, fused=fused)
        if op == "embedding_bag_all_to_all":
            return (self.exchanged_lookup if fused else self.lookup)(*component.shape)
        if op == "grouped_matmul_combine":
            return self.top_k_sum(*component.shape)
        if op == "matmul":
            return self.matmul(*component.shape)
        if component.config is not None:
            m, n, k = component.shape
            return self.stores(op, m, n, k, component.config)
        if op in tw.OPERATORS:
            m, n, k = component.shape
            n, k = (n // self.size, k) if op == "all_gather_matmul" else (n, k // self.size)
            if component.quantity == "compute":
                return self.matmul(m, n, k)
            return self.operator(op, m, n, k, fused)
        return self.collective(op, component.shape[0])

    def operator(self, op: str, m: int, n: int, k: int, fused: bool) -> Callable[[], object]:
        """The public operator, or its reference."""
        x = self.random(m // self.size if op == "all_gather_matmul" else m, k)
        weights = self.copies(lambda: self.random(n, k))
        group = self.member.group
        if fused:
            call = getattr(tw, op)
            return lambda: call(x, next(weights), group=group)
        unfused = getattr(reference, op)
        return lambda: unfused(x, next(weights), None, group)

    def stores(self, op: str, m: int, n: int, k: int, config: MatmulConfig) -> Callable[[], object]:
        """A kernel that stores tiles to their owners, with ``config`` in place of a plan.

        Its result is checked once.
        """
        group, how = self.member.group, Exchange(1, 0)
        exchanged = op == "matmul_all_to_all"
        rows, depth = (m // self.size, k) if exchanged else (m, k // self.size)
        x, weights = self.random(rows, depth), self.copies(lambda: self.random(n, depth))
        plan, name = Plan("fused", "asked for", config), name_of(group)
        w = next(weights)
        want = getattr(reference, op)(x, w, None, group, *((1, 0) if exchanged else ()))
        out = torch.empty_like(want)

        def call(w: torch.Tensor) -> torch.Tensor:
            if exchanged:
                matmul_all_to_all_fused.run_fused(x, w, None, out, how, name, plan)
            else:
                matmul_reduce_scatter_fused.run_fused(x, w, None, out, name, plan)
            return out

        off = float((call(w).float() - want.float()).norm() / want.float().norm())
        require(
            off < 0.02,
            f"{op} {m}x{n}x{k}, {off:.1%} off",
            "2 %, as roundings of bf16 are",
            "report it: a kernel is wrong",
        )
        return lambda: call(next(weights))

    def exchanged_lookup(
        self, batch: int, tables: int, dim: int, pooling: int, itemsize: int
    ) -> Callable[[], object]:
        dtype = torch.float32 if itemsize == 4 else torch.bfloat16
        mine, rows = tables // self.size, 2_000_000 if self.member.on_gpu else 100
        parts = [self.random(rows, dim, dtype=dtype) for _ in range(mine)]
        bags = batch * mine
        indices = self.copies(lambda: torch.randint(0, rows, (bags * pooling,), device=self.device))
        offsets = torch.arange(0, bags * pooling + 1, pooling, device=self.device)
        layout = tw.EmbeddingLayout.in_rank_order([[dim] * mine] * self.size)
        return lambda: tw.embedding_bag_all_to_all(
            parts, next(indices), offsets, layout=layout, group=self.member.group
        )

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def copies(self, make: Callable[[], torch.Tensor]) -> Any:
        first = make()
        nbytes = first.numel() * first.element_size()
        count = min(max(_COPIES_BYTES // nbytes, 1), 8) if self.member.on_gpu else 1
        return cycle([first, *(make() for _ in range(count - 1))])

    def matmul(self, m: int, n: int, k: int) -> Callable[[], object]:
        x, weights = self.random(m, k), self.copies(lambda: self.random(n, k))
        out = torch.empty(m, n, device=self.device, dtype=self.dtype)
        return lambda: torch.mm(x, next(weights).t(), out=out)

    def collective(self, op: str, nbytes: int) -> Callable[[], object]:
        whole = self.random(nbytes // self.dtype.itemsize // self.size * self.size)
        part = torch.empty(whole.numel() // self.size, device=self.device, dtype=self.dtype)
        group = self.member.group
        if op == "all_to_all" and self.member.on_gpu:
            other = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(other, whole, group=group)
        if op == "reduce_scatter":
            return lambda: reduce_scatter_flat(part, whole, group=group)
        if op == "all_reduce":
            return lambda: (
                dist.all_reduce(whole.zero_(), group=group)
                if not self.member.on_gpu
                else dist.all_reduce(whole, group=group)
            )
        return lambda: all_gather_flat(whole, part, group=group)

    def lookup(
        self, batch: int, tables: int, dim: int, pooling: int, itemsize: int
    ) -> Callable[[], object]:
        dtype = torch.float32 if itemsize == 4 else torch.bfloat16
        mine, rows = tables // self.size, 2_000_000 if self.member.on_gpu else 100
        weight = self.random(mine * rows, dim, dtype=dtype)
        bags = batch * mine
        indices = self.copies(
            lambda: torch.randint(0, mine * rows, (bags * pooling,), device=self.device)
        )
        offsets = torch.arange(0, bags * pooling, pooling, device=self.device)
        return lambda: F.embedding_bag(next(indices), weight, offsets, mode="sum")

    def top_k_sum(
        self, tokens: int, hidden: int, _inter: int, _experts: int, top_k: int
    ) -> Callable[[], object]:
        rows = self.copies(lambda: self.random(tokens, top_k, hidden))
        return lambda: next(rows).sum(1)

    def layer(
        self, m: int, hidden: int, ffn: int, heads: int, kv_heads: int, seq: int, fused: bool
    ) -> Callable[[], object]:
        """One decoder layer forward, sequence parallel: by NCCL and cuBLAS, or by two fused
        operators."""
        size, group, device, dtype = self.size, self.member.group, self.device, self.dtype
        dim, q, kv = hidden // heads, heads // size, max(kv_heads // size, 1)
        x = self.random(m // size, hidden)
        gathered = torch.empty(m, hidden, device=device, dtype=dtype)
        shapes = (
            ((q + 2 * kv) * dim, hidden),
            (hidden, q * dim),
            (2 * ffn // size, hidden),
            (hidden, ffn // size),
        )
        qkv, proj, up, down = (
            self.copies(lambda shape=shape: self.random(*shape) * shape[1] ** -0.5)
            for shape in shapes
        )
        part = torch.empty(m // size, hidden, device=device, dtype=dtype)

        def into(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            if fused:
                y = tw.all_gather_matmul(rows, w, group=group)
                assert isinstance(y, torch.Tensor), "nothing gathered was asked for"
                return y
            all_gather_flat(gathered, rows, group=group)
            return gathered @ w.t()

        def out_of(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            if fused:
                return tw.matmul_reduce_scatter(rows, w, group=group)
            reduce_scatter_flat(part, rows @ w.t(), group=group)
            return part

        def forward() -> torch.Tensor:
            joint = into(F.rms_norm(x, (hidden,)), next(qkv))
            batch = m // seq if m >= seq else 1
            asked, keys, values = (
                joint.view(batch, m // batch, q + 2 * kv, dim).transpose(1, 2).split((q, kv, kv), 1)
            )
            attended = F.scaled_dot_product_attention(
                asked, keys, values, is_causal=True, enable_gqa=True
            )
            y = x + out_of(attended.transpose(1, 2).reshape(m, q * dim), next(proj))
            gate, value = into(F.rms_norm(y, (hidden,)), next(up)).chunk(2, 1)
            return y + out_of(F.silu(gate) * value, next(down))

        return forward


@torch.no_grad()
def run(
    member: Member, groups: tuple[str, ...], repeats: int, seconds: float
) -> list[dict[str, Any]]:
    """Measure components in this world until its time is over; without groups, tiny ones.
    Collective.

    The result is complete on rank 0.
    """
    found, maker, began = [], _Maker(member), time.monotonic()
    listed = components(member.world_size, groups) if groups else smoke(member.world_size)
    of_eager = sum(not one.graph for one in listed) / len(listed)  # their share of the time
    with Steps(
        f"components, world {member.world_size}", len(listed), show=member.rank == 0
    ) as steps:
        for one in sorted(listed, key=lambda one: one.graph):
            steps.now(f"{one.op} {one.quantity} {'x'.join(map(str, one.shape))}")
            until = seconds if one.graph else of_eager * seconds
            if worst(time.monotonic() - began, member.device, member.group) > until:
                steps.done("no time left")
                continue
            timing = _time(one, maker, repeats)
            steps.done(f"{timing.median_us:.1f} us")
            if timing.median_us > 0.0:
                found.append(_record(one, timing, member.world_size))
            if member.on_gpu:
                torch.cuda.empty_cache()
    tw.close()
    return found


def _time(one: Component, maker: _Maker, repeats: int) -> Timing:
    member, functions = maker.member, {one.op: maker.function(one)}
    found = measure(functions, member.group, member.device, repeats=repeats, graph=one.graph)
    return found[one.op]


def _record(one: Component, timing: Timing, world_size: int) -> dict[str, Any]:
    return {
        "op": one.op,
        "quantity": one.quantity,
        "shape": list(one.shape),
        "us": round(timing.median_us, 2),
        "graph": timing.graph,
        "itemsize": one.shape[4] if one.op.startswith("embedding") else 2,
        "world_size": 1 if one.op == "matmul" else world_size,
        **({"config": asdict(one.config)} if one.config else {}),
    }


def main() -> None:
    """Entry point of ``python -m tileweave.bench.components``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=130.0, help="for all worlds together")
    parser.add_argument(
        "--groups", default=",".join(GROUPS), help="some of them, in order (default: %(default)s)"
    )
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    groups = tuple(asked.groups.split(","))
    require(
        set(groups) <= set(GROUPS),
        f"--groups {asked.groups}",
        f"of {', '.join(GROUPS)}",
        "name some, by commas",
    )
    require(
        asked.repeats >= 1 and 1.0 <= asked.seconds <= 1e6,
        f"--repeats {asked.repeats}, --seconds {asked.seconds}",
        "1 or more, and 1 to 1e6",
        "pass such numbers",
    )
    file_for(asked.json)
    kind = default_device_type()
    most = default_world_size(kind, None)
    worlds = [most] if under_torchrun() else [size for size in (2, 4) if size <= most]
    found: list[dict[str, Any]] = []
    wanted = () if asked.smoke or kind == "cpu" else groups
    seconds = asked.seconds / len(worlds)
    for size in worlds:
        one = launch(
            run,
            wanted,
            asked.repeats,
            seconds,
            world_size=size,
            device_type=kind,
            seconds=seconds + 120,
        )
        found += one or []
    if not is_main_process():  # rank 0 has the results
        return
    about = (
        "Component times by tileweave.bench.components: slowest rank, median of repeats; shapes as "
        "sim/predict.py reads them. again: each by itself, one call after the other."
    )
    report = {
        "about": about,
        "again": True,
        "machine": {"world_size": max(worlds), **environment()},
        "components": found,
    }
    write_text(asked.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    end_with(main)
