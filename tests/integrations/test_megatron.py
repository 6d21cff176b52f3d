"""tileweave.integrations.megatron against the layers of Megatron-core, on the CPU in fp32.

Megatron-core needs a GPU for three things, which have stand-ins here: the generator that forks, the
current device, and a norm that knows sequence parallelism.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from tests.support.worlds import Member, World

from tileweave.errors import InputError

pytest.importorskip(
    "megatron.core", reason="pip install 'tileweave[megatron]'", exc_type=ImportError
)

pytestmark = pytest.mark.timeout(300)
SECONDS = 240  # of a job: the first one imports Megatron-core, which takes long on a busy machine
IDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
MASK = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)[None, None]


class NoGenerator:
    def fork(self, *args: Any, **options: Any) -> Any:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


class Norm(torch.nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def on_the_cpu(tensor: int, expert: int = 1) -> None:
    """Stand-ins, and groups of these sizes."""
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401 - patched below
    import megatron.core.transformer.transformer_block as block
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    for module in list(sys.modules.values()):
        if hasattr(module, "get_cuda_rng_tracker") and "megatron" in module.__name__:
            module.get_cuda_rng_tracker = lambda *_, **__: NoGenerator()  # type: ignore[attr-defined]
    block.LayerNormImpl = Norm
    layers._grad_accum_fusion_available = True
    moe_utils.te_general_gemm = None  # without Transformer Engine the name is missing
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
    )


def with_norms(spec: Any) -> Any:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if isinstance(spec, ModuleSpec):
        spec.module = with_norms(spec.module)
        if spec.submodules is not None:
            for name, part in vars(spec.submodules).items():
                setattr(spec.submodules, name, with_norms(part))
        return spec
    return Norm if spec is WrappedTorchNorm else spec


def gpt(
    spec: Any,
    size: int,
    sequence_parallel: bool,
    biases: bool,
    fused: bool = False,
    **experts: Any,
) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(3)
    options: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=fused,
        add_bias_linear=biases,
        persist_layer_norm=False,
    )
    config = TransformerConfig(**(options | experts))
    return GPTModel(
        config,
        with_norms(spec),
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
        parallel_output=True,
    )


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(IDS, torch.arange(8).expand(2, 8), MASK, labels=IDS).mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compared(me: Member, sequence_parallel: bool, biases: bool) -> dict[str, Any]:
    on_the_cpu(me.world_size)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tileweave.integrations import megatron as adapter
    from tileweave.integrations._megatron_experts import _WARNED

    stock = gpt(get_gpt_layer_local_spec(), me.world_size, sequence_parallel, biases)
    ours = gpt(adapter.get_gpt_layer_spec(), me.world_size, sequence_parallel, biases)
    ours.load_state_dict(stock.state_dict(), strict=False)
    (wanted_loss, wanted), (loss, gradients) = step(stock), step(ours)
    assert wanted.keys() == gradients.keys()
    kinds = (adapter.ColumnParallelLinear, adapter.RowParallelLinear)
    return {
        "loss": float((loss - wanted_loss).abs()),
        "gradients": max(float((gradients[n] - wanted[n]).abs().max()) for n in wanted),
        "layers": sum(isinstance(m, kinds) for m in ours.modules()),
        "kept": sorted(_WARNED),
        "shards": shards_of(ours) == shards_of(stock),
    }


def shards_of(model: Any) -> dict[str, Any]:
    """What a checkpoint says about each parameter."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    kept = ("global_shape", "local_shape", "global_offset", "replica_id")
    return {n: tuple(getattr(t, what, None) for what in kept) for n, t in state.items()}


@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_gpt_trains_as_megatron(pair: World, sequence_parallel: bool, biases: bool) -> None:
    for found in pair.run(compared, sequence_parallel, biases, timeout=SECONDS):
        assert found["layers"] == 8 and found["shards"] and not found["kept"], found
        assert found["loss"] < 1e-5 and found["gradients"] < 1e-5, found


def accumulated(me: Member, sequence_parallel: bool) -> dict[str, Any]:
    """Two micro-batches, with gradients of weights added to ``main_grad``: of all layers, or of
    those that end in an all-reduce."""
    on_the_cpu(me.world_size)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tileweave.integrations import megatron as adapter

    stock = gpt(get_gpt_layer_local_spec(), me.world_size, sequence_parallel, False)
    ours = gpt(adapter.get_gpt_layer_spec(), me.world_size, sequence_parallel, False, fused=True)
    ours.output_layer.gradient_accumulation_fusion = False  # Megatron's own needs Apex
    ending = ("linear_proj.weight", "linear_fc2.weight")
    for layer in ours.modules():
        if isinstance(layer, adapter.ColumnParallelLinear) and not sequence_parallel:
            layer.gradient_accumulation_fusion = False  # the forward is Megatron's own, too
    ours.load_state_dict(stock.state_dict(), strict=False)
    fused = {
        n: p
        for n, p in ours.named_parameters()
        if "linear" in n and p.ndim == 2 and (sequence_parallel or n.endswith(ending))
    }
    hooks: list[str] = []
    for n, p in fused.items():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        p.grad_added_to_main_grad = False
        p.register_post_accumulate_grad_hook(lambda _, n=n: hooks.append(n))
    for _ in range(2):
        step(stock), step(ours)
    wanted = dict(stock.named_parameters())
    return {
        "weights": len(fused),
        "hooks": len(hooks),
        "told": all(p.grad_added_to_main_grad for p in fused.values()),
        "apart": max(float((p.main_grad - wanted[n].grad).abs().max()) for n, p in fused.items()),
        "others": max(
            float((p.grad - wanted[n].grad).abs().max())
            for n, p in ours.named_parameters()
            if n not in fused
        ),
    }


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_are_added_to_main_grad(pair: World, sequence_parallel: bool) -> None:
    for found in pair.run(accumulated, sequence_parallel, timeout=SECONDS):
        weights = 8 if sequence_parallel else 4
        assert found["weights"] == weights and found["hooks"] == 2 * weights, found
        assert found["told"], found
        assert found["apart"] < 1e-5 and found["others"] < 1e-5, found


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.01,
    "moe_shared_expert_intermediate_size": 32,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}
TOP_1 = {
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "activation_func": torch.nn.functional.gelu,
}
DROPS = {"moe_expert_capacity_factor": 0.5}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 2}
SIGMOID |= {"moe_router_group_topk": 1, "moe_router_load_balancing_type": "none"}


def experts_compared(me: Member, tensor: int, options: dict[str, Any]) -> dict[str, Any]:
    """Layers with experts: losses and gradients, of two batches."""
    on_the_cpu(tensor, 2)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tileweave.integrations import megatron as adapter
    from tileweave.integrations._megatron_experts import _WARNED

    _WARNED.clear()
    options = EXPERTS | options
    stock = gpt(get_gpt_layer_local_spec(num_experts=4), tensor, tensor > 1, False, **options)
    ours = gpt(adapter.get_gpt_layer_spec(num_experts=4), tensor, tensor > 1, False, **options)
    ours.load_state_dict(stock.state_dict(), strict=False)
    apart = 0.0
    for variable in (False, True):
        for layer in ours.modules():
            if isinstance(layer, adapter.MoELayer):
                layer.config.variable_seq_lengths = variable
        (wanted_loss, wanted), (loss, gradients) = step(stock), step(ours)
        assert wanted.keys() == gradients.keys()
        apart = max(apart, float((loss - wanted_loss).abs()))
        apart = max(apart, *(float((gradients[n] - wanted[n]).abs().max()) for n in wanted))
    return {
        "apart": apart,
        "layers": sum(isinstance(m, adapter.MoELayer) for m in ours.modules()),
        "kept": sorted(_WARNED),
        "shards": shards_of(ours) == shards_of(stock),
    }


@pytest.mark.parametrize("tensor", [1, 2], ids=["ep", "tp_ep"])
@pytest.mark.parametrize("options", [{}, TOP_1, DROPS, SIGMOID])
def test_experts_train_as_megatron(pair: World, tensor: int, options: dict[str, Any]) -> None:
    for found in pair.run(experts_compared, tensor, options, timeout=SECONDS):
        assert found["layers"] == 2 and found["shards"] and not found["kept"], found
        assert found["apart"] < 1e-5, found


def test_other_experts_keep_megatron(pair: World) -> None:
    options = TOP_1 | {"moe_apply_probs_on_input": True}
    for found in pair.run(experts_compared, 1, options, timeout=SECONDS):
        assert any("moe_apply_probs_on_input" in text for text in found["kept"]), found
        assert found["apart"] == 0.0, found


def grouped(me: Member) -> dict[str, Any]:
    """Experts in two parameters, which Megatron-core multiplies on GPUs only: against the same
    experts one by one."""
    on_the_cpu(1, 2)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import experts as moe

    from tileweave.integrations import megatron as adapter
    from tileweave.integrations._megatron_experts import _WARNED

    _WARNED.clear()
    moe.gg.assert_grouped_gemm_is_available = lambda: None
    spec = adapter.get_gpt_layer_spec(num_experts=4, moe_grouped_gemm=True)
    stock = gpt(get_gpt_layer_local_spec(num_experts=4), 1, False, False, **EXPERTS)
    ours = gpt(spec, 1, False, False, **EXPERTS, moe_grouped_gemm=True)
    ours.load_state_dict(stock.state_dict(), strict=False)
    layers = [
        [m.experts for m in model.modules() if hasattr(m, "experts")] for model in (ours, stock)
    ]
    pairs = list(zip(*layers, strict=True))
    for mine, theirs in pairs:
        for weight, name in ((mine.weight1, "linear_fc1"), (mine.weight2, "linear_fc2")):
            parts = [getattr(e, name).weight.t() for e in theirs.local_experts]
            weight.data.copy_(torch.stack(parts).view(weight.shape))
    (wanted, _), (loss, _) = step(stock), step(ours)
    apart = float((loss - wanted).abs())
    for mine, theirs in pairs:
        for weight, name in ((mine.weight1, "linear_fc1"), (mine.weight2, "linear_fc2")):
            parts = [getattr(e, name).weight.grad.t() for e in theirs.local_experts]
            apart = max(
                apart, float((weight.grad - torch.stack(parts).view_as(weight)).abs().max())
            )
    return {"apart": apart, "layers": len(pairs), "kept": sorted(_WARNED)}


def test_grouped_experts(pair: World) -> None:
    for found in pair.run(grouped, timeout=SECONDS):
        assert found["layers"] == 2 and not found["kept"] and found["apart"] < 1e-5, found


def test_a_specification_without_local_layers_is_refused() -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from tileweave.integrations.megatron import with_tileweave

    with pytest.raises(InputError, match="local layers"):
        with_tileweave(ModuleSpec(module=torch.nn.Linear))
