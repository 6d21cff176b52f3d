"""A Llama by tw.parallelize against the same model by parallelize_module of torch.

    python3 examples/bench_parallelize.py --json out.json   # two GPUs, about four minutes
    python3 examples/bench_parallelize.py tileweave-sequence torch-sequence   # some variants
    python3 examples/bench_parallelize.py --tiny   # anywhere: does it run, are losses the same?

Llama 3 8B with a few layers and random weights, bfloat16: a training step (forward, cross entropy
and backward, without an optimizer) of one sequence, and a forward of 16 tokens, as many as one
step of decoding has for 16 sequences. Variants, each over all ranks:

=====================  =======================================================================
tileweave              ``tw.parallelize(model)``: all-reduce form
tileweave-sequence     ``tw.parallelize(model, sequence_parallel=True)``
torch, torch-sequence  the same forms by the styles of torch, with embedding and head sharded
torch-async            torch-sequence, compiled with torch's asynchronous tensor parallelism
\\*-compiled            the same, compiled by Inductor
=====================  =======================================================================

It prints WRONG and ends with 1 if the loss of a variant, or the norm of one of its gradients, is
farther than ``APART`` from that of the first one.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from tensor_parallel_block import rotate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tileweave as tw
from tileweave.launcher import Member, default_device_type, default_world_size, end_with, launch
from tileweave.profile.timing import Timing, measure

VARIANTS = (
    *("tileweave", "tileweave-compiled", "tileweave-sequence", "tileweave-sequence-compiled"),
    *("torch", "torch-compiled", "torch-sequence", "torch-sequence-compiled", "torch-async"),
)
TRAINED = (2048, 8192)  # tokens of a training step
FORWARD = 16  # tokens of a forward
APART = 5e-2


@dataclass(frozen=True)
class Sizes:
    layers: int = 4
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    dtype: torch.dtype = torch.bfloat16


TINY = Sizes(2, 64, 96, 8, 4, 96, torch.float32)


# --- The model, which knows nothing of ranks ---


class Attention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.head_dim = s.hidden // s.heads
        self.q_proj = nn.Linear(s.hidden, s.hidden, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(s.hidden, s.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(s.hidden), nn.RMSNorm(s.hidden)
        self.attention, self.mlp = Attention(s), MLP(s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm, self.head = nn.RMSNorm(s.hidden), nn.Linear(s.hidden, s.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# --- Variants ---


def by_torch(model: Llama, mesh: DeviceMesh, sequence: bool) -> None:
    """The plan of torch's tutorial on tensor parallelism."""
    between = Shard(1) if sequence else Replicate()
    inner: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
        "attention.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    outer: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        inner |= {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
        }
        outer["norm"] = SequenceParallel()
    parallelize_module(model, mesh, outer)
    for layer in model.layers:
        parallelize_module(layer, mesh, inner)


def build(name: str, me: Member, mesh: DeviceMesh, sizes: Sizes) -> Llama:
    torch.manual_seed(0)
    with torch.device(me.device):
        model = Llama(sizes).to(sizes.dtype)
    if name.startswith("tileweave"):
        tw.parallelize(model, mesh, sequence_parallel="sequence" in name)
    else:
        by_torch(model, mesh, "sequence" in name or name == "torch-async")
    overlaps = name == "torch-async"
    if overlaps and me.on_gpu:
        symmetric_memory.enable_symm_mem_for_group(me.group.group_name)
    if "compiled" in name or overlaps:
        options = {"_micro_pipeline_tp": True} if overlaps and me.on_gpu else None
        model.compile(options=options)
    return model


def step(model: Llama, ids: torch.Tensor) -> torch.Tensor:
    """Forward and backward; the loss."""
    model.zero_grad(set_to_none=True)
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach()


@torch.no_grad()
def forward(model: Llama, ids: torch.Tensor) -> torch.Tensor:
    return model(ids)


def norms_of(model: Llama) -> list[float]:
    """The norm of the gradient of each parameter, of which ranks may have parts."""
    squares: list[Any] = [p.grad.float().square().sum() for p in model.parameters()]
    return [float(s.full_tensor() if isinstance(s, DTensor) else s) ** 0.5 for s in squares]


# --- Comparison ---


@dataclass(frozen=True)
class Options:
    variants: tuple[str, ...]
    sizes: Sizes
    tokens: tuple[int, ...]
    repeats: int
    json: str | None


def compare(me: Member, mesh: DeviceMesh, options: Options) -> Iterator[dict[str, Any]]:
    """Yield the times of each case."""
    models = {name: build(name, me, mesh, options.sizes) for name in options.variants}
    for tokens in options.tokens:
        generator = torch.Generator(me.device).manual_seed(tokens)
        ids = torch.randint(
            options.sizes.vocabulary, (1, tokens + 1), device=me.device, generator=generator
        )
        numbers = {}
        for name, model in models.items():
            numbers[name] = [float(step(model, ids)), *norms_of(model)]
        times = timed(me, options, {n: partial(step, m, ids) for n, m in models.items()}, False)
        yield case("step", tokens, times, numbers)
        for model in models.values():
            model.zero_grad(set_to_none=True)
    ids = torch.arange(FORWARD, device=me.device)[:, None]
    functions = {n: partial(forward, m, ids) for n, m in models.items() if "sequence" not in n}
    functions.pop("torch-async", None)  # one row is no multiple of the ranks
    for graph in (False, True) if me.on_gpu and functions else ():
        times = timed(me, options, functions, graph)
        yield case("forward, CUDA graph" if graph else "forward", FORWARD, times, {})


def timed(
    me: Member, options: Options, functions: dict[str, Callable[[], Any]], graph: bool
) -> dict[str, Timing]:
    iterations = 1 if options.sizes is TINY else None
    return measure(
        functions,
        me.group,
        me.device,
        repeats=options.repeats,
        iterations=iterations if graph or iterations else 4,
        graph=graph,
        settle=not graph,
    )


def case(
    what: str,
    tokens: int,
    times: dict[str, Timing],
    numbers: dict[str, list[float]],
) -> dict[str, Any]:
    """One result. ``numbers``: loss and norms of the gradients."""
    wanted = next(iter(numbers.values()), [])
    apart = {
        name: max(abs(a - b) / abs(b) for a, b in zip(given, wanted, strict=True))
        for name, given in numbers.items()
    }
    return {
        "what": what,
        "tokens": tokens,
        "losses": {name: given[0] for name, given in numbers.items()},
        "apart": apart,
        "wrong": [name for name, most in apart.items() if not most <= APART],  # NaN, too
        "times": {name: t.as_dict() for name, t in times.items()},
    }


def row(result: dict[str, Any]) -> str:
    lines = [f"{result['what']} of {result['tokens']} tokens"]
    for name, time in result["times"].items():
        text = ""
        if name in result["apart"]:
            text = f"   loss {result['losses'][name]:.4f}, {result['apart'][name]:.1e} apart"
        wrong = "  WRONG" if name in result["wrong"] else ""
        lines.append(
            f"  {name:28} {time['median_us'] / 1e3:9.3f} ms{text}{wrong}  {time['note']}".rstrip()
        )
    return "\n".join(lines)


def say(me: Member, line: str) -> None:
    if me.rank == 0:
        print(line, flush=True)


def run(me: Member, options: Options) -> bool:
    mesh = DeviceMesh.from_group(me.group, me.device.type, mesh_dim_names=("tp",))
    results: list[dict[str, Any]] = []
    found = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if me.on_gpu else "cpu",
        "ranks": me.world_size,
        "layers": options.sizes.layers,
        "cases": results,
    }
    for result in compare(me, mesh, options):
        results.append(result)
        say(me, row(result))
        if options.json is not None and me.rank == 0:  # now: a time limit may end the run
            Path(options.json).write_text(json.dumps(found, indent=1))
    tw.synchronize()
    return not any(result["wrong"] for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model, also without GPUs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=400, help="time limit")
    parser.add_argument("--json", metavar="FILE", help="write all times")
    parser.add_argument("variants", nargs="*", default=VARIANTS, help=", ".join(VARIANTS))
    given = parser.parse_args()
    sizes = TINY if given.tiny else replace(Sizes(), layers=given.layers)
    tokens = (32,) if given.tiny else TRAINED
    options = Options(tuple(given.variants), sizes, tokens, given.repeats, given.json)
    device_type = "cpu" if given.tiny else default_device_type()
    ranks = default_world_size(device_type, given.ranks)
    right = launch(run, options, world_size=ranks, device_type=device_type, seconds=given.seconds)
    return 0 if right is not False else 1  # None: a rank of torchrun that does not print


if __name__ == "__main__":
    end_with(main)
