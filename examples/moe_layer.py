"""A mixture-of-experts layer whose experts are sharded over ranks, compared with the same layer on
one device.

    python examples/moe_layer.py                   # 4 ranks, as in Qwen3-MoE: same losses?
    python examples/moe_layer.py --style deepseek  # sigmoid router, correction bias, shared expert
    python examples/moe_layer.py --style mixtral --ranks 2
    python examples/moe_layer.py --bench           # GPUs: time against NCCL + torch._grouped_mm

The layer is ``tw.nn.MoE``. A step is

    router | tokens to the ranks of their experts, gate and up projections | silu(gate) * up
           | down projection, weighted sums to the ranks of the tokens | loss
           | backward: the same two operators, swapped

Each rank has tokens of its own, and their number differs between ranks. Gradients of experts are
complete. Those of router and shared expert, which are replicated, are summed over ranks.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, mse_loss, silu

import tileweave as tw
from tileweave.bench.environment import WITHOUT_GPUS, environment
from tileweave.bench.expert_cases import MODELS
from tileweave.bench.prerequisites import file_for
from tileweave.bench.run import forget_case
from tileweave.bench.subjects import worst, worst_of
from tileweave.errors import require
from tileweave.launcher import Member, default_device_type, default_world_size, end_with, launch
from tileweave.nn import MoE, SigmoidTopK, SoftmaxTopK
from tileweave.ops import reference
from tileweave.ops.core import collectives
from tileweave.ops.experts.routing_plan import reference_plan
from tileweave.profile.timing import measure

# Largest relative difference of a loss from that on one device. In fp32 only the order of sums
# differs; in bf16 each rank rounds a partial sum.
ALLOWED = {"float32": 1e-5, "bfloat16": 2e-2}
TOKENS, RATE = 6, 1.0


@dataclass(frozen=True)
class Style:
    """The sizes of a layer; ``experts`` is the number on all ranks."""

    hidden: int
    width: int
    experts: int
    topk: int
    shared: int = 0
    sigmoid: bool = False


STYLES = {
    "mixtral": Style(32, 48, 4, 2),
    "qwen3": Style(32, 16, 8, 3),
    "deepseek": Style(32, 16, 8, 3, shared=16, sigmoid=True),
}


class WholeMoE(nn.Module):
    """The layer on one device in plain torch, expert by expert, with the parameter names of
    transformers."""

    def __init__(self, s: Style) -> None:
        super().__init__()
        self.gate = router(s)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(s.experts, 2 * s.width, s.hidden))
        self.experts.down_proj = nn.Parameter(torch.empty(s.experts, s.hidden, s.width))
        if s.shared:
            self.shared_experts = nn.Module()
            self.shared_experts.gate_proj = nn.Linear(s.hidden, s.shared, bias=False)
            self.shared_experts.up_proj = nn.Linear(s.hidden, s.shared, bias=False)
            self.shared_experts.down_proj = nn.Linear(s.shared, s.hidden, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x)
        y = torch.zeros_like(x)
        for expert in range(self.experts.down_proj.shape[0]):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            gate, up = linear(x[token], self.experts.gate_up_proj[expert]).chunk(2, -1)
            row = linear(silu(gate) * up, self.experts.down_proj[expert])
            y = y.index_add(0, token, (row * weights[token, choice, None]).to(x.dtype))
        if hasattr(self, "shared_experts"):
            shared = self.shared_experts
            y = y + shared.down_proj(silu(shared.gate_proj(x)) * shared.up_proj(x))
        return y


def router(s: Style) -> nn.Module:
    if s.sigmoid:  # of DeepSeek-V3, without groups
        return SigmoidTopK(s.hidden, s.experts, s.topk, scale=2.5)
    return SoftmaxTopK(s.hidden, s.experts, s.topk)


def train(member: Member, style: str, steps: int, dtype: str) -> list[tuple[float, float]]:
    """The loss of each step, over ranks and on one device, from the same weights and data."""
    s, kind = STYLES[style], getattr(torch, dtype)
    torch.manual_seed(0)  # all ranks draw the same layer and data
    whole = WholeMoE(s).to(member.device, kind)
    counts = [max(TOKENS - rank, 0) for rank in range(member.world_size)]
    x, target = (torch.randn(sum(counts), s.hidden).to(member.device, kind) for _ in range(2))
    part = MoE(
        s.hidden,
        s.width,
        s.experts,
        s.topk,
        shared_intermediate_size=s.shared,
        router=router(s).to(member.device, kind),
        max_tokens=TOKENS,
        device=member.device,
        dtype=kind,
    )
    part.load_whole_state_dict(whole.state_dict())
    mine = [t.split(counts)[member.rank] for t in (x, target)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=RATE) for layer in (part, whole)]
    losses = []
    for _ in range(steps):
        loss = (part(mine[0]) - mine[1]).float().square().sum() / target.numel()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        alone = mse_loss(whole(x).float(), target.float())
        alone.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((total.item(), alone.item()))
    tw.synchronize()
    tw.close()
    return losses


# --- The same layer on collectives and torch._grouped_mm, for comparison ---


class Routes:
    """Routes of the unfused layer, computed before it is timed: how many rows go to each rank, and
    the indices that order them."""

    def __init__(
        self, ids: torch.Tensor, rank: int, size: int, experts: int, group: dist.ProcessGroup
    ) -> None:
        (tokens, topk), device = ids.shape, ids.device
        self.group, self.local = group, experts // size
        all_ids = collectives.all_gather(ids.int().contiguous(), group).view(size, tokens, topk)
        plan = reference_plan(all_ids, rank, experts)
        self.offsets, self.rows = plan.offsets, int(plan.offsets[-1])
        entry = plan.row_entry[: self.rows].long()
        owner = ids.reshape(-1) // self.local
        self.order = torch.argsort(owner, stable=True)  # of own choices: by destination, then token
        self.tokens = self.order // topk
        self.sent, self.received = (
            torch.bincount(n, minlength=size).tolist() for n in (owner, entry // (tokens * topk))
        )
        self.by_source = torch.argsort(entry)  # of rows: by source, then token
        self.by_expert = torch.argsort(self.by_source)
        self.by_token = torch.empty_like(self.order)
        self.by_token[self.order] = torch.arange(tokens * topk, device=device)

    def to_experts(self, choices: torch.Tensor) -> torch.Tensor:
        """[T k, H] by destination -> rows of this rank's experts."""
        return self._exchange(choices, self.sent, self.received).index_select(0, self.by_expert)

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's experts -> [T k, H], choices of own tokens."""
        rows = self._exchange(rows.index_select(0, self.by_source), self.received, self.sent)
        return rows.index_select(0, self.by_token)

    def _exchange(self, rows: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        width = rows.shape[1]
        sizes = ([n * width for n in counts] for counts in (sends, receives))
        return collectives.all_to_all_whole(rows.view(-1), *sizes, self.group).view(-1, width)


class _UnfusedExperts(torch.autograd.Function):
    """Forward and backward with four exchanges, six grouped matmuls and a weighted sum. Rows are
    kept for backward and not sent again."""

    @staticmethod
    def forward(ctx, x, gate_up, down, weights, routes):
        r = ctx.routes = routes
        rows = r.to_experts(x.index_select(0, r.tokens))
        h = reference.grouped_matmul(rows, gate_up, r.offsets)
        a = torch.ops.tileweave.swiglu(h, r.offsets, r.local)
        parts = r.to_tokens(reference.grouped_matmul(a, down, r.offsets)).view(*weights.shape, -1)
        weights = weights.to(x.dtype)
        ctx.save_for_backward(rows, h, a, parts, weights, gate_up, down)
        return torch.bmm(weights[:, None], parts).squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        rows, h, a, parts, weights, gate_up, down = ctx.saved_tensors
        r, grad = ctx.routes, grad.contiguous()
        dweights = torch.bmm(parts, grad[:, :, None]).squeeze(2).float()
        choices = grad.index_select(0, r.tokens).mul_(weights.view(-1)[r.order, None])
        g = r.to_experts(choices)
        da = reference.grouped_matmul(g, down.transpose(1, 2), r.offsets)
        ddown = reference.grouped_outer(g, a, r.offsets)
        dh = torch.ops.tileweave.swiglu_backward(da, h, r.offsets, r.local)
        dgate_up = reference.grouped_outer(dh, rows, r.offsets)
        drows = reference.grouped_matmul(dh, gate_up.transpose(1, 2), r.offsets)
        return r.to_tokens(drows).view(*weights.shape, -1).sum(1), dgate_up, ddown, dweights, None


class LayerBench:
    """The fused and the unfused layer, with the same parameters, tokens and output gradient."""

    def __init__(self, member: Member, s: Style, tokens: int, dtype: torch.dtype) -> None:
        self.member = member
        generator = torch.Generator(member.device)
        self.layer = MoE(
            s.hidden,
            s.width,
            s.experts,
            s.topk,
            group=member.group,
            device=member.device,
            dtype=dtype,
        )
        for parameter, seed in zip(
            self.layer.parameters(), (0, 10 + member.rank, 30 + member.rank), strict=True
        ):
            parameter.detach().to_local().normal_(
                0, parameter.shape[-1] ** -0.5, generator=generator.manual_seed(seed)
            )
        shape = (2, tokens, s.hidden)
        drawn = (
            torch.empty(shape, device=member.device)
            .normal_(generator=generator.manual_seed(50 + member.rank))
            .to(dtype)
        )
        self.x, self.grad = drawn[0].clone().requires_grad_(), drawn[1].clone()
        with torch.no_grad():
            ids = self.layer.gate(self.x)[1]
        self.routes = Routes(ids, member.rank, member.world_size, s.experts, member.group)

    def fused(self) -> torch.Tensor:
        return self.layer(self.x)

    def unfused(self) -> torch.Tensor:
        experts = self.layer.experts
        weights, _ = self.layer.gate(self.x)
        return _UnfusedExperts.apply(
            self.x,
            experts.gate_up_proj.to_local(),
            experts.down_proj.to_local(),
            weights,
            self.routes,
        )

    def step(self, forward: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The output and all gradients."""
        y, named = forward(), {"x": self.x, **dict(self.layer.named_parameters())}
        gradients = torch.autograd.grad(y, list(named.values()), self.grad)
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        return {"y": y.detach(), **dict(zip(named, gradients, strict=True))}

    def matmuls(self) -> Callable[[], None]:
        """The six grouped matmuls of a step alone, on operands of their own."""
        experts, offsets = self.layer.experts, self.routes.offsets
        gate_up, down = (
            weight.detach().to_local() for weight in (experts.gate_up_proj, experts.down_proj)
        )
        widths = (gate_up.shape[2], gate_up.shape[1], down.shape[2])
        rows, h, a = (
            torch.randn(self.routes.rows, width, device=gate_up.device).to(gate_up.dtype)
            for width in widths
        )

        def run() -> None:
            for left, weight in (
                (rows, gate_up),
                (a, down),
                (rows, down.transpose(1, 2)),
                (h, gate_up.transpose(1, 2)),
            ):
                reference.grouped_matmul(left, weight, offsets)
            reference.grouped_outer(h, rows, offsets)
            reference.grouped_outer(rows, a, offsets)

        return run

    def differences(self) -> dict[str, float]:
        """The relative difference of output and gradients from the unfused ones, the largest of all
        ranks."""
        got, want = self.step(self.fused), self.step(self.unfused)
        off = {
            n: float((got[n].float() - w.float()).norm() / w.float().norm())
            for n, w in want.items()
        }
        return {n: worst(one, self.member.device, self.member.group) for n, one in off.items()}

    def kernels(self) -> list[tuple[str, float, int]]:
        """(name, microseconds, calls) of the kernels of one fused step on this rank."""
        self.step(self.fused)
        with torch.profiler.profile() as profile:
            self.step(self.fused)
            torch.cuda.synchronize()
        found = [
            (e.key, e.self_device_time_total, e.count)
            for e in profile.key_averages()
            if e.self_device_time_total > 0
        ]
        return sorted(found, key=lambda kernel: -kernel[1])


def bench(
    member: Member, cases: list[tuple[str, Style, int]], dtype: str, repeats: int, kernels: bool
) -> list[dict[str, Any]]:
    """The differences and times of each case: median of the slowest rank, variants interleaved."""
    found: list[dict[str, Any]] = []
    for name, style, tokens in cases:
        case = LayerBench(member, style, tokens, getattr(torch, dtype))
        entry: dict[str, Any] = {
            "case": name,
            "tokens": tokens,
            **asdict(style),
            "differences": case.differences(),
        }
        functions: dict[str, Callable[[], object]] = {
            "tileweave": lambda case=case: case.step(case.fused),
            "unfused": lambda case=case: case.step(case.unfused),
            "tileweave, forward": case.fused,
            "unfused, forward": case.unfused,
            "matmuls": case.matmuls(),
        }
        calls = None if member.on_gpu else 1
        timings = measure(functions, member.group, member.device, repeats=repeats, iterations=calls)
        entry["times"] = {key: timing.as_dict() for key, timing in timings.items()}
        if kernels:
            entry["kernels"] = case.kernels()
        found.append(entry)
        del case, functions
        tw.synchronize()
        forget_case(member)
    return found


def report(found: list[dict[str, Any]], dtype: str) -> bool:
    """Print a table. Returns whether all results were right."""
    names = list(found[0]["times"])
    print(
        "  ".join(
            [
                f"{'us':20}",
                *(f"{name:>18}" for name in names),
                " /unfused  forward  backward  differs",
            ]
        )
    )
    right = True
    for entry in found:
        us = {name: entry["times"][name]["median_us"] for name in names}
        ours, theirs = (
            [us[name], us[f"{name}, forward"], us[name] - us[f"{name}, forward"]]
            for name in ("tileweave", "unfused")
        )
        ratios = "  ".join(f"{b / a:8.2f}x" for a, b in zip(ours, theirs, strict=True))
        largest = worst_of(entry["differences"].values())
        right &= largest < ALLOWED[dtype]
        numbers = "  ".join(f"{us[name]:18.0f}" for name in names)
        verdict = "" if largest < ALLOWED[dtype] else ": WRONG"
        print(f"{entry['case']:20}  {numbers}  {ratios}  {largest:.1e}{verdict}")
        for kernel, time, calls in entry.get("kernels", [])[:24]:
            print(f"    {time:8.0f} us  {calls:3}  {kernel[:120]}")
    return right


def bench_cases(on_gpu: bool) -> list[tuple[str, Style, int]]:
    """Layers of published models; without GPUs a small one, to try the script."""
    if not on_gpu:
        return [("qwen3, reduced", STYLES["qwen3"], TOKENS)]
    sizes = (("qwen3-235b", 4096), ("deepseek-v3", 4096), ("deepseek-v3", 1024))
    return [(f"{model}-t{tokens}", Style(*MODELS[model]), tokens) for model, tokens in sizes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--style",
        choices=list(STYLES),
        default="qwen3",
        help="the model whose layer is trained; default: qwen3",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="2 or 4, or 8 except for Mixtral; default: as many as GPUs, or 4 on the CPU",
    )
    parser.add_argument("--steps", type=int, default=4, help="steps to train; default: 4")
    parser.add_argument(
        "--bench", action="store_true", help="time forward + backward instead of training"
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="with --bench: also print the times of the kernels of a step on rank 0",
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="with --bench: timed repeats of each; default: 9"
    )
    parser.add_argument("--json", type=Path, help="with --bench: the file to write all times to")
    words = parser.parse_args()
    kind = default_device_type()
    size, dtype = default_world_size(kind, words.ranks), "bfloat16" if kind == "cuda" else "float32"
    require(
        words.steps > 0 and words.repeats > 0,
        f"{words.steps} steps, {words.repeats} repeats",
        "1 or more",
        "ask for more",
    )
    require(
        words.bench or (words.json is None and not words.kernels),
        "--json or --kernels without --bench",
        "only with --bench",
        "add --bench",
    )
    require(
        STYLES[words.style].experts % size == 0,
        f"{words.style} over {size} ranks",
        "the same number of experts on each rank",
        "change ranks",
    )
    file_for(words.json)
    if words.bench:
        found = launch(
            bench,
            bench_cases(kind == "cuda"),
            dtype,
            words.repeats,
            words.kernels,
            world_size=size,
            device_type=kind,
        )
        if found is None:  # under torchrun rank 0 has it
            return 0
        print(f"forward + backward of a layer, {size} ranks, {dtype}")
        if kind == "cpu":
            print(WITHOUT_GPUS)
        if words.json:
            text = json.dumps(
                {"world_size": size, "environment": environment(), "cases": found}, indent=1
            )
            words.json.write_text(text, "utf-8")
        return 0 if report(found, dtype) else 1
    losses = launch(train, words.style, words.steps, dtype, world_size=size, device_type=kind)
    if losses is None:
        return 0
    devices = "GPUs" if kind == "cuda" else "the CPU"
    print(f"losses, {words.style}, {size} ranks on {devices}, {STYLES[words.style]}")
    for number, (over_ranks, alone) in enumerate(losses):
        print(
            f"  step {number}: over ranks {over_ranks:.6f}, one device {alone:.6f}, "
            f"differ by {abs(over_ranks / alone - 1):.1e}"
        )
    largest = worst_of(abs(over_ranks / alone - 1) for over_ranks, alone in losses)
    right = largest < ALLOWED[dtype] and (words.steps < 2 or losses[-1][0] < losses[0][0])
    print(
        f"largest difference {largest:.1e}, allowed {ALLOWED[dtype]:.0e}"
        + ("" if right else ": WRONG")
    )
    return 0 if right else 1


if __name__ == "__main__":
    end_with(main)
