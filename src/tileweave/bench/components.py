"""Cells for the simulator's calibration: matmuls, collectives, lookups, top-k sums, whole layers, each by itself.

    python -m tileweave.bench.components --json docs/results/components.json

measures on worlds of 2 and 4 GPUs in one call (about two minutes) and writes what ``tileweave simulate trust`` and
``calibrate`` read; the operators themselves are ``tileweave bench``. ``--smoke`` tries the machinery without GPUs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tileweave.bench.environment import environment
from tileweave.bench.screen import Steps
from tileweave.launcher import Member, default_device_type, default_world_size, launch
from tileweave.profile.timing import measure
from tileweave.transport.collectives import all_gather_flat, reduce_scatter_flat

_COPIES_BYTES = 160 << 20  # operands rotate through so many bytes, past any L2


@dataclass(frozen=True, slots=True)
class Component:
    """One cell: what the simulator calls it, and its shape there (sim/predict.py)."""

    op: str
    quantity: str
    shape: tuple[int, ...]
    graph: bool


def components(world: int, smoke: bool) -> list[Component]:
    """What is measured. Shapes are global; both protocols of the collectives, both sides of a wave, short and long rows."""
    if smoke:
        return [
            Component("all_gather_matmul", "compute", (64, 64 * world, 32), False),
            *[Component(op, "comm", (1 << 12,), False) for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")],
            Component("embedding_bag_all_to_all", "compute", (64, world, 16, 3, 4), False),
            Component("grouped_matmul_combine", "reduce", (32, 64, 1, world, 2), False),
            Component("layer", "unfused", (64, 64, 128, 4, 2, 1), False),
        ]
    found = [
        Component("all_gather_matmul", "compute", (m, n, k), m <= 1024)
        for m in (96, 192, 384, 768, 1536, 3072, 6144, 12288)
        for n, k in ((10240, 8192), (36864, 12288))
    ]
    found += [
        Component("matmul_reduce_scatter", "compute", (m, 8192, k), m <= 1024)
        for m in (768, 3072, 12288)
        for k in (8192, 28672)
    ]
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        found += [Component(op, "comm", (1 << power,), True) for power in range(14, 29)]
    found += [
        Component("embedding_bag_all_to_all", "compute", (batch, 8 * world, 128, pooling, itemsize), False)
        for batch in (8192, 32768)
        for pooling in (1, 4, 20, 70)
        for itemsize in (2, 4)
    ]
    found += [
        Component("grouped_matmul_combine", "reduce", (tokens, hidden, 1, world, k), False)
        for tokens, hidden in ((1024, 7168), (4096, 4096), (8192, 4096))
        for k in (2, 4, 8)
    ]
    # rows, hidden, ffn, heads, kv_heads, sequence
    found += [Component("layer", "unfused", (m, 8192, 28672, 64, 8, 2048), False) for m in (2048, 4096, 8192, 16384)]
    return found


class _Maker:
    """Functions of one rank, by operator."""

    def __init__(self, member: Member) -> None:
        self.member, self.size, self.device = member, member.world_size, member.device
        self.dtype = torch.bfloat16 if member.on_gpu else torch.float32

    def function(self, component: Component) -> Callable[[], object]:
        if component.op == "layer":
            return self.layer(*component.shape)
        makers = {
            "all_gather_matmul": lambda m, n, k: self.matmul(m, n // self.size, k),
            "matmul_reduce_scatter": lambda m, n, k: self.matmul(m, n, k // self.size),
            "embedding_bag_all_to_all": self.lookup,
            "grouped_matmul_combine": self.top_k_sum,
        }
        if component.op in makers:
            return makers[component.op](*component.shape)
        return self.collective(component.op, component.shape[0])

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def copies(self, make: Callable[[], torch.Tensor]) -> Any:
        first = make()
        nbytes = first.numel() * first.element_size()
        count = min(max(_COPIES_BYTES // nbytes, 1), 8) if self.member.on_gpu else 1
        return cycle([first, *(make() for _ in range(count - 1))])

    def matmul(self, m: int, n: int, k: int) -> Callable[[], object]:
        x, weights, out = (
            self.random(m, k),
            self.copies(lambda: self.random(n, k)),
            torch.empty(m, n, device=self.device, dtype=self.dtype),
        )
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
                dist.all_reduce(whole.zero_(), group=group) if not self.member.on_gpu else dist.all_reduce(whole, group=group)
            )
        return lambda: all_gather_flat(whole, part, group=group)

    def lookup(self, batch: int, tables: int, dim: int, pooling: int, itemsize: int) -> Callable[[], object]:
        dtype = torch.float32 if itemsize == 4 else torch.bfloat16
        mine, rows = tables // self.size, 2_000_000 if self.member.on_gpu else 100
        weight = self.random(mine * rows, dim, dtype=dtype)
        bags = batch * mine
        indices = self.copies(lambda: torch.randint(0, mine * rows, (bags * pooling,), device=self.device))
        offsets = torch.arange(0, bags * pooling, pooling, device=self.device)
        return lambda: F.embedding_bag(next(indices), weight, offsets, mode="sum")

    def top_k_sum(self, tokens: int, hidden: int, _inter: int, _experts: int, top_k: int) -> Callable[[], object]:
        rows, scores = self.copies(lambda: self.random(tokens, top_k, hidden)), self.random(tokens, top_k, 1)
        return lambda: (next(rows) * scores).sum(1)

    def layer(self, m: int, hidden: int, ffn: int, heads: int, kv_heads: int, seq: int) -> Callable[[], object]:
        """One decoder layer forward, sequence parallel, by NCCL and cuBLAS."""
        size, group, device, dtype = self.size, self.member.group, self.device, self.dtype
        dim, q, kv = hidden // heads, heads // size, max(kv_heads // size, 1)
        x = self.random(m // size, hidden)
        gathered = torch.empty(m, hidden, device=device, dtype=dtype)
        shapes = ((q + 2 * kv) * dim, hidden), (hidden, q * dim), (2 * ffn // size, hidden), (hidden, ffn // size)
        qkv, proj, up, down = (self.copies(lambda shape=shape: self.random(*shape) * shape[1] ** -0.5) for shape in shapes)
        part = torch.empty(m // size, hidden, device=device, dtype=dtype)

        def gather(rows: torch.Tensor) -> torch.Tensor:
            all_gather_flat(gathered, rows, group=group)
            return gathered

        def scatter(partial: torch.Tensor) -> torch.Tensor:
            reduce_scatter_flat(part, partial, group=group)
            return part

        def forward() -> torch.Tensor:
            joint = gather(F.rms_norm(x, (hidden,))) @ next(qkv).t()
            batch = m // seq if m >= seq else 1
            split = joint.view(batch, m // batch, q + 2 * kv, dim).transpose(1, 2).split((q, kv, kv), 1)
            attended = (
                F.scaled_dot_product_attention(*split, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(m, q * dim)
            )
            y = x + scatter(attended @ next(proj).t())
            gate, value = (gather(F.rms_norm(y, (hidden,))) @ next(up).t()).chunk(2, 1)
            return y + scatter((F.silu(gate) * value) @ next(down).t())

        return forward


def run(member: Member, smoke: bool, repeats: int) -> list[dict[str, Any]]:
    """Measure every component on this world. Collective; complete on rank 0."""
    found, maker = [], _Maker(member)
    wanted = sorted(components(member.world_size, smoke), key=lambda one: one.graph)
    with Steps(f"components, world {member.world_size}", len(wanted), show=member.rank == 0) as steps:
        for one in wanted:
            name = f"{one.op} {one.quantity} {'x'.join(map(str, one.shape))}"
            steps.now(name)
            functions = {name: maker.function(one)}
            timing = measure(functions, member.group, member.device, repeats=repeats, graph=one.graph)[name]
            steps.done(f"{timing.median_us:.1f} us")
            if timing.median_us > 0.0:
                itemsize = one.shape[4] if one.op.startswith("embedding") else 2
                found.append(
                    {
                        "op": one.op, "quantity": one.quantity, "shape": list(one.shape), "us": round(timing.median_us, 2),
                        "graph": timing.graph, "itemsize": itemsize, "world_size": member.world_size,
                    }
                )  # fmt: skip
            del functions
            if member.on_gpu:
                torch.cuda.empty_cache()
    return found


def main() -> None:
    """Entry point of ``python -m tileweave.bench.components``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    kind = default_device_type()
    worlds = [size for size in (2, 4) if size <= default_world_size(kind, None)]
    found: list[dict[str, Any]] = []
    for size in worlds:
        found += launch(run, asked.smoke or kind == "cpu", asked.repeats, world_size=size, device_type=kind, seconds=500) or []
    about = (
        "Component times by tileweave.bench.components: slowest rank, median of repeats; shapes as sim/predict.py reads them."
    )
    report = {"about": about, "machine": {"world_size": max(worlds), **environment()}, "components": found}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
