"""Models of Hugging Face transformers with tileweave against the same models without it.

    python3 examples/bench_transformers.py --json out.json   # two GPUs, about two minutes
    python3 examples/bench_transformers.py qwen3-moe   # one of the two models
    python3 examples/bench_transformers.py --tiny   # anywhere: does it run, are logits the same?

First both are compared. Sums are rounded in other places, and where two experts of a token are
almost equally likely, a rounding may choose the other one, after which the token differs by much
more than a rounding. So routers of the second model get the inputs that those of the first had,
which makes both choose the same experts, and logits are compared then. It prints WRONG and ends
with 1 if they differ by more than ``LOGITS_APART``. Of a run in which each routes by itself, it
prints how many tokens of each layer had other experts, and how far logits were apart. With
``--float32`` it also prints how far both are from the same weights in float32, each with its own
routing: a difference of both that is no larger than those is rounding.

Random weights in the shapes of Llama 3 8B (8 layers) and Qwen3-30B-A3B (4 layers), tensor and
expert parallel over two ranks, or ``--ranks``. Stock is what transformers does: cuBLAS, then NCCL.
Both are called as they come ("eager"), where launches of many small kernels may take longer than
the kernels, and replayed from a CUDA graph. ``logits_to_keep=1``: the head computes one position.
The table at the end compares the faster one of stock with the faster one of tileweave.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, Qwen3MoeConfig, StaticCache
from transformers.distributed import DistributedConfig

import tileweave as tw
import tileweave.integrations.transformers as adapter
from tileweave.launcher import Member, default_device_type, default_world_size, end_with, launch
from tileweave.profile.timing import Timing, measure

PREFILL = (512, 2048, 8192)
DECODE = 16  # sequences, with one new token each
CONTEXT = 512  # tokens in the cache of each
CALLS = {512: 8, 2048: 4, 8192: 2, DECODE: 16}  # in one captured graph
COMPARED = 64  # last positions of a prefill whose logits are compared
# Largest differences, relative to the largest number of all tokens: of the first MLP block with the
# same input, and of logits with the same experts.
BLOCK_APART = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
LOGITS_APART = {torch.bfloat16: 5e-2, torch.float32: 1e-4}

LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=16384,
)
QWEN = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    max_position_embeddings=16384,
)
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Options:
    tiny: bool
    repeats: int
    models: tuple[str, ...]
    float32: bool = False
    json: str | None = None

    def config(self, name: str) -> transformers.PretrainedConfig:
        config = {"llama": LLAMA, "qwen3-moe": QWEN}[name]
        if not self.tiny:
            return config
        return type(config)(**{k: v for k, v in TINY.items() if hasattr(config, k)})


def build(
    config: transformers.PretrainedConfig,
    me: Member,
    tileweave: bool,
    dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """The model, sharded over the ranks; both variants have the same random weights. ``dtype``:
    None is bfloat16 on GPUs, float32 without."""
    dtype = dtype or (torch.bfloat16 if me.on_gpu else torch.float32)
    sparse, size = hasattr(config, "num_experts"), me.world_size
    named = adapter.EPImplementationInterface is not None  # transformers 5.21 and newer
    options = {"tp_size": size, "tp_plan": "auto"}
    if sparse:
        options |= {"ep_size": size} if named else {"enable_expert_parallel": True}
        if named and tileweave:
            options["ep_implementation"] = "tileweave"
    torch.manual_seed(0)
    with torch.device(me.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if sparse and not named:  # there, expert parallelism has no tensor-parallel attention
        attention = {k: v for k, v in model._tp_plan.items() if ".experts" not in k}
        model._ep_plan = attention | model._ep_plan
    kind = type(model)
    distributed, _, mesh = kind.prepare_distribute_model(
        DistributedConfig(**options), device_map=None
    )
    if tileweave:
        adapter.enable()
    try:
        return kind.maybe_distribute_model(model, distributed, mesh)
    finally:
        adapter.disable()


def prefill(model: torch.nn.Module, tokens: int, kept: int = 1) -> Callable[[], torch.Tensor]:
    generator = torch.Generator(model.device).manual_seed(tokens)
    ids = torch.randint(
        model.config.vocab_size, (1, tokens), device=model.device, generator=generator
    )
    return lambda: model(ids, use_cache=False, logits_to_keep=kept).logits


def decode(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    """One token for each of ``DECODE`` sequences, always at position ``CONTEXT``.

    The cache has the same random numbers in both models: what each would put there itself depends
    on its routing.
    """
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 8)
    ids = torch.arange(DECODE, device=model.device)[:, None]
    model(ids, past_key_values=cache)  # makes the memory of the cache
    generator = torch.Generator(model.device).manual_seed(CONTEXT)
    for layer in cache.layers:
        for part in (layer.keys, layer.values):
            drawn = torch.randn(part.shape, device=part.device, generator=generator)
            part.copy_(drawn.bfloat16())  # the same numbers in every dtype
    lengths = [layer.cumulative_length for layer in cache.layers]

    def step() -> torch.Tensor:
        torch._foreach_zero_(lengths)
        torch._foreach_add_(lengths, CONTEXT)
        return model(ids, past_key_values=cache).logits

    return step


def compare(
    config: transformers.PretrainedConfig, me: Member, options: Options
) -> Iterator[dict[str, Any]]:
    """Print differences and times of one model, and yield them case by case."""
    models = {name: build(config, me, name == "tileweave") for name in ("stock", "tileweave")}
    reference = in_float32(models["stock"], config, me) if options.float32 else None
    cases = {f"prefill {n}": n for n in ((64,) if options.tiny else PREFILL)}
    cases[f"decode {DECODE}"] = DECODE
    for case, tokens in cases.items():
        decodes = case.startswith("decode")
        functions = {k: decode(m) if decodes else prefill(m, tokens) for k, m in models.items()}
        compared = functions
        if not decodes:
            compared = {k: prefill(m, tokens, COMPARED) for k, m in models.items()}
        found = differences(models, compared, tokens)
        say(me, f"{config.model_type} {case}: {found}")
        if reference is not None:
            call = decode(reference) if decodes else prefill(reference, tokens, COMPARED)
            say(me, f"{config.model_type} {case}: {from_float32(call, compared)}")
        forms: dict[str, dict[str, Timing]] = {}
        for graph in (False, True) if me.on_gpu else (False,):
            how = "graph" if graph else "eager"
            forms[how] = times = measure(
                functions,
                me.group,
                me.device,
                repeats=options.repeats,
                iterations=1 if options.tiny else CALLS[tokens],
                graph=graph,
                on_capture_failure="nan",
            )
            say(me, row(config, case, how, times))
        yield {
            "model": config.model_type,
            "case": case,
            "right": found.right,
            "logits_apart": float(found.logits.max()),
            **{name: best(name, forms) for name in models},
            "times": {
                how: {name: t.as_dict() for name, t in times.items()}
                for how, times in forms.items()
            },
        }


def best(name: str, forms: dict[str, dict[str, Timing]]) -> dict[str, Any]:
    """The faster way to call a model, and its time; a form that cannot be captured is NaN."""
    found = {how: times[name].median_us for how, times in forms.items()}
    how = min(found, key=lambda key: (isnan(found[key]), found[key]))
    return {"how": how, "median_us": found[how]}


def summary(results: list[dict[str, Any]]) -> str:
    lines = ["", f"{'best of each':24} {'stock':>16} {'tileweave':>16}    stock / tileweave"]
    for result in results:
        stock, ours = result["stock"], result["tileweave"]
        one, other = (f"{t['median_us']:9.0f} {t['how']}" for t in (stock, ours))
        lines.append(
            f"{result['model']:10}{result['case']:14} {one:>16} {other:>16} us "
            f"{stock['median_us'] / ours['median_us']:6.3f}{'' if result['right'] else '  WRONG'}"
        )
    return "\n".join(lines)


# --- Are they the same? ---


@dataclass(frozen=True)
class Differences:
    right: bool
    block: float  # of the first MLP block, with the same input
    logits: torch.Tensor  # of each token, with the same experts
    by_itself: torch.Tensor  # of each token, each model with its own routing
    forced: list[int]  # tokens of each layer with other experts for the same inputs: none, if right
    moved: list[int]  # tokens of each layer with other experts, each model with its own routing
    tokens: int

    def __str__(self) -> str:
        text = (
            f"{'' if self.right else 'WRONG: '}an MLP block {self.block:.1e} apart, "
            f"logits {self.logits.median():.1e} (median of tokens) to {self.logits.max():.1e}"
        )
        if not self.moved:
            return text
        if any(self.forced):
            return f"{text}, but routers with the same inputs chose others for {self.forced} tokens"
        return (
            f"{text} with the same experts; {self.by_itself.median():.1e} to "
            f"{self.by_itself.max():.1e} with their own, which differ for {self.moved} "
            f"of {self.tokens} tokens, by layer"
        )


def differences(
    models: dict[str, torch.nn.Module],
    functions: dict[str, Callable[[], torch.Tensor]],
    tokens: int,
) -> Differences:
    """How far the two models are apart, the most of all ranks."""
    stock, ours = models.values()
    call_stock, call_ours = functions.values()
    wanted, inputs, experts = routed(stock, call_stock)
    by_itself, _, own_experts = routed(ours, call_ours)
    same, _, same_experts = routed(ours, call_ours, inputs)
    forced = moved_tokens(experts, same_experts)
    block = worst(apart(mlp_of(stock, tokens), mlp_of(ours, tokens))).max()
    logits = worst(apart(wanted, same))
    small = block <= BLOCK_APART[stock.dtype] and logits.max() <= LOGITS_APART[stock.dtype]
    return Differences(
        bool(small) and not any(forced),
        float(block),
        logits,
        worst(apart(wanted, by_itself)),
        forced,
        moved_tokens(experts, own_experts),
        tokens,
    )


def in_float32(
    model: torch.nn.Module, config: transformers.PretrainedConfig, me: Member
) -> torch.nn.Module:
    """The stock model with the weights of ``model``, computed in float32."""
    reference = build(config, me, False, torch.float32)
    for whole, rounded in zip(reference.parameters(), model.parameters(), strict=True):
        whole.copy_(rounded)
    return reference


def from_float32(
    reference: Callable[[], torch.Tensor], functions: dict[str, Callable[[], torch.Tensor]]
) -> str:
    wanted = reference().flatten(0, -2)
    far = {k: worst(apart(wanted, call().flatten(0, -2))) for k, call in functions.items()}
    return "logits from those in float32: " + "; ".join(
        f"{name} {t.median():.1e} (median of tokens) to {t.max():.1e}" for name, t in far.items()
    )


def routed(
    model: torch.nn.Module,
    function: Callable[[], torch.Tensor],
    forced: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Logits of ``function``, and of each router its input and the experts that it chose, sorted.

    Routers get the inputs ``forced`` in place of their own. Models without experts have no router.
    """
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    inputs, experts = [], []

    def before(gate: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = given[0] if forced is None else forced[len(inputs)]
        inputs.append(x.clone())
        return (x, *given[1:])

    def after(gate: torch.nn.Module, given: object, made: tuple[torch.Tensor, ...]) -> None:
        # of the logits: what follows them depends on how experts are sharded
        experts.append(made[0].topk(model.config.num_experts_per_tok).indices.sort().values)

    hooks = [gate.register_forward_pre_hook(before) for gate in gates]
    hooks += [gate.register_forward_hook(after) for gate in gates]
    try:
        return function().flatten(0, -2), inputs, experts
    finally:
        for hook in hooks:
            hook.remove()


def moved_tokens(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[int]:
    """Of each layer the number of tokens with other experts."""
    return [int((x != y).any(-1).sum()) for x, y in zip(a, b, strict=True)]


def mlp_of(model: torch.nn.Module, tokens: int) -> torch.Tensor:
    """What the first MLP block makes of the same tokens."""
    generator = torch.Generator(model.device).manual_seed(tokens)
    shape = (1, tokens, model.config.hidden_size)
    x = torch.randn(shape, device=model.device, generator=generator).to(model.dtype)
    y = model.model.layers[0].mlp(x)
    return (y[0] if isinstance(y, tuple) else y).flatten(0, -2)


def apart(stock: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """The largest difference of each token, relative to the largest number of all."""
    stock, ours = stock.float(), ours.float()
    return (ours - stock).abs().amax(-1) / stock.abs().max()


def worst(t: torch.Tensor) -> torch.Tensor:
    """The largest of all ranks, element by element; NaN, which compares with nothing, is inf."""
    t = t.nan_to_num(nan=torch.inf)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t


def say(me: Member, line: str) -> None:
    if me.rank == 0:
        print(line, flush=True)


def row(
    config: transformers.PretrainedConfig, case: str, how: str, times: dict[str, Timing]
) -> str:
    stock, ours = (times[name] for name in ("stock", "tileweave"))
    notes = "; ".join(f"{name}: {t.note}" for name, t in times.items() if t.note)
    return (
        f"{config.model_type:9} {case:13} {how:6} {stock.median_us:9.0f} {ours.median_us:9.0f} us "
        f"{stock.median_us / ours.median_us:6.3f}  {notes}"
    )


@torch.no_grad()
def run(me: Member, options: Options) -> bool:
    transformers.logging.set_verbosity_error()
    os.environ.setdefault("LOCAL_RANK", str(me.rank))  # transformers asks for it
    say(me, f"transformers {transformers.__version__}, torch {torch.__version__}")
    say(me, f"{'model':9} {'case':13} {'how':6} {'stock':>9} {'tileweave':>9}    stock / tileweave")
    results = []
    for name in options.models:
        for result in compare(options.config(name), me, options):
            results.append(result)
            write(results, me, options)  # what is there if the time limit ends the run
        if me.on_gpu:
            torch.cuda.empty_cache()
    tw.synchronize()
    say(me, summary(results))
    return all(result["right"] for result in results)


def write(results: list[dict[str, Any]], me: Member, options: Options) -> None:
    if options.json is None or me.rank != 0:
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    device = torch.cuda.get_device_name() if me.on_gpu else "cpu"
    found = {"versions": versions, "device": device, "ranks": me.world_size, "cases": results}
    Path(options.json).write_text(json.dumps(found, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models, also without GPUs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=200, help="time limit")
    parser.add_argument("--float32", action="store_true", help="also compare with float32")
    parser.add_argument("--json", metavar="FILE", help="write all times and differences")
    parser.add_argument(
        "models", nargs="*", default=["llama", "qwen3-moe"], help="llama, qwen3-moe, or both"
    )
    given = parser.parse_args()
    options = Options(given.tiny, given.repeats, tuple(given.models), given.float32, given.json)
    device_type = "cpu" if given.tiny else default_device_type()
    right = launch(
        run,
        options,
        world_size=default_world_size(device_type, given.ranks),
        device_type=device_type,
        seconds=given.seconds,
    )
    return 0 if right is not False else 1  # None: a rank of torchrun that does not print


if __name__ == "__main__":
    end_with(main)
