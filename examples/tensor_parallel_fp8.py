"""The two pairs of layers of a Llama block, trained in FP8 and in 16 bits, timed against NCCL.

    python examples/tensor_parallel_block.py --bench --fp8

A pair is a column-parallel layer, something elementwise, and a row-parallel layer: gate and up,
silu, down; or q, k and v, something in place of attention, the output. Forward and backward, all
gradients. What is compared, each with bf16 and with both recipes of FP8 training:

    tileweave      the operators
    nccl           collectives, and matmuls of cuBLAS: one after the other; "overlapped": backward
                   of the column-parallel layer as in Megatron-LM; "FP8 sent": x is quantised
                   before it is gathered
    nothing sent   the same without collectives: the least time

Quantisation is by our kernels everywhere. Results and gradients of each layer are compared with
fp32 of the numbers that its operands represent, before anything is timed.
"""

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tensor_parallel_rivals import How, Sent, Unsent, gather_matmul, matmul_scatter
from torch.nn.functional import silu

import tileweave as tw
from tileweave.bench.console import Steps, console
from tileweave.bench.environment import WITHOUT_GPUS, environment
from tileweave.bench.report import new_table, number
from tileweave.bench.run import forget_case, rank_0_says
from tileweave.bench.subjects import TOLERANCE, worst, worst_of
from tileweave.launcher import Member
from tileweave.ops.core import collectives
from tileweave.ops.matmul.scaled_training import Recipe
from tileweave.profile.timing import measure

DTYPE = torch.bfloat16
KINDS = ("bf16", "rowwise", "rowwise_with_gw_hp")
FORMS = {  # of a rival: (overlap, sends_fp8)
    "": (False, False),
    ", overlapped": (True, False),
    ", FP8 sent": (False, True),
    ", FP8 sent, overlapped": (True, True),
}
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Model:
    """Sizes of a layer of a Llama model: ``width`` is that of its MLP."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    head: int


MODELS = {
    "llama3-8b": Model(4096, 14336, 32, 8, 128),
    "llama3-70b": Model(8192, 28672, 64, 8, 128),
}
TOKENS = (8192, 2048, 4096)
TINY, FEW = {"tiny": Model(64, 64, 8, 4, 8)}, (16,)
PAIRS = ("mlp", "attention")


@dataclass(frozen=True)
class Case:
    """A pair of layers with so many tokens, of all ranks."""

    name: str
    model: Model
    pair: str
    tokens: int

    def shapes(self, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The weights of one rank."""
        m = self.model
        if self.pair == "mlp":
            return (2 * m.width // size, m.hidden), (m.hidden, m.width // size)
        wide, all_heads = m.heads * m.head, (m.heads + 2 * m.kv_heads) * m.head
        return (all_heads // size, m.hidden), (m.hidden, wide // size)

    def between(self, y: torch.Tensor) -> torch.Tensor:
        """What is between the two layers."""
        if self.pair == "mlp":
            gate, up = y.chunk(2, -1)
            return silu(gate) * up
        m = self.model
        shared, wide = m.heads // m.kv_heads, y.shape[1] * m.heads // (m.heads + 2 * m.kv_heads)
        q, k, v = y.split((wide, wide // shared, wide // shared), -1)
        each = (k * v).unflatten(-1, (-1, 1, m.head))
        return (q.unflatten(-1, (-1, shared, m.head)) * each).flatten(1)


@dataclass(frozen=True)
class Options:
    """What to time; ``fast``: with fast accumulation in FP8, everywhere."""

    tokens: tuple[int, ...]
    only: str
    repeats: int
    seconds: float
    graph: bool
    fast: bool
    json: Path | None

    def cases(self, on_gpu: bool) -> list[Case]:
        models, usual = (MODELS, TOKENS) if on_gpu else (TINY, FEW)
        all_of = [
            Case(f"{name}-{pair}-m{tokens}", models[name], pair, tokens)
            for tokens, pair, name in product(self.tokens or usual, PAIRS, models)
        ]
        return [case for case in all_of if re.search(self.only, case.name)]


# --- One case ---


def layers_of(kind: str, fast: bool, member: Member) -> dict[str, tuple[Layer, Layer]]:
    """Variant -> its column-parallel and row-parallel layer."""
    recipe = None if kind == "bf16" else Recipe(kind, fast)
    more: dict[str, Any] = {} if recipe is None else {"quantize": kind, "fast_accum": fast}

    def column(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return tw.all_gather_matmul(x, w, group=member.group, **more)

    def row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return tw.matmul_reduce_scatter(x, w, group=member.group, **more)

    def rival(how: How) -> tuple[Layer, Layer]:
        return (
            lambda x, w: gather_matmul(x, w, how),
            lambda x, w: matmul_scatter(x, w, how),
        )

    found = {f"tileweave {kind}": (column, row)}
    for form, (overlap, sends_fp8) in FORMS.items():
        if recipe is not None or not sends_fp8:
            how = How(Sent(member.group), overlap, recipe, sends_fp8)
            found[f"nccl {kind}{form}"] = rival(how)
    found[f"nothing sent {kind}"] = rival(How(Unsent(member.group), False, recipe, True))
    return found


def gradients(
    layer: Layer, x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    """The result, and the gradients of x and w."""
    y = layer(x, w)
    return [y.detach(), *torch.autograd.grad(y, (x, w), grad)]


def represented(t: torch.Tensor, dim: int | None) -> torch.Tensor:
    """t as FP8 has it, in fp32, with a scale for each slice along ``dim``; None: one scale."""
    greatest = t.abs().amax() if dim is None else t.abs().amax(dim, True)
    scale = torch.exp2(torch.ceil(torch.log2(greatest.double().clamp(min=1e-12) / 448.0))).float()
    return (t.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale


def wanted(
    kind: str, column: bool, x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor, member: Member
) -> list[torch.Tensor]:
    """Of one layer in fp32: the result and gradients of x and w."""
    group = member.group
    x, w = x.detach(), w.detach()
    if column:
        x = collectives.all_gather(x, group)
    else:
        grad = collectives.all_gather(grad, group)
    if kind == "bf16":
        by_row, turned, summed = torch.Tensor.float, w.float(), torch.Tensor.float
    else:
        turned = represented(w, 0 if kind == "rowwise" else None)

        def by_row(t: torch.Tensor) -> torch.Tensor:
            return represented(t, 1)

        def summed(t: torch.Tensor) -> torch.Tensor:
            return represented(t, 0) if kind == "rowwise" else t.float()

    y = by_row(x) @ by_row(w).t()
    gx = by_row(grad) @ turned
    del turned
    gw = summed(grad).t() @ summed(x)
    if column:
        return [y, collectives.reduce_scatter(gx, group), gw]
    return [collectives.reduce_scatter(y, group), gx, gw]


class Pair:
    """The operands of one case on one rank."""

    def __init__(self, case: Case, member: Member, seed: int) -> None:
        self.case, self.member = case, member
        size, device = member.world_size, member.device
        self.first, self.second = case.shapes(size)
        generator = torch.Generator(device).manual_seed(seed * size + member.rank)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, device=device, dtype=DTYPE)
            return drawn.mul_(scale)

        rows = case.tokens // size
        self.x = draw(rows, self.first[1]).requires_grad_()
        self.w1 = draw(*self.first, scale=self.first[1] ** -0.5).requires_grad_()
        self.w2 = draw(*self.second, scale=self.second[1] ** -0.5).requires_grad_()
        self.grad = draw(rows, self.second[0])
        # operands of each layer alone, for the check
        self.h = draw(case.tokens, self.second[1]).requires_grad_()
        self.grad1 = draw(case.tokens, self.first[0])

    def step(self, column: Layer, row: Layer) -> tuple[torch.Tensor, ...]:
        """Forward and backward."""
        y = row(self.case.between(column(self.x, self.w1)), self.w2)
        return torch.autograd.grad(y, (self.x, self.w1, self.w2), self.grad)

    def plans(self, kind: str, fast: bool) -> list[str]:
        """What runs in forward: of both layers."""
        more: dict[str, Any] = {} if kind == "bf16" else {"quantize": kind, "fast_accum": fast}
        calls = ("all_gather_matmul", self.x, self.w1), ("matmul_reduce_scatter", self.h, self.w2)
        return [str(tw.explain(*call, group=self.member.group, **more)) for call in calls]

    def errors(self, kind: str, layers: dict[str, tuple[Layer, Layer]]) -> dict[str, float]:
        """Variant -> the largest error of a result or gradient on any rank. Collective."""
        found: dict[str, list[float]] = {name: [] for name in layers}
        operands = (self.x, self.w1, self.grad1), (self.h, self.w2, self.grad)
        for number_of, given in enumerate(operands):
            want = wanted(kind, number_of == 0, *given, self.member)
            for name, pair in layers.items():
                got = gradients(pair[number_of], *given)
                found[name] += [
                    float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)
                ]
                tw.synchronize()
        return {
            name: worst(worst_of(each), self.member.device, self.member.group)
            for name, each in found.items()
        }


def bench_case(member: Member, case: Case, options: Options, seed: int, steps: Steps) -> Any:
    pair = Pair(case, member, seed)
    layers, errors = {}, {}
    for kind in KINDS:
        steps.detail(f"compiles and checks {kind}")
        made = layers_of(kind, options.fast, member)
        layers |= made
        true = {name: each for name, each in made.items() if "nothing sent" not in name}
        errors |= pair.errors(kind, true)
    right = all(error <= TOLERANCE[DTYPE] for error in errors.values())
    plans = {kind: pair.plans(kind, options.fast) for kind in KINDS}
    # a view of x would keep x's node of the autograd graph and its stream, which is not captured
    pair.h = pair.grad1 = pair.x.detach()[:0]
    entry = {**asdict(case), "plans": plans, "errors": errors, "right": right, "times": {}}
    if right:
        timings = measure(
            {name: lambda each=each: pair.step(*each) for name, each in layers.items()},
            member.group,
            member.device,
            repeats=options.repeats,
            iterations=None if member.on_gpu else 1,
            graph=options.graph,
            on_capture_failure="eager",
            progress=steps.detail,
        )
        entry["times"] = {name: timing.as_dict() for name, timing in timings.items()}
    return entry


# --- All cases ---


def bench(member: Member, options: Options) -> dict[str, Any]:
    """Collective; the report is complete on rank 0."""
    cases = options.cases(member.on_gpu)
    report: dict[str, Any] = {
        "world_size": member.world_size,
        "device_type": member.device.type,
        "environment": environment() if member.rank == 0 else {},
        "graph": options.graph,
        "fast_accum": options.fast,
        "cases": [],
        "skipped": [],
    }
    started = time.monotonic()
    with Steps("FP8 training", len(cases), show=member.rank == 0) as steps:
        for seed, case in enumerate(cases):
            steps.now(case.name)
            if not rank_0_says(member, time.monotonic() - started < options.seconds):
                report["skipped"].append(case.name)
                steps.done("skipped: out of time")
                continue
            entry = bench_case(member, case, options, seed, steps)
            report["cases"].append(entry)
            forget_case(member)
            steps.done(said(entry))
            if member.rank == 0 and options.json:
                options.json.write_text(as_json(report) + "\n", "utf-8")
    return report


def as_json(report: dict[str, Any]) -> str:
    """The report as JSON, which has no infinity: there errors are null."""
    cases = [
        {**case, "errors": {n: e if math.isfinite(e) else None for n, e in case["errors"].items()}}
        for case in report["cases"]
    ]
    return json.dumps({**report, "cases": cases}, indent=1)


def said(entry: dict[str, Any]) -> str:
    if not entry["right"]:
        wrong = {n: e for n, e in entry["errors"].items() if not e <= TOLERANCE[DTYPE]}
        return "WRONG: " + ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
    return "  ".join(
        f"{kind} {over:.2f}" for kind in KINDS for over in [figures(entry, kind)["over nccl"]]
    )


def figures(entry: dict[str, Any], kind: str) -> dict[str, Any]:
    """A row of the table: times in us; ratios above 1 say that tileweave is faster."""
    us = {name: timing["median_us"] for name, timing in entry["times"].items()}
    rivals = {form: us[f"nccl {kind}{form}"] for form in FORMS if f"nccl {kind}{form}" in us}
    form = min(rivals, key=rivals.__getitem__)
    ours, least = us[f"tileweave {kind}"], us[f"nothing sent {kind}"]
    plain = min(time for name, time in us.items() if "bf16" in name and "nothing" not in name)
    return {
        "tileweave": ours,
        "nccl": rivals[form],
        "its form": form.removeprefix(", ") or "plain",
        "nothing sent": least,
        "over nccl": rivals[form] / ours,
        "over bf16": plain / ours,
        "of the least": least / ours,
    }


def table_of(report: dict[str, Any]) -> Table:
    device = report["environment"].get("device", "")
    way = "in a CUDA graph" if report["graph"] else "eager"
    columns = (
        *("case", "operands", "tileweave", "nccl", "its form", "nothing sent"),
        *("over nccl", "over bf16", "of the least"),
    )
    title = f"forward + backward, {report['world_size']} ranks, {device}, {way}, us"
    table = new_table(title, columns, {}, ("case", "operands", "its form"))
    for entry in report["cases"]:
        for kind in KINDS if entry["right"] else ():
            found = figures(entry, kind)
            cells = [
                text if isinstance(text, str) else number(text, 2 if text < 100 else 0)
                for text in found.values()
            ]
            table.add_row(entry["name"] if kind == KINDS[0] else "", kind, *cells)
    return table


def show(report: dict[str, Any]) -> bool:
    """Print the report. Returns whether there are times, and everything was right."""
    console().print(table_of(report))
    if report["device_type"] == "cpu":
        print(WITHOUT_GPUS)
    notes = {
        f"{name}: {timing['note']}"
        for entry in report["cases"]
        for name, timing in entry["times"].items()
        if timing["note"]
    }
    if not report["cases"]:
        print("no time for any case")
        return False
    worst_error = worst_of(e for entry in report["cases"] for e in entry["errors"].values())
    print(f"largest error {worst_error:.1e}, allowed {TOLERANCE[DTYPE]:.0e}")
    for line in sorted(notes):
        print(line)
    wrong = [entry["name"] for entry in report["cases"] if not entry["right"]]
    if wrong:
        print(f"WRONG, not timed: {', '.join(wrong)}")
    if report["skipped"]:
        print(f"skipped, out of time: {', '.join(report['skipped'])}")
    return not wrong
