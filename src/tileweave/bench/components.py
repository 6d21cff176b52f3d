"""Cells for the simulator's calibration: fused operators, whole layers, matmuls, collectives, lookups, top-k sums.

    python -m tileweave.bench.components --json docs/results/components.json

measures on worlds of 2 and 4 GPUs in one call, ``--seconds`` in all (about: no cell is begun after its world's share), most
wanted cells first, and writes what ``tileweave simulate trust`` and ``calibrate`` read. More shapes of the operators:
``tileweave bench``. ``--smoke`` tries the machinery without GPUs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tileweave as tw
from tileweave.bench.environment import environment
from tileweave.bench.screen import Steps
from tileweave.bench.subjects import worst
from tileweave.launcher import Member, default_device_type, default_world_size, launch
from tileweave.ops import reference
from tileweave.profile.timing import measure
from tileweave.transport.collectives import all_gather_flat, reduce_scatter_flat

_OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
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
            *[Component("layer", what, (64, 64, 128, 4, 2, 1), False) for what in ("fused", "unfused")],
            *[Component(op, "fused", (16, 64, 64), False) for op in ("all_gather_matmul", "matmul_all_reduce")],
            Component("embedding_bag_all_to_all", "fused", (8, world, 16, 3, 4), False),
        ]
    layers = [(m, 8192, 28672, 64, 8, 2048) for m in (4096, 8192, 2048, 16384)]  # rows, hidden, ffn, heads, kv_heads, sequence
    operators = {
        "all_gather_matmul": ((512, 28672, 8192), (2048, 28672, 8192), (8192, 10240, 8192)),
        "matmul_reduce_scatter": ((512, 8192, 28672), (2048, 8192, 8192), (8192, 8192, 28672)),
        "matmul_all_reduce": ((1, 8192, 8192), (16, 8192, 28672), (64, 8192, 28672), (256, 8192, 8192)),
    }
    both = ("fused", "unfused")
    found = [Component(op, what, s, s[0] <= 1024) for op, shapes in operators.items() for s in shapes for what in both]
    found += [Component("layer", what, shape, False) for shape in layers for what in both]
    found += [
        Component("all_gather_matmul", "compute", (m, n, k), m <= 1024)
        for m in (384, 1536, 6144, 96, 192, 768, 3072, 12288)
        for n, k in ((10240, 8192), (36864, 12288))
    ]
    found += [
        Component("matmul_reduce_scatter", "compute", (m, 8192, k), m <= 1024)
        for m in (768, 3072, 12288)
        for k in (8192, 28672)
    ]
    for powers in (range(14, 29, 2), range(15, 28, 2)):
        for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            found += [Component(op, "comm", (1 << power,), True) for power in powers]
    found += [
        Component("embedding_bag_all_to_all", what, (batch, 8 * world, 128, pooling, itemsize), False)
        for batch in (8192, 32768)
        for pooling in (1, 8, 40)
        for itemsize in (2, 4)
        for what in ("compute", "fused")
    ]
    found += [
        Component("grouped_matmul_combine", "reduce", (tokens, hidden, 1, world, k), False)
        for tokens, hidden in ((1024, 7168), (4096, 4096), (8192, 4096))
        for k in (2, 4, 8)
    ]
    return found


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
        if op in _OPERATORS:
            m, n, k = component.shape
            n, k = (n // self.size, k) if op == "all_gather_matmul" else (n, k // self.size)
            if component.quantity == "compute":
                return self.matmul(m, n, k)
            return self.operator(op, m, n, k, fused)
        return self.collective(op, component.shape[0])

    def operator(self, op: str, m: int, n: int, k: int, fused: bool) -> Callable[[], object]:
        """The public operator, or its reference."""
        x, weights = self.random(m // self.size if op == "all_gather_matmul" else m, k), self.copies(lambda: self.random(n, k))
        group = self.member.group
        if fused:
            call = getattr(tw, op)
            return lambda: call(x, next(weights), group=group)
        unfused = getattr(reference, op)
        return lambda: unfused(x, next(weights), None, group)

    def exchanged_lookup(self, batch: int, tables: int, dim: int, pooling: int, itemsize: int) -> Callable[[], object]:
        dtype = torch.float32 if itemsize == 4 else torch.bfloat16
        mine, rows = tables // self.size, 2_000_000 if self.member.on_gpu else 100
        parts = [self.random(rows, dim, dtype=dtype) for _ in range(mine)]
        bags = batch * mine
        indices = self.copies(lambda: torch.randint(0, rows, (bags * pooling,), device=self.device))
        offsets = torch.arange(0, bags * pooling + 1, pooling, device=self.device)
        layout = tw.EmbeddingLayout.in_rank_order([[dim] * mine] * self.size)
        return lambda: tw.embedding_bag_all_to_all(parts, next(indices), offsets, layout=layout, group=self.member.group)

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

    def layer(
        self, m: int, hidden: int, ffn: int, heads: int, kv_heads: int, seq: int, fused: bool
    ) -> Callable[[], object]:  # fmt: skip
        """One decoder layer forward, sequence parallel, by NCCL and cuBLAS, or by our two operators."""
        size, group, device, dtype = self.size, self.member.group, self.device, self.dtype
        dim, q, kv = hidden // heads, heads // size, max(kv_heads // size, 1)
        x = self.random(m // size, hidden)
        gathered = torch.empty(m, hidden, device=device, dtype=dtype)
        shapes = ((q + 2 * kv) * dim, hidden), (hidden, q * dim), (2 * ffn // size, hidden), (hidden, ffn // size)
        qkv, proj, up, down = (self.copies(lambda shape=shape: self.random(*shape) * shape[1] ** -0.5) for shape in shapes)
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
            asked, keys, values = joint.view(batch, m // batch, q + 2 * kv, dim).transpose(1, 2).split((q, kv, kv), 1)
            attended = F.scaled_dot_product_attention(asked, keys, values, is_causal=True, enable_gqa=True)
            y = x + out_of(attended.transpose(1, 2).reshape(m, q * dim), next(proj))
            gate, value = into(F.rms_norm(y, (hidden,)), next(up)).chunk(2, 1)
            return y + out_of(F.silu(gate) * value, next(down))

        return forward


@torch.no_grad()
def run(member: Member, smoke: bool, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Measure components on this world until its time is over. Collective; complete on rank 0."""
    found, maker, began = [], _Maker(member), time.monotonic()
    listed = components(member.world_size, smoke)
    eager = [one for one in listed if not one.graph]
    with Steps(f"components, world {member.world_size}", len(listed), show=member.rank == 0) as steps:
        for part, share in ((eager, len(eager) / len(listed)), ([one for one in listed if one.graph], 1.0)):
            for one in part:
                name = f"{one.op} {one.quantity} {'x'.join(map(str, one.shape))}"
                steps.now(name)
                if worst(time.monotonic() - began, member.device, member.group) > share * seconds:
                    steps.done("no time left")
                    continue
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
    tw.close()
    return found


def main() -> None:
    """Entry point of ``python -m tileweave.bench.components``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=130.0, help="for all worlds together")
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    kind = default_device_type()
    worlds = [size for size in (2, 4) if size <= default_world_size(kind, None)]
    found: list[dict[str, Any]] = []
    for size in worlds:
        smoke, seconds = asked.smoke or kind == "cpu", asked.seconds / len(worlds)
        found += launch(run, smoke, asked.repeats, seconds, world_size=size, device_type=kind, seconds=seconds + 120) or []
    about = (
        "Component times by tileweave.bench.components: slowest rank, median of repeats; shapes as sim/predict.py reads them."
    )
    report = {"about": about, "machine": {"world_size": max(worlds), **environment()}, "components": found}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
