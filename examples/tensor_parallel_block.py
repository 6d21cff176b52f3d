"""A Llama-style block with tensor and sequence parallelism, compared with the same block on one
device.

    python examples/tensor_parallel_block.py          # 4 ranks, small: are the losses the same?
    python examples/tensor_parallel_block.py --bench  # GPUs: time against NCCL + cuBLAS
    python examples/tensor_parallel_block.py --bench --fp8    # its layers, trained in FP8

Between layers each rank has a part of the sequence: x [S/R, B, H]. Column-parallel layers gather it
along the sequence (``all_gather_matmul``); then each rank has all tokens of its own heads, or of
its own part of the MLP. Row-parallel layers sum over ranks and scatter the sequence again
(``matmul_reduce_scatter``). Backward runs the same two operators, swapped.

    x [S/R, B, H] -- norm -- qkv: gather, matmul -- attention of own heads
                  -- out: matmul, scatter -- + x
                  -- norm -- gate, up: gather, matmul -- silu(gate) * up
                  -- down: matmul, scatter -- + x
"""

import argparse
import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path

import tensor_parallel_fp8 as fp8
import torch
import torch.distributed as dist
from tensor_parallel_rivals import OverlappedColumn, UnfusedColumn, UnfusedRow
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

import tileweave as tw
from tileweave.bench.environment import WITHOUT_GPUS
from tileweave.bench.prerequisites import file_for
from tileweave.bench.subjects import worst, worst_of
from tileweave.errors import require
from tileweave.launcher import Member, default_device_type, default_world_size, end_with, launch
from tileweave.nn import ColumnParallelLinear, RowParallelLinear, replicate
from tileweave.profile.timing import measure

# Largest relative difference of a loss from that on one device. In fp32 only the order of sums
# differs.
ALLOWED = {"float32": 1e-5, "bfloat16": 1e-2}
# Largest relative difference of outputs and gradients from those of the unfused block. In bf16 both
# have rounded partial sums (1.4e-2 was seen).
APART = {"float32": 1e-5, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Sizes:
    """The sizes of one block; ``width`` is that of the MLP."""

    sequence: int = 32
    batch: int = 2
    hidden: int = 64
    heads: int = 8
    kv_heads: int = 4
    width: int = 224
    dtype: str = "float32"

    @property
    def head(self) -> int:
        return self.hidden // self.heads


class Block(nn.Module):
    """The block on one device."""

    def __init__(self, s: Sizes, device: torch.device) -> None:
        super().__init__()
        options = {"bias": False, "device": device, "dtype": getattr(torch, s.dtype)}
        self.sizes = s
        self.norm1, self.norm2 = (
            nn.RMSNorm(s.hidden, device=device, dtype=options["dtype"]) for _ in range(2)
        )
        self.q = nn.Linear(s.hidden, s.heads * s.head, **options)
        self.k, self.v = (nn.Linear(s.hidden, s.kv_heads * s.head, **options) for _ in range(2))
        self.out = nn.Linear(s.heads * s.head, s.hidden, **options)
        self.gate, self.up = (nn.Linear(s.hidden, s.width, **options) for _ in range(2))
        self.down = nn.Linear(s.width, s.hidden, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + self.out(attend(self.q(normed), self.k(normed), self.v(normed), self.sizes.head))
        normed = self.norm2(x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))


class ParallelBlock(nn.Module):
    """This rank's shard of a :class:`Block`, built of ``column`` and ``row`` layers."""

    def __init__(
        self,
        block: Block,
        group: dist.ProcessGroup,
        column: type[ColumnParallelLinear] = ColumnParallelLinear,
        row: type[RowParallelLinear] = RowParallelLinear,
    ) -> None:
        super().__init__()
        size, self.head, self.group = dist.get_world_size(group), block.sizes.head, group
        # each rank computes gradients of norms from its own tokens
        self.norm1, self.norm2 = (
            replicate(copy.deepcopy(norm), group=group, sums=True)
            for norm in (block.norm1, block.norm2)
        )
        self.qkv = column.from_linear(interleaved(size, block.q, block.k, block.v), group=group)
        self.out = row.from_linear(block.out, group=group)
        self.gate_up = column.from_linear(interleaved(size, block.gate, block.up), group=group)
        self.down = row.from_linear(block.down, group=group)
        self.splits = [layer.out_features // size for layer in (block.q, block.k, block.v)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).split(self.splits, -1)
        x = x + self.out(attend(q, k, v, self.head))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


def interleaved(size: int, *layers: nn.Linear) -> nn.Linear:
    """One layer with the features of several, ordered so that an equal split gives each rank its
    features of each layer."""
    shards = zip(*(layer.weight.chunk(size) for layer in layers), strict=True)
    merged = nn.Linear(
        layers[0].in_features,
        sum(layer.out_features for layer in layers),
        bias=False,
        device="meta",
    )
    merged.weight = nn.Parameter(torch.cat([part for parts in shards for part in parts]).detach())
    return merged


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int) -> torch.Tensor:
    """Causal attention with rotary positions and grouped keys: q [S, B, heads * head], k and v with
    fewer heads -> the shape of q."""
    q, k, v = (t.unflatten(-1, (-1, head)).permute(1, 2, 0, 3) for t in (q, k, v))
    y = scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
    return y.permute(2, 0, 1, 3).flatten(2)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [..., S, head]."""
    half = x.shape[-1] // 2
    rate = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# --- Training ---


def train(member: Member, sizes: Sizes, steps: int) -> list[tuple[float, float]]:
    """The loss of each step, in parallel and on one device, from the same weights and data."""
    torch.manual_seed(0)  # all ranks draw the same block and data
    whole = Block(sizes, member.device)
    part = ParallelBlock(whole, member.group)
    x, target = (torch.randn(sizes.sequence, sizes.batch, sizes.hidden) for _ in range(2))
    x, target = (t.to(member.device, getattr(torch, sizes.dtype)) for t in (x, target))
    mine = [t.chunk(member.world_size)[member.rank] for t in (x, target)]
    optimizers = [
        torch.optim.SGD(block.parameters(), lr=1.0, momentum=0.9, foreach=True)
        for block in (part, whole)
    ]
    losses = []
    for _ in range(steps):
        loss = (part(mine[0]) - mine[1]).float().square().sum() / target.numel()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        alone = (whole(x) - target).float().square().mean()
        alone.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((total.item(), alone.item()))
    tw.synchronize()
    tw.close()
    return losses


# --- The same block on collectives and matmuls, for comparison ---


def bench(member: Member, sizes: Sizes, repeats: int) -> dict[str, dict[str, float]]:
    """Time forward + backward of all variants, interleaved: median of the slowest rank in
    microseconds, and the difference of results."""
    torch.manual_seed(0)
    whole = Block(sizes, member.device)
    variants = {
        "tileweave": ParallelBlock(whole, member.group),
        "nccl+cublas": ParallelBlock(whole, member.group, UnfusedColumn, UnfusedRow),
        "nccl+cublas, overlapped backward": ParallelBlock(
            whole, member.group, OverlappedColumn, UnfusedRow
        ),
    }
    del whole
    shape = (sizes.sequence // member.world_size, sizes.batch, sizes.hidden)
    generator = torch.Generator(member.device).manual_seed(member.rank)
    x, grad = (torch.randn(shape, generator=generator, device=member.device) for _ in range(2))
    x, grad = (t.to(getattr(torch, sizes.dtype)) for t in (x, grad))
    x.requires_grad_()

    def step(block: ParallelBlock) -> tuple[torch.Tensor, ...]:
        y = block(x)
        inputs = [x, *block.parameters()]
        return y, *torch.autograd.grad(y, inputs, grad)

    results = {name: [t.clone() for t in step(block)] for name, block in variants.items()}
    right = results["nccl+cublas"]
    differences = {name: difference(found, right, member) for name, found in results.items()}
    del results, right
    functions = {name: lambda block=block: step(block) for name, block in variants.items()}
    timings = measure(functions, member.group, member.device, repeats=repeats)
    tw.synchronize()
    tw.close()
    return {
        name: {"us": timing.median_us, "difference": differences[name]}
        for name, timing in timings.items()
    }


def difference(found: list[torch.Tensor], right: list[torch.Tensor], member: Member) -> float:
    """The largest relative difference of output and gradients on any rank. Collective."""
    off = worst_of(
        ((a - b).float().norm() / b.float().norm()).item()
        for a, b in zip(found, right, strict=True)
    )
    return worst(off, member.device, member.group)


# --- The command ---


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="default: 4, or as many as there are GPUs")
    parser.add_argument("--steps", type=int, default=8, help="steps to train; default: 8")
    parser.add_argument(
        "--bench", action="store_true", help="time forward + backward instead of training"
    )
    parser.add_argument(
        "--tokens", type=int, help="sequence * batch; default: 8192 with --bench on GPUs, else 64"
    )
    parser.add_argument(
        "--sequence",
        type=int,
        help="default: 4096 with --bench on GPUs, else 32; at most the tokens",
    )
    parser.add_argument("--hidden", type=int, help="default: 8192 with --bench on GPUs, else 64")
    parser.add_argument(
        "--dtype", choices=sorted(ALLOWED), help="default: bfloat16 on GPUs, float32 elsewhere"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="with --bench: timed repeats of each; default: 9"
    )
    training = parser.add_argument_group("--bench --fp8: pairs of layers, trained in FP8 and bf16")
    training.add_argument("--fp8", action="store_true", help="all cases, or those of --tokens")
    training.add_argument("--only", default="", help="cases whose name matches this expression")
    training.add_argument(
        "--seconds", type=float, default=900.0, help="begin no case after that; default: 900"
    )
    training.add_argument("--graph", action="store_true", help="time steps in a CUDA graph")
    training.add_argument("--fast", action="store_true", help="with fast_accum=True")
    training.add_argument("--json", type=Path, help="the file to write all times to")
    return parser.parse_args()


def fp8_options(given: argparse.Namespace, on_gpu: bool, ranks: int) -> fp8.Options:
    """The options of ``--fp8``, whose cases fit the number of ranks."""
    unused = [name for name in ("sequence", "hidden", "dtype") if getattr(given, name) is not None]
    require(
        given.bench and not unused,
        "--fp8 " + " ".join(f"--{name}" for name in unused or ("without --bench",)),
        "--bench --fp8 with --tokens, --only, --repeats, --seconds, --graph, --fast, --json",
        "drop what it has no use for, or add --bench",
    )
    require(
        given.repeats > 0 and (given.tokens is None or given.tokens > 0),
        f"{given.repeats} repeats, {given.tokens} tokens",
        "1 or more",
        "ask for more",
    )
    file_for(given.json)
    tokens = () if given.tokens is None else (given.tokens,)
    options = fp8.Options(
        tokens, given.only, given.repeats, given.seconds, given.graph, given.fast, given.json
    )
    cases = options.cases(on_gpu)
    require(bool(cases), f"--only {given.only}", "a part of a case's name", "drop --only")
    for case in cases:
        sizes = (*case.shapes(ranks)[0], *case.shapes(ranks)[1])
        require(
            case.model.kv_heads % ranks == 0
            and case.tokens % ranks == 0
            and all(size % 16 == 0 for size in sizes),
            f"{case.name} over {ranks} ranks",
            "the same tokens and key heads on each rank, and multiples of 16 features",
            "change --ranks or --tokens",
        )
    return options


def sizes_of(given: argparse.Namespace, on_gpu: bool, ranks: int) -> Sizes:
    """Small sizes, or those of a Llama 70B block: heads of 128, 8 query heads per key head, an MLP
    of 3.5 times hidden."""
    large = given.bench and on_gpu
    usual = (
        {"hidden": 8192, "tokens": 8192, "sequence": 4096}
        if large
        else {"hidden": 64, "tokens": 64, "sequence": 32}
    )
    hidden, tokens, sequence = (
        usual[name] if getattr(given, name) is None else getattr(given, name) for name in usual
    )
    sequence = min(sequence, tokens)
    asked = f"{tokens} tokens in sequences of {sequence}, hidden {hidden}, {ranks} ranks"
    require(min(hidden, tokens, sequence) > 0, asked, "1 or more of each", "ask for more")
    require(
        tokens % sequence == 0 and tokens % ranks == 0,
        asked,
        "whole sequences, and the same number of tokens on each rank",
        "change tokens",
    )
    require(
        hidden % (1024 if hidden >= 1024 else 64) == 0,
        asked,
        "a multiple of 64, and of 1024 from 1024 on",
        "change hidden",
    )
    require(
        given.steps > 0 and given.repeats > 0,
        f"{given.steps} steps, {given.repeats} repeats",
        "1 or more",
        "ask for more",
    )
    sizes = Sizes(
        sequence,
        tokens // sequence,
        hidden,
        width=7 * hidden // 2,
        dtype=given.dtype or ("bfloat16" if on_gpu else "float32"),
    )
    if hidden >= 1024:
        sizes = replace(sizes, heads=hidden // 128, kv_heads=max(hidden // 1024, 4))
    require(
        sizes.kv_heads % ranks == 0,
        f"{sizes.kv_heads} key heads over {ranks} ranks",
        "the same number on each rank",
        "change ranks",
    )
    return sizes


def report(found: dict[str, dict[str, float]], dtype: str) -> bool:
    """Print a table. Returns whether all variants agree."""
    ours, right = found["tileweave"]["us"], True
    for name, row in found.items():
        agrees = row["difference"] < APART[dtype]
        print(
            f"  {name:34} {row['us']:10.0f} us  {row['us'] / ours:6.3f}x  "
            f"differs by {row['difference']:.1e}" + ("" if agrees else ": WRONG")
        )
        right &= agrees
    return right


def main() -> int:
    given, kind = arguments(), default_device_type()
    size = default_world_size(kind, given.ranks)
    if given.fp8:
        options = fp8_options(given, kind == "cuda", size)
        times = launch(fp8.bench, options, world_size=size, device_type=kind)
        return 0 if times is None or fp8.show(times) else 1
    sizes = sizes_of(given, kind == "cuda", size)
    place = f"{size} ranks on {'GPUs' if kind == 'cuda' else 'the CPU'}, {sizes}"
    if given.bench:
        found = launch(bench, sizes, given.repeats, world_size=size, device_type=kind)
        if found is None:  # under torchrun rank 0 has it
            return 0
        print(f"forward + backward, {place}")
        if kind == "cpu":
            print(WITHOUT_GPUS)
        return 0 if report(found, sizes.dtype) else 1
    losses = launch(train, sizes, given.steps, world_size=size, device_type=kind)
    if losses is None:
        return 0
    print(f"losses, {place}")
    for number, (parallel, alone) in enumerate(losses):
        print(
            f"  step {number}: parallel {parallel:.6f}, one device {alone:.6f}, "
            f"differ by {abs(parallel / alone - 1):.1e}"
        )
    largest = worst_of(abs(parallel / alone - 1) for parallel, alone in losses)
    fell = given.steps < 2 or losses[-1][0] < losses[0][0]
    right = largest < ALLOWED[sizes.dtype] and fell and all(map(math.isfinite, losses[-1]))
    print(
        f"largest difference {largest:.1e}, allowed {ALLOWED[sizes.dtype]:.0e}"
        + ("" if right else ": WRONG")
    )
    return 0 if right else 1


if __name__ == "__main__":
    end_with(main)
