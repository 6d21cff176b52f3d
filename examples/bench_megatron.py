"""GPT models of Megatron-core with tileweave against the same models without it: a training step.

    python3 examples/bench_megatron.py --json out.json   # two GPUs, about a minute
    python3 examples/bench_megatron.py sequence-parallel   # one of the three models

Random weights in the shapes of Llama 3 8B and Mixtral 8x7B, a few layers, bfloat16, forward and
backward of one micro-batch, without an optimizer. Both models have Megatron's local specification,
with torch's scaled_dot_product_attention, and norms that know sequence parallelism, which
Megatron has with Apex or Transformer Engine only. Stock is NCCL and cuBLAS; in the backward
Megatron overlaps them, for which it asks for CUDA_DEVICE_MAX_CONNECTIONS=1. That is set here;
``--connections 8`` sets another number.

Both are compared with the same weights in float32: |difference| / |gradient| of each gradient,
as a vector. It prints WRONG and ends with 1 if tileweave is farther away than stock by more than
``FARTHER``. Gradients of norms are far in both: they are small sums of many terms.
"""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

import tileweave as tw
from tileweave.integrations.megatron import with_tileweave
from tileweave.launcher import Member, end_with, launch
from tileweave.profile.timing import measure

TOKENS = (2048, 8192)
VOCABULARY = 32000
FARTHER = 1.5, 1e-2  # at most 1.5 times as far as stock, plus 0.01

LLAMA = dict(
    num_layers=4,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
)
MIXTRAL = LLAMA | dict(
    num_layers=2,
    num_moe_experts=8,
    moe_ffn_hidden_size=14336,
    moe_router_topk=2,
    moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall",
)
MODELS = {
    "sequence-parallel": LLAMA | dict(sequence_parallel=True),
    "tensor-parallel": LLAMA,
    "experts": MIXTRAL,
}


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...]
    repeats: int
    json: str | None


class Norm(torch.nn.RMSNorm):
    """An RMSNorm of which Megatron sums the gradients over ranks with sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device="cuda")
        self.weight.sequence_parallel = config.sequence_parallel


class Attention(torch.nn.Module):
    """Causal attention of [sequence, batch, head, feature], with groups of heads."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.permute(2, 0, 1, 3).flatten(2)


def with_own_parts(spec: Any) -> Any:
    """The specification with the norm and the attention of this file."""
    if isinstance(spec, ModuleSpec):
        for name, part in vars(spec.submodules).items() if spec.submodules else ():
            own = Attention if name == "core_attention" else with_own_parts(part)
            setattr(spec.submodules, name, own)
        return spec
    return Norm if spec is WrappedTorchNorm else spec


def sizes(name: str, ranks: int) -> dict[str, int]:
    """How many ranks share a layer of the model, and its experts."""
    sparse = "num_moe_experts" in MODELS[name]
    return {
        "tensor_model_parallel_size": 1 if sparse else ranks,
        "expert_model_parallel_size": ranks if sparse else 1,
        "expert_tensor_parallel_size": 1,
    }


def build(
    name: str, me: Member, tileweave: bool = False, dtype: torch.dtype = torch.bfloat16
) -> GPTModel:
    options = MODELS[name]
    model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        **options,
        **sizes(name, me.world_size),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    experts = options.get("num_moe_experts")
    spec = with_own_parts(get_gpt_layer_local_spec(experts, normalization="RMSNorm"))
    spec = with_tileweave(spec) if tileweave else spec
    layers = [spec] * config.num_layers
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
        vocab_size=VOCABULARY,
        max_sequence_length=max(TOKENS),
        position_embedding_type="rope",
        parallel_output=True,
    ).cuda()


def step(model: GPTModel, tokens: int) -> torch.Tensor:
    """Forward and backward of one sequence, the same on ranks that share a layer; the loss."""
    replica = parallel_state.get_data_parallel_rank()
    generator = torch.Generator("cuda").manual_seed(tokens + replica)
    ids = torch.randint(VOCABULARY, (1, tokens + 1), device="cuda", generator=generator)
    positions = torch.arange(tokens, device="cuda")[None]
    model.zero_grad(set_to_none=True)
    loss = model(ids[:, :-1], positions, None, labels=ids[:, 1:]).mean()
    loss.backward()
    return loss.detach()


def gradients(model: GPTModel, tokens: int) -> dict[str, torch.Tensor]:
    """The gradients of a step by parameter, and the loss."""
    found = {"loss": step(model, tokens)}
    return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def apart(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    exact, rounded = exact.double(), rounded.double()
    return float((rounded - exact).norm() / exact.norm().clamp_min(1e-30))


def compare(name: str, me: Member, options: Options) -> Iterator[dict[str, Any]]:
    """Print differences and times of one model, and yield them case by case."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes(name, me.world_size))
    exact = build(name, me, dtype=torch.float32)
    models = {"stock": build(name, me), "tileweave": build(name, me, tileweave=True)}
    for model in models.values():
        model.load_state_dict(exact.state_dict(), strict=False)
    exact.load_state_dict(models["stock"].state_dict(), strict=False)  # the rounded weights
    for tokens in TOKENS:
        wanted = gradients(exact, tokens)
        far = {
            kind: torch.tensor([apart(wanted[n], g) for n, g in gradients(model, tokens).items()])
            for kind, model in models.items()
        }
        for distances in far.values():
            assert distances.numel() == len(wanted), "parameters with gradients differ"
        times, more = FARTHER
        right = (far["tileweave"] <= times * far["stock"] + more).all()  # false for NaN, too
        right = torch.tensor(float(right), device=me.device)
        dist.all_reduce(right, dist.ReduceOp.MIN)
        exact.zero_grad(set_to_none=True)
        del wanted
        timings = measure(
            {kind: partial(step, model, tokens) for kind, model in models.items()},
            me.group,
            me.device,
            repeats=options.repeats,
            iterations=4,
            settle=True,
        )
        yield {
            "model": name,
            "tokens": tokens,
            "right": bool(right),
            "from_float32": {kind: float(t.max()) for kind, t in far.items()},
            "times": {kind: t.as_dict() for kind, t in timings.items()},
        }


def row(case: dict[str, Any]) -> str:
    stock, ours = (case["times"][kind]["median_us"] / 1e3 for kind in ("stock", "tileweave"))
    far = case["from_float32"]
    return (
        f"{case['model']:18} {case['tokens']:6} {stock:9.2f} {ours:9.2f} ms {stock / ours:6.3f}   "
        f"gradients at most {far['tileweave']:.1e} from float32 (stock {far['stock']:.1e})"
        f"{'' if case['right'] else '  WRONG'}"
    )


def say(me: Member, line: str) -> None:
    if me.rank == 0:
        print(line, flush=True)


def run(me: Member, options: Options) -> bool:
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    say(me, f"torch {torch.__version__}, CUDA_DEVICE_MAX_CONNECTIONS={connections}")
    say(me, f"{'model':18} {'tokens':>6} {'stock':>9} {'tileweave':>9}    stock / tileweave")
    results: list[dict[str, Any]] = []
    moe_utils.te_general_gemm = None  # Megatron 0.16.1 reads it without Transformer Engine, too
    found = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "ranks": me.world_size,
        "connections": connections,
        "cases": results,
    }
    for name in options.models:
        for case in compare(name, me, options):
            results.append(case)
            say(me, row(case))
            if options.json is not None and me.rank == 0:  # now: a time limit may end the run
                Path(options.json).write_text(json.dumps(found, indent=1))
        torch.cuda.empty_cache()
    tw.synchronize()
    return all(result["right"] for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--connections", default="1", help="CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--seconds", type=float, default=200, help="time limit")
    parser.add_argument("--json", metavar="FILE", help="write all times and differences")
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    given = parser.parse_args()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = given.connections
    options = Options(tuple(given.models), given.repeats, given.json)
    right = launch(run, options, world_size=given.ranks, device_type="cuda", seconds=given.seconds)
    return 0 if right is not False else 1  # None: a rank of torchrun that does not print


if __name__ == "__main__":
    end_with(main)
