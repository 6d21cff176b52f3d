"""tileweave.integrations.torchtitan against torchtitan's own tensor and sequence parallelism.

torchtitan trains on GPUs. Here its debug model runs on the CPU with three stand-ins: the device,
an attention that has a backward on the CPU, and no FSDP, which wants a data-parallel mesh.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.worlds import Member, World

pytest.importorskip(
    "torchtitan", reason="pip install 'tileweave[torchtitan]'", exc_type=ImportError
)

STEPS, LEARNING_RATE = 3, 0.1
IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(16).expand(2, 16).contiguous()


def on_the_cpu() -> None:
    """Let torchtitan run without a GPU."""
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
        return y, SimpleNamespace(lse=None, max_scores=None)

    for name in ("compiled_flex_attn", "_compiled_flex_attn"):
        setattr(attention.FlexAttention, name, staticmethod(causal))


def debug_model(size: int, overrides: list[str]) -> tuple[Any, Any, Any]:
    """(model, context of a step, meshes); ``overrides`` as on the command line."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.llama3 import config_registry

    name = "llama3_debugmodel_dist_gemm" if overrides else "llama3_debugmodel"
    config = getattr(config_registry, name)()
    config.parallelism.spmd_backend = "spmd_types"
    config.parallelism.tensor_parallel_degree = size
    config.parallelism.data_parallel_shard_degree = 1
    config.training.seq_len = 16
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint = None
    model_config = config.model_spec.model
    model_config.layers = model_config.layers[:2]
    apply_overrides(OverrideConfig(imports=overrides), config)
    utils.set_spmd_backend("spmd_types")
    meshes = ParallelDims.from_config(config.parallelism, size)
    meshes.build_mesh()
    model_config.update_from_config(config=config)
    torch.manual_seed(11)
    model = model_config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    model.parallelize(meshes)
    return model, utils.get_spmd_context(parallel_dims=meshes), meshes


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def losses_of(model: Any, context: Any, meshes: Any) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of a few steps of SGD, and the gradients of the first."""
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types

    losses: list[float] = []
    gradients: list[torch.Tensor] = []
    for _ in range(STEPS):
        with context():
            extra = {"positions": POSITIONS.clone()}
            ids, _, extra = annotate_input_spmd_types(meshes, IDS.clone(), IDS.clone(), extra)
            extra["attention_masks"] = model.get_attention_masks(POSITIONS)
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


def trained(me: Member) -> dict[str, Any]:
    on_the_cpu()
    stock = debug_model(me.world_size, [])
    ours = debug_model(me.world_size, ["tileweave.integrations.torchtitan.dist_gemm"])
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


def test_debug_model_trains_with_the_same_losses(pair: World) -> None:
    for found in pair.run(trained, timeout=110):
        assert found["fell"]
        assert found["losses"] < 1e-5 and found["gradients"] < 1e-5, found
        layers = 2 * STEPS  # qkv, out; gate with up, down
        assert found["calls"] == ["all_gather_matmul"] * 2 * layers + (
            ["matmul_reduce_scatter"] * 2 * layers
        )
