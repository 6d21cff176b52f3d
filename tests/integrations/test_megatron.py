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


def on_the_cpu(size: int) -> None:
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401 - patched below
    import megatron.core.transformer.transformer_block as block
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    for module in list(sys.modules.values()):
        if hasattr(module, "get_cuda_rng_tracker") and "megatron" in module.__name__:
            module.get_cuda_rng_tracker = lambda *_, **__: NoGenerator()  # type: ignore[attr-defined]
    block.LayerNormImpl = Norm
    layers._grad_accum_fusion_available = True
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


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


def gpt(spec: Any, size: int, sequence_parallel: bool, biases: bool, fused: bool = False) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(3)
    config = TransformerConfig(
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
        "kept": sorted(adapter._WARNED),
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


def accumulated(me: Member) -> dict[str, Any]:
    """Two micro-batches, with gradients of weights added to ``main_grad``."""
    on_the_cpu(me.world_size)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tileweave.integrations import megatron as adapter

    stock = gpt(get_gpt_layer_local_spec(), me.world_size, True, False)
    ours = gpt(adapter.get_gpt_layer_spec(), me.world_size, True, False, fused=True)
    ours.output_layer.gradient_accumulation_fusion = False  # Megatron's own needs Apex
    ours.load_state_dict(stock.state_dict(), strict=False)
    fused = {
        n: p
        for n, p in ours.named_parameters()
        if "linear" in n and "norm" not in n and p.ndim == 2
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


def test_gradients_are_added_to_main_grad(pair: World) -> None:
    for found in pair.run(accumulated, timeout=SECONDS):
        assert found["weights"] == 8 and found["hooks"] == 16 and found["told"], found
        assert found["apart"] < 1e-5 and found["others"] < 1e-5, found


def test_a_specification_without_local_layers_is_refused() -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from tileweave.integrations.megatron import with_tileweave

    with pytest.raises(InputError, match="local layers"):
        with_tileweave(ModuleSpec(module=torch.nn.Linear))
