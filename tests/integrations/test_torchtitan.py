"""tileweave.integrations.torchtitan against torchtitan's own tensor and sequence parallelism.

torchtitan trains on GPUs. Here its debug model runs on the CPU with three stand-ins: the device,
an attention that has a backward on the CPU, and no FSDP, which wants a data-parallel mesh.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.documents import ROOT, blocks_of
from tests.support.worlds import Member, World, environment_for
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import AuxOutput

pytest.importorskip(
    "torchtitan", reason="pip install 'tileweave[torchtitan]'", exc_type=ImportError
)

STEPS, LEARNING_RATE = 3, 0.1
SECONDS = 480  # of a job: the first import of torchtitan, and compiling, take long on busy machines
pytestmark = pytest.mark.timeout(540)
IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(16).expand(2, 16).contiguous()


def on_the_cpu() -> None:
    """Let torchtitan run without a GPU."""
    import spmd_types._dist as spmd_dist
    import torchtitan.distributed.parallel_dims as parallel_dims
    import torchtitan.models.common.attention as attention
    import torchtitan.tools.utils as tools

    tools.device_type, tools.device_module = "cpu", torch.cpu
    parallel_dims.device_type = "cpu"

    def causal(q: Any, k: Any, v: Any, **options: Any) -> Any:
        scale = options.get("scale")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
        if options.get("return_aux") is None:
            return y
        scores = (
            q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (scale or q.shape[-1] ** -0.5)
        )
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        lse = scores.masked_fill(~causal, float("-inf")).logsumexp(-1)
        return y, AuxOutput(lse=lse, max_scores=None)

    for name in ("compiled_flex_attn", "_compiled_flex_attn"):
        setattr(attention.FlexAttention, name, staticmethod(causal))
    spmd_dist.dist.all_to_all = all_to_all


def all_to_all(received: list[torch.Tensor], sent: list[torch.Tensor], **options: Any) -> None:
    """torch.distributed.all_to_all, of which gloo has only the case of equal sizes."""
    sizes = [t.shape[0] for t in received]
    rows = torch.cat(received)
    dist.all_to_all_single(rows, torch.cat(sent), sizes, [t.shape[0] for t in sent], **options)
    for t, part in zip(received, rows.split(sizes), strict=True):
        t.copy_(part)


def debug_model(size: int, overrides: list[str], options: str = "") -> tuple[Any, Any, Any]:
    """The Llama 3 debug model on ``size`` ranks of tensor parallelism; see :func:`built`."""
    from torchtitan.models.llama3 import config_registry

    name = "llama3_debugmodel_dist_gemm" if overrides else "llama3_debugmodel"
    return built(getattr(config_registry, name)(), size, overrides, tensor=size, options=options)


def built(
    config: Any,
    size: int,
    overrides: list[str],
    *,
    tensor: int,
    experts: int = 1,
    options: str = "",
) -> tuple[Any, Any, Any]:
    """(model, context of a step, meshes); ``overrides`` as on the command line. ``options``: words
    of "compile", and "full" or "selective" activation checkpointing."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed import activation_checkpoint as checkpointing
    from torchtitan.distributed import compile as compilation

    backend = "spmd_types" if tensor == size else "partial_dtensor"
    config.parallelism.spmd_backend = backend
    config.parallelism.tensor_parallel_degree = tensor
    config.parallelism.expert_parallel_degree = experts
    config.parallelism.data_parallel_shard_degree = size // tensor
    config.training.seq_len = 16
    config.training.mixed_precision_param = "float32"
    keeps = {"full": checkpointing.FullAC, "selective": checkpointing.SelectiveAC}
    found = [kind.Config() for word, kind in keeps.items() if word in options]
    config.activation_checkpoint = found[0] if found else None
    config.compile.enable, config.compile.backend = "compile" in options, "aot_eager"
    compilation._maybe_regional_inductor_backend = lambda _, backend: backend
    model_config = config.model_spec.model
    model_config.layers = model_config.layers[:2]
    apply_overrides(OverrideConfig(imports=overrides), config)
    utils.set_spmd_backend(backend)
    meshes = ParallelDims.from_config(config.parallelism, size)
    meshes.build_mesh()
    model_config.update_from_config(config=config)
    torch.manual_seed(11)
    model = model_config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    if tensor == size:
        model.parallelize(meshes)
        if found:
            found[0].build(dump_folder="").apply(model)
        if config.compile.enable:
            compilation.apply_compile(model, compile_config=config.compile, parallel_dims=meshes)
    else:  # with FSDP
        config.model_spec.parallelize_fn(
            model,
            parallel_dims=meshes,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a sum
    return model, utils.get_spmd_context(parallel_dims=meshes), meshes


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def losses_of(model: Any, context: Any, meshes: Any) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of a few steps of SGD, and the gradients of the first."""
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types

    losses: list[float] = []
    gradients: list[torch.Tensor] = []
    for _ in range(STEPS):
        ids, labels, extra = IDS.clone(), IDS.clone(), {"positions": POSITIONS.clone()}
        masks = model.get_attention_masks(POSITIONS)
        with context():
            if meshes.spmd_backend == "spmd_types":
                ids, labels, extra = annotate_input_spmd_types(meshes, ids, labels, extra)
            extra["attention_masks"] = masks
            loss = model(ids, **extra).float().square().mean()
            loss.backward()
        with torch.no_grad():
            if not gradients:
                gradients = [local(p.grad).clone() for p in model.parameters()]
            for parameter in model.parameters():
                local(parameter).sub_(LEARNING_RATE * local(parameter.grad))
                parameter.grad = None
        losses.append(float(local(loss)))
    return losses, gradients


def trained(me: Member, options: str = "") -> dict[str, Any]:
    on_the_cpu()
    torch._dynamo.reset()
    stock = debug_model(me.world_size, [])
    ours = debug_model(me.world_size, ["tileweave.integrations.torchtitan.dist_gemm"], options)
    from tileweave.integrations import torchtitan as adapter

    assert stock[0].state_dict().keys() == ours[0].state_dict().keys()
    with torch.no_grad():
        for mine, theirs in zip(ours[0].parameters(), stock[0].parameters(), strict=True):
            local(mine).copy_(local(theirs))
    calls: list[str] = []
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        inner = getattr(adapter, name)
        setattr(adapter, name, lambda *a, n=name, f=inner, **k: (calls.append(n), f(*a, **k))[1])
    wanted, wanted_gradients = losses_of(*stock)
    found, gradients = losses_of(*ours)
    adapter.disable()
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)),
        "fell": wanted[-1] < wanted[0],
        "gradients": max(
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-9))
            for a, b in zip(gradients, wanted_gradients, strict=True)
        ),
        "calls": sorted(calls),
    }


@pytest.mark.parametrize("options", ["", "full", "compile selective"])
def test_debug_model_trains_with_the_same_losses(pair: World, options: str) -> None:
    """Also with activation checkpointing, and compiled, against the stock model without."""
    for found in pair.run(trained, options, timeout=SECONDS):
        assert found["fell"]
        assert found["losses"] < 1e-5 and found["gradients"] < 1e-5, found
        if options:  # calls are repeated, or traced
            assert set(found["calls"]) == {"all_gather_matmul", "matmul_reduce_scatter"}
            continue
        layers = 2 * STEPS  # qkv, out; gate with up, down
        assert found["calls"] == ["all_gather_matmul"] * 2 * layers + (
            ["matmul_reduce_scatter"] * 2 * layers
        )


EXPERTS = {
    "qwen3": ("qwen3_moe_debug", "debugmodel_moe"),
    "deepseek_v3": ("deepseek_v3_debugmodel", "debugmodel"),
    "gpt_oss": ("gpt_oss_debugmodel_flex", "debugmodel"),
}


def smaller(family: str) -> Any:
    """The configuration of a debug model with small experts."""
    registry = import_module(f"torchtitan.models.{family}.config_registry")
    config = getattr(registry, EXPERTS[family][0])()
    for layer in config.model_spec.model.layers:
        if layer.moe is not None:
            layer.moe.routed_experts.inner_experts.hidden_dim = 48
    return config


def trained_experts(me: Member, family: str, tensor: int, options: str = "") -> dict[str, Any]:
    """The experts of both compute in float32 in place of bfloat16: nothing hides in rounding."""
    from tileweave.integrations import _torchtitan_experts as adapter

    on_the_cpu()
    torch._dynamo.reset()
    size = me.world_size
    override = "tileweave.integrations.torchtitan.experts"
    stock = built(smaller(family), size, [], tensor=tensor, experts=size)
    ours = built(smaller(family), size, [override], tensor=tensor, experts=size, options=options)
    assert stock[0].state_dict().keys() == ours[0].state_dict().keys()
    with torch.no_grad():
        for mine, theirs in zip(ours[0].parameters(), stock[0].parameters(), strict=True):
            local(mine).copy_(local(theirs))
    calls: list[int] = []
    inner, to_bfloat16 = adapter.grouped_matmul_combine, torch.Tensor.bfloat16
    adapter.grouped_matmul_combine = lambda *a, **k: (calls.append(1), inner(*a, **k))[1]
    torch.Tensor.bfloat16, adapter.DTYPE = lambda t: t, torch.float32
    try:
        wanted, wanted_gradients = losses_of(*stock)
        assert not calls
        found, gradients = losses_of(*ours)
    finally:
        adapter.grouped_matmul_combine, torch.Tensor.bfloat16 = inner, to_bfloat16
        adapter.DTYPE = torch.bfloat16
    layers = sum(hasattr(block, "moe") for block in ours[0].layers.values())
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)),
        "fell": wanted[-1] < wanted[0],
        "gradients": max(
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-9))
            for a, b in zip(gradients, wanted_gradients, strict=True)
        ),
        "calls": len(calls) == STEPS * layers > 0 or (bool(options) and len(calls) > 0),
    }


@pytest.mark.parametrize(
    ("family", "ranks", "tensor", "options"),
    [
        ("qwen3", 2, 1, ""),
        ("qwen3", 2, 2, ""),
        ("qwen3", 2, 2, "full"),
        ("qwen3", 2, 2, "selective"),
        ("qwen3", 2, 2, "compile"),
        ("qwen3", 4, 2, ""),
        ("deepseek_v3", 2, 2, ""),
        ("gpt_oss", 2, 2, ""),
    ],
)
def test_debug_models_with_experts_train_with_the_same_losses(
    request: pytest.FixtureRequest, family: str, ranks: int, tensor: int, options: str
) -> None:
    """Experts over all ranks, after TP over ``tensor`` of them, and FSDP over the rest."""
    world: World = request.getfixturevalue("pair" if ranks == 2 else "four")
    for found in world.run(trained_experts, family, tensor, options, timeout=SECONDS):
        assert found["fell"] and found["calls"]
        assert found["losses"] < 1e-5 and found["gradients"] < 1e-5, found


def test_other_experts_stay_torchtitans(caplog: pytest.LogCaptureFixture) -> None:
    from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher

    from tileweave.integrations.torchtitan import experts

    on_the_cpu()
    config = smaller("qwen3").model_spec.model.layers[0].moe.routed_experts
    padded = TorchAOTokenDispatcher.Config(num_experts=8, top_k=2, pad_multiple=16)
    quantised = replace(config, token_dispatcher=padded)
    assert experts(quantised) is quantised
    assert "TorchAOTokenDispatcher" in caplog.text
    assert experts(config) is not config


def test_torchtitan_accepts_the_options_of_the_guide() -> None:
    """In a process of its own: overrides stay in effect."""
    guide = (ROOT / "docs" / "integrations" / "torchtitan.md").read_text("utf-8")
    commands = [
        block.code.replace("\\\n", " ").partition("-m torchtitan.train ")[2]
        for block in blocks_of(guide)
        if "-m torchtitan.train " in block.code
    ]
    assert len(commands) == 2
    parse = "import sys; from torchtitan.config.manager import ConfigManager as M; "
    for command in commands:
        script = f"{parse}print('takes', M().parse_args(sys.argv[1:]).override.imports)"
        run = subprocess.run(
            [sys.executable, "-c", script, *command.split()],
            env=environment_for("gloo", {}),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert "takes ['tileweave.integrations.torchtitan." in run.stdout, run.stdout + run.stderr
