"""tileweave.integrations.transformers against the unsplit model of transformers itself, in fp32."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.worlds import Member, World, environment_for

transformers = pytest.importorskip(
    "transformers", reason="pip install 'tileweave[transformers]'", exc_type=ImportError
)
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.distributed import tensor_parallel as tp  # noqa: E402

import tileweave.integrations.transformers as adapter  # noqa: E402
from tileweave.errors import InputError  # noqa: E402

transformers.logging.set_verbosity_error()
NAMES_EP = adapter.EPImplementationInterface is not None  # transformers 5.21 and newer

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with tied embeddings": ("Llama", {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral with gelu": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_act": "gelu"},
    ),
    "qwen3 moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek v3": (
        "DeepseekV3",
        MLA
        | {
            "num_key_value_heads": 4,
            "v_head_dim": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}
DENSE = [name for name in MODELS if name.startswith("llama")]
SPARSE = [name for name in MODELS if not name.startswith("llama")]
IDS = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def registry_is_restored() -> Iterator[None]:
    yield
    adapter.disable()


def whole_model(name: str, **more: Any) -> Any:
    """The unsplit model, with the same weights on every rank. ``more``: of its configuration."""
    prefix, options = MODELS[name]
    torch.manual_seed(0)
    sizes = SIZES if prefix != "DeepseekV3" else {k: v for k, v in SIZES.items() if k != "head_dim"}
    config = getattr(transformers, f"{prefix}Config")(**(sizes | options | more))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and sinks begin as zeros
            if parameter.abs().sum() == 0:
                parameter.normal_(std=0.1)
    return model


def saved(name: str, folder: str) -> Any:
    """The unsplit model, which rank 0 also writes to ``folder``."""
    model = whole_model(name)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def parallel_config(name: str, **options: Any) -> DistributedConfig:
    size = options.pop("tp_size", dist.get_world_size())
    if name in DENSE:
        return DistributedConfig(tp_size=size, tp_plan="auto", **options)
    if not NAMES_EP:
        return DistributedConfig(tp_size=size, enable_expert_parallel=True, **options)
    return DistributedConfig(
        **{"ep_implementation": "tileweave", "ep_size": size} | options, tp_size=size
    )


def load(name: str, folder: str, **options: Any) -> Any:
    kind = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")
    return kind.from_pretrained(folder, distributed_config=parallel_config(name, **options))


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b| / max |b|; the gradient of a bias of keys is 0, so small ones count from 1e-2."""
    a, b = whole(a).detach(), whole(b).detach()
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-2))


def trained(model: Any, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.train()
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss, {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def training_apart(model: Any, reference: Any, ids: torch.Tensor = IDS) -> dict[str, float]:
    """How far loss and gradients are from those of ``reference``."""
    loss, gradients = trained(model, ids)
    wanted_loss, wanted = trained(reference)
    assert gradients.keys() == wanted.keys()
    return {
        "loss": apart(loss, wanted_loss),
        "gradients": max(apart(gradients[n], wanted[n]) for n in wanted),
    }


def counted(calls: list[str]) -> None:
    """Note each call of an operator by an adapter in ``calls``."""
    from tileweave.parallel import experts

    def noting(module: Any, name: str) -> None:
        inner = getattr(module, name)
        inner = getattr(inner, "inner", inner)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*args, **kwargs)

        call.inner = inner  # type: ignore[attr-defined]
        setattr(module, name, call)

    noting(adapter, "matmul_all_reduce")
    noting(experts, "dispatch_grouped_matmul")


def used_in(model: Any, folder: str, reference: Any) -> dict[str, Any]:
    """Logits, generation, a training step, and a checkpoint, compared with ``reference``."""
    model.eval(), reference.eval()
    uneven = IDS[:, :7].reshape(-1)[:13].view(1, 13)
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["logits"] = apart(model(IDS).logits, reference(IDS).logits)
        found["logits of 13 tokens"] = apart(model(uneven).logits, reference(uneven).logits)
    options = {"max_new_tokens": 5, "do_sample": False}
    wanted = reference.generate(IDS, **options)
    found["generate"] = torch.equal(model.generate(IDS, **options), wanted)
    options["cache_implementation"] = "static"
    found["static"] = torch.equal(model.generate(IDS, **options), wanted)
    found |= training_apart(model, reference)
    model.save_pretrained(f"{folder}/again")
    dist.barrier()
    back = type(reference).from_pretrained(f"{folder}/again").state_dict()
    found["saved"] = max(apart(back[n], p) for n, p in reference.state_dict().items())
    return found


def assert_the_same(found: dict[str, Any]) -> None:
    assert found.pop("generate") and found.pop("static"), found
    assert found.pop("saved") == 0, found
    assert max(found.values()) < 1e-5, found


def one_line(me: Member, name: str, folder: str) -> tuple[dict[str, Any], list[str]]:
    reference = saved(name, folder)
    calls: list[str] = []
    counted(calls)
    adapter.enable()
    try:
        return used_in(load(name, folder), folder, reference), calls
    finally:
        adapter.disable()


@pytest.mark.parametrize("name", MODELS)
def test_model_computes_as_the_unsplit_one(pair: World, name: str, tmp_path: Path) -> None:
    for found, calls in pair.run(one_line, name, str(tmp_path), timeout=100):
        assert_the_same(found)
        # gpt-oss has no tensor-parallel plan; before 5.21 expert parallelism excludes it
        wanted = set() if name in DENSE else {"dispatch_grouped_matmul"}
        if name in DENSE or (NAMES_EP and name != "gpt-oss"):
            wanted.add("matmul_all_reduce")
        assert set(calls) == wanted


# --- What users combine it with ---


def with_lora(me: Member, folder: str) -> dict[str, Any]:
    from peft import LoraConfig, PeftModel, get_peft_model

    reference = saved("llama", folder)
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], lora_dropout=0.0)
    torch.manual_seed(3)
    reference = get_peft_model(reference, config)
    with torch.no_grad():
        for n, parameter in reference.named_parameters():
            if "lora_B" in n:  # begins as zeros
                parameter.normal_(std=0.1)
    if me.rank == 0:
        reference.save_pretrained(f"{folder}/adapter")
    dist.barrier()
    adapter.enable()
    try:  # PEFT takes the styles of its own layers from the registry, too
        base = load("llama", folder)
        model = PeftModel.from_pretrained(base, f"{folder}/adapter", is_trainable=True)
    finally:
        adapter.disable()
    found: dict[str, Any] = dict(training_apart(model, reference))
    model.eval(), reference.eval()
    made = [
        m.generate(input_ids=IDS, max_new_tokens=4, do_sample=False) for m in (model, reference)
    ]
    return found | {"generate": torch.equal(*made)}


def test_lora_trains_as_on_the_unsplit_model(pair: World, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="pip install peft")
    for found in pair.run(with_lora, str(tmp_path)):
        assert found.pop("generate"), found
        assert max(found.values()) < 1e-5, found


def compiled(me: Member, name: str, folder: str) -> dict[str, float]:
    reference = saved(name, folder)
    adapter.enable()
    try:
        model = load(name, folder)
    finally:
        adapter.disable()
    torch._dynamo.reset()
    whole_graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.eval(), reference.eval()
    with torch.no_grad():
        wanted = reference(IDS).logits
        found = {"logits": apart(whole_graph(IDS, use_cache=False).logits, wanted)}
    torch._dynamo.reset()
    model.train(), model.zero_grad()
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(
        input_ids=IDS, labels=IDS, use_cache=False
    ).loss
    loss.backward()
    _, gradients = trained(reference)
    found["loss"] = apart(loss, _)
    own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {"gradients": max(apart(own[n], gradients[n]) for n in gradients)}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_compiles_as_one_graph(pair: World, name: str, tmp_path: Path) -> None:
    for found in pair.run(compiled, name, str(tmp_path), timeout=100):
        assert max(found.values()) < 1e-5, found


def sharded_twice(me: Member, folder: str) -> dict[str, float]:
    reference = saved("llama", folder)
    adapter.enable()
    try:
        model = load("llama", folder, tp_size=2, fsdp_size=2)
    finally:
        adapter.disable()
    # FSDP averages over its ranks, of which each pair has one sample of the batch
    return training_apart(model, reference, IDS.chunk(2)[me.rank // 2])


def test_fsdp_and_tensor_parallelism(four: World, tmp_path: Path) -> None:
    if not NAMES_EP:
        pytest.skip("transformers before 5.21 has no FSDP with tensor parallelism")
    for found in four.run(sharded_twice, str(tmp_path), timeout=100):
        assert found["gradients"] < 1e-5, found


def own_batches(me: Member, folder: str, same: bool, most: int | None) -> dict[str, float]:
    """Expert parallelism over ranks that have samples of their own, of different lengths."""
    reference = saved("mixtral", folder)
    ids = IDS[me.rank : me.rank + 1, : 8 if same or me.rank else 5]
    adapter.enable(max_tokens=most)
    try:
        model = load("mixtral", folder, tp_size=1, fsdp_size=2, ep_size=2)
    finally:
        adapter.disable()
    model.eval(), reference.eval()
    with torch.no_grad():
        found = {"logits": apart(model(ids).logits, reference(ids).logits)}
    if same:
        found |= training_apart(model, reference, ids)
        del found["loss"]  # of this rank's sample alone
    return found


@pytest.mark.parametrize(
    ("same", "most"), [(True, None), (False, None), (False, 8)], ids=["same", "uneven", "bounded"]
)
def test_experts_of_ranks_with_other_tokens(
    pair: World, tmp_path: Path, same: bool, most: int | None
) -> None:
    if not NAMES_EP:
        pytest.skip("transformers before 5.21 has no expert parallelism across batches")
    for found in pair.run(own_batches, str(tmp_path), same, most):
        assert max(found.values()) < 1e-5, found


def from_two_to_four(me: Member, folder: str, size: int) -> float:
    """Logits of a checkpoint that another number of ranks wrote."""
    reference = whole_model("llama")
    adapter.enable()
    try:
        if size == 2:
            saved("llama", folder)
            load("llama", folder).save_pretrained(f"{folder}/two")
            return 0.0
        model = load("llama", f"{folder}/two", tp_size=2, fsdp_size=2)
    finally:
        adapter.disable()
    with torch.no_grad():
        return apart(model.eval()(IDS).logits, reference.eval()(IDS).logits)


def test_checkpoint_of_another_number_of_ranks(pair: World, four: World, tmp_path: Path) -> None:
    if not NAMES_EP:
        pytest.skip("transformers before 5.21 has no FSDP with tensor parallelism")
    pair.run(from_two_to_four, str(tmp_path), 2)
    assert max(four.run(from_two_to_four, str(tmp_path), 4)) < 1e-5


# --- On, off, and what it does not take ---


def switched(me: Member, folder: str) -> list[bool]:
    """Whether a model that is loaded calls tileweave: before, when enabled twice, after."""
    saved("llama", folder)
    calls: list[str] = []
    counted(calls)

    def uses() -> bool:
        model = load("llama", folder).eval()
        calls.clear()
        with torch.no_grad():
            model(IDS)
        return bool(calls)

    found = [uses()]
    adapter.enable()
    adapter.enable()
    found.append(uses())
    adapter.disable()
    return [*found, uses(), tp.ALL_PARALLEL_STYLES["rowwise"].__class__ is tp.RowwiseParallel]


def test_disable_restores_the_registry(pair: World, tmp_path: Path) -> None:
    assert pair.run(switched, str(tmp_path)) == [[False, True, False, True]] * 2


class Named:
    """A device mesh, as far as its names are asked for."""

    ndim, mesh_dim_names = 2, ("dp", "model")


def test_a_mesh_without_tp_is_refused() -> None:
    with pytest.raises(InputError, match="a mesh of 2 dimensions"):
        adapter.Rowwise().install_forward(torch.nn.Linear(4, 4), Named())


def test_experts_that_are_not_described_are_refused() -> None:
    from tileweave.integrations._experts import ExpertParallel

    with pytest.raises(InputError, match="use_experts_implementation"):
        ExpertParallel(torch.nn.Linear(4, 4), None, None)  # type: ignore[arg-type]


def kept_stock(me: Member, what: str) -> tuple[list[str], float]:
    """The warnings of a layer that the operator does not take, and its error."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (me.world_size,))
    torch.manual_seed(0)
    features = 7 if what == "uneven" else 8
    layer = torch.nn.Linear(features, 4, dtype=torch.float64 if what == "float64" else None)
    wanted = torch.nn.Linear(features, 4, dtype=layer.weight.dtype)
    wanted.load_state_dict(layer.state_dict())
    if what == "quantised":
        layer._hf_quantized_needs_local_tp = True
    style, said = adapter.Rowwise(), []
    adapter._SETTINGS.warned.clear()
    adapter._LOG.warning = lambda text, *args: said.append(text % args)  # type: ignore[method-assign]
    try:
        for name in ("weight", "bias"):
            shape = layer._parameters[name]
            style.shard_param(layer, name, mesh)
            with torch.no_grad():
                sharded = torch.distributed.tensor.distribute_tensor(
                    shape.detach(), mesh, layer._parameters[name].placements
                )
                layer._parameters[name].copy_(sharded)
        style.install_forward(layer, mesh)
        x = torch.randn(3, features, dtype=layer.weight.dtype)
        dist.broadcast(x, 0)
        own = x.tensor_split([4 if features == 7 else features // 2], 1)[me.rank]
        with torch.no_grad():
            return said, apart(layer(own), wanted(x))
    finally:
        del adapter._LOG.warning


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("quantised", "it is quantised"),
        ("uneven", "its 7 input features over 2 ranks are uneven"),
        ("float64", "its weight is not float16, bfloat16 or float32"),
    ],
)
def test_other_layers_keep_the_forward_of_transformers(pair: World, what: str, reason: str) -> None:
    if what == "uneven" and not NAMES_EP:
        pytest.skip("transformers before 5.21 shards evenly only")
    for said, error in pair.run(kept_stock, what):
        assert said == [f"rowwise Linear keeps the forward of transformers: {reason}"]
        assert error < 1e-5


# --- The kernels themselves ---


def generated(me: Member, name: str, folder: str) -> bool:
    reference = saved(name, folder).eval()
    adapter.enable()
    try:
        model = load(name, folder).eval()
    finally:
        adapter.disable()
    ids = IDS[:1, :3]
    made = [m.generate(ids, max_new_tokens=2, do_sample=False) for m in (model, reference)]
    return torch.equal(*made)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_interpreted_kernels_generate_the_same(
    interpreted: World, name: str, tmp_path: Path
) -> None:
    assert interpreted.run(generated, name, str(tmp_path), timeout=100) == [True, True]


# --- Examples ---


@pytest.mark.parametrize("name", ["llama_inference.py", "llama_lora.py"])
def test_example(name: str) -> None:
    if name == "llama_lora.py":
        pytest.importorskip("peft", reason="pip install peft")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *(f"--master-port={free_port()}", str(root / "examples" / name)),
        ],
        env=environment_for("gloo", {"TRITON_INTERPRET": "0"}),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == (10 if name == "llama_lora.py" else 1)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
