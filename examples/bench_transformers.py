"""Models of Hugging Face transformers with tileweave against the same models without it.

    python3 examples/bench_transformers.py          # two GPUs, about a minute and a half
    python3 examples/bench_transformers.py --tiny   # anywhere: does it run, are logits the same?

Random weights in the shapes of Llama 3 8B (8 layers) and Qwen3-30B-A3B (4 layers), tensor and
expert parallel over two ranks. Stock is what transformers does: cuBLAS, then NCCL. Both are called
as they come ("eager"), where launches of many small kernels may take longer than the kernels, and
replayed from a CUDA graph. ``logits_to_keep=1``: the head computes one position.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from transformers import LlamaConfig, Qwen3MoeConfig, StaticCache
from transformers.distributed import DistributedConfig

import tileweave as tw
import tileweave.integrations.transformers as adapter
from tileweave.launcher import Member, default_device_type, end_with, launch
from tileweave.profile.timing import Timing, measure

PREFILL = (512, 2048, 8192)
DECODE = 16  # sequences, with one new token each
CONTEXT = 512  # tokens in the cache of each
CALLS = {512: 8, 2048: 4, 8192: 2, DECODE: 16}  # in one captured graph
# Largest relative difference of a block; in bf16 sums are rounded in other places. Logits of a
# mixture of experts may differ more: a rounding may choose another expert.
APART = {torch.bfloat16: 2e-2, torch.float32: 1e-5}

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

    def config(self, name: str) -> transformers.PretrainedConfig:
        config = {"llama": LLAMA, "qwen3-moe": QWEN}[name]
        if not self.tiny:
            return config
        return type(config)(**{k: v for k, v in TINY.items() if hasattr(config, k)})


def build(config: transformers.PretrainedConfig, me: Member, tileweave: bool) -> torch.nn.Module:
    """The model, sharded over the ranks; both variants have the same random weights."""
    sparse, size = hasattr(config, "num_experts"), me.world_size
    named = adapter.EPImplementationInterface is not None  # transformers 5.21 and newer
    options = {"tp_size": size, "tp_plan": "auto"}
    if sparse:
        options |= {"ep_size": size} if named else {"enable_expert_parallel": True}
        if named and tileweave:
            options["ep_implementation"] = "tileweave"
    torch.manual_seed(0)
    with torch.device(me.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if me.on_gpu else torch.float32
        ).eval()
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


def prefill(model: torch.nn.Module, tokens: int) -> Callable[[], torch.Tensor]:
    generator = torch.Generator(model.device).manual_seed(tokens)
    ids = torch.randint(
        model.config.vocab_size, (1, tokens), device=model.device, generator=generator
    )
    return lambda: model(ids, use_cache=False, logits_to_keep=1).logits


def decode(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    """One token for each of ``DECODE`` sequences, always at position ``CONTEXT``."""
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 8)
    ids = torch.arange(DECODE, device=model.device)[:, None]
    model(ids, past_key_values=cache)  # makes the memory of the cache
    lengths = [layer.cumulative_length for layer in cache.layers]

    def step() -> torch.Tensor:
        torch._foreach_zero_(lengths)
        torch._foreach_add_(lengths, CONTEXT)
        return model(ids, past_key_values=cache).logits

    return step


def compare(config: transformers.PretrainedConfig, me: Member, options: Options) -> None:
    models = {name: build(config, me, name == "tileweave") for name in ("stock", "tileweave")}
    cases = {
        f"prefill {n}": (n, {k: prefill(model, n) for k, model in models.items()})
        for n in ((64,) if options.tiny else PREFILL)
    }
    cases[f"decode {DECODE}"] = (DECODE, {k: decode(model) for k, model in models.items()})
    for case, (tokens, functions) in cases.items():
        blocks = apart(*(mlp_of(model, tokens) for model in models.values())).max()
        logits = apart(*(function().flatten(0, -2) for function in functions.values()))
        right = "" if blocks <= APART[models["stock"].dtype] else "  WRONG"
        say(
            me,
            f"{config.model_type} {case}: an MLP block {blocks:.1e} apart{right}, "
            f"logits {logits.median():.1e} (median of tokens) to {logits.max():.1e}",
        )
        for graph in (False, True) if me.on_gpu else (False,):
            times = measure(
                functions,
                me.group,
                me.device,
                repeats=options.repeats,
                iterations=CALLS.get(tokens, 1),
                graph=graph,
                on_capture_failure="nan",
            )
            say(me, row(config, case, "graph" if graph else "eager", times))


def mlp_of(model: torch.nn.Module, tokens: int) -> torch.Tensor:
    """What the first MLP block makes of the same tokens: its router then chooses the same experts,
    unlike those of later layers, whose inputs differ by rounding."""
    generator = torch.Generator(model.device).manual_seed(tokens)
    shape = (1, tokens, model.config.hidden_size)
    x = torch.randn(shape, device=model.device, generator=generator).to(model.dtype)
    y = model.model.layers[0].mlp(x)
    return (y[0] if isinstance(y, tuple) else y).flatten(0, -2)


def apart(stock: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """The largest difference of each token, relative to the largest number of all."""
    stock, ours = stock.float(), ours.float()
    return (ours - stock).abs().amax(-1) / stock.abs().max()


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
def run(me: Member, options: Options) -> None:
    transformers.logging.set_verbosity_error()
    os.environ.setdefault("LOCAL_RANK", str(me.rank))  # transformers asks for it
    say(me, f"transformers {transformers.__version__}, torch {torch.__version__}")
    say(me, f"{'model':9} {'case':13} {'how':6} {'stock':>9} {'tileweave':>9}    stock / tileweave")
    for name in options.models:
        compare(options.config(name), me, options)
        if me.on_gpu:
            torch.cuda.empty_cache()
    tw.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models, also without GPUs")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=150, help="time limit")
    parser.add_argument("models", nargs="*", default=["llama", "qwen3-moe"])
    given = parser.parse_args()
    options = Options(given.tiny, given.repeats, tuple(given.models))
    launch(
        run,
        options,
        world_size=2,
        device_type="cpu" if given.tiny else default_device_type(),
        seconds=given.seconds,
    )
    return 0


if __name__ == "__main__":
    end_with(main)
