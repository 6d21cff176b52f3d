"""torchtitan's Llama 3 debug model in two pipeline stages of two tensor-parallel ranks each, with
tileweave.integrations.torchtitan and without.

torchtitan 0.3 calls a schedule of a newer torch than 2.13: here micro-batches are given to the
schedule directly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.worlds import Member, World

pytest.importorskip(
    "torchtitan", reason="pip install 'tileweave[torchtitan]'", exc_type=ImportError
)
from tests.integrations import test_torchtitan as titan

pytestmark = pytest.mark.timeout(540)


def staged(overrides: list[str]) -> tuple[Any, Any, Any]:
    """(schedule, stage of this rank, meshes)."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import config_registry

    name = "llama3_debugmodel_dist_gemm" if overrides else "llama3_debugmodel"
    config = getattr(config_registry, name)()
    parallelism, training = config.parallelism, config.training
    parallelism.spmd_backend = "spmd_types"
    parallelism.tensor_parallel_degree = parallelism.pipeline_parallel_degree = 2
    parallelism.data_parallel_shard_degree = parallelism.expert_parallel_degree = 1
    parallelism.pipeline_parallel_microbatch_size = 1
    parallelism.pipeline_parallel_schedule = "1F1B"
    parallelism.pipeline_parallel_first_stage_less_layers = 0
    parallelism.pipeline_parallel_last_stage_less_layers = 0
    training.seq_len, training.local_batch_size = 16, 2
    training.mixed_precision_param = "float32"
    model_config = config.model_spec.model
    model_config.layers = model_config.layers[:2]
    apply_overrides(OverrideConfig(imports=overrides), config)
    utils.set_spmd_backend("spmd_types")
    meshes = ParallelDims.from_config(parallelism, 4)
    meshes.build_mesh()
    model_config.update_from_config(config=config)
    torch.manual_seed(11)
    model = model_config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))

    def parallelize(part: Any, **_: Any) -> Any:
        part.parallelize(meshes)
        return part

    def loss(prediction: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return prediction.float().square().mean(), {}

    schedule, (part,), _, _ = pipeline_llm(
        model,
        parallel_dims=meshes,
        training=training,
        parallelism=parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=model_config,
        parallelize_fn=parallelize,
        loss_fn=loss,
    )
    return schedule, part, meshes


def losses_of(
    schedule: Any, part: Any, meshes: Any
) -> tuple[list[list[float]], list[torch.Tensor]]:
    """The losses of the micro-batches of two steps of SGD, on the last stage, and the gradients of
    the first step."""
    from torchtitan.distributed import utils
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types

    last, stage = schedule._stage.is_last, schedule._stage
    context = utils.get_spmd_context(parallel_dims=meshes)
    found: list[list[float]] = []
    gradients: list[torch.Tensor] = []
    for _ in range(2):
        inputs, options, targets, losses = [], [], [], []
        with context():
            for at in (slice(0, 1), slice(1, 2)):
                positions = titan.POSITIONS[at].clone()
                masks = part.get_attention_masks(positions)
                ids, labels, extra = annotate_input_spmd_types(
                    meshes,
                    titan.IDS[at].clone(),
                    titan.IDS[at].clone(),
                    {"positions": positions},
                )
                inputs.append((ids,))
                targets.append(labels)
                options.append({**extra, "attention_masks": masks})
            stage.has_backward = True
            stage.clear_runtime_states()
            schedule._step_microbatches(
                inputs if stage.is_first else None,
                options,
                targets if last else None,
                losses if last else None,
            )
        with torch.no_grad():
            parameters = list(part.parameters())
            gradients = gradients or [titan.local(p.grad).clone() for p in parameters]
            for parameter in parameters:
                titan.local(parameter).sub_(titan.LEARNING_RATE * titan.local(parameter.grad))
                parameter.grad = None
        found.append([float(titan.local(loss).detach()) for loss in losses])
    return found, gradients


def trained(me: Member) -> dict[str, Any]:
    import tileweave as tw
    from tileweave.integrations import torchtitan as adapter

    titan.on_the_cpu()
    stock = staged([])
    ours = staged(["tileweave.integrations.torchtitan.dist_gemm"])
    with torch.no_grad():
        for mine, theirs in zip(ours[1].parameters(), stock[1].parameters(), strict=True):
            titan.local(mine).copy_(titan.local(theirs))
    calls: list[str] = []
    before = {}
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        before[name] = inner = getattr(adapter, name)
        setattr(adapter, name, lambda *a, n=name, f=inner, **k: (calls.append(n), f(*a, **k))[1])
    try:
        wanted, wanted_gradients = losses_of(*stock)
        assert not calls
        found, gradients = losses_of(*ours)
    finally:
        for name, inner in before.items():
            setattr(adapter, name, inner)
        adapter.disable()
        tw.close()
    return {
        "last": stock[0]._stage.is_last,
        "losses": (found, wanted),
        "gradients": max(
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-9))
            for a, b in zip(gradients, wanted_gradients, strict=True)
        ),
        "calls": set(calls),
    }


def test_pipeline_stages_train_with_the_same_losses(four: World) -> None:
    results = four.run(trained, timeout=titan.SECONDS)
    assert [found["last"] for found in results] == [False, False, True, True]
    for result in results:
        found, wanted = (torch.tensor(part) for part in result["losses"])
        assert found.shape == ((2, 2) if result["last"] else (2, 0))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
        assert result["gradients"] < 1e-5, result
        assert result["calls"] == {"all_gather_matmul", "matmul_reduce_scatter"}
