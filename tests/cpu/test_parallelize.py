"""tw.parallelize and its styles: models over two ranks against the whole model, in the all-reduce
and the sequence-parallel form."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.calls import refusal, run_either
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

import tileweave as tw
from tileweave.parallel import join_projections

FORMS = pytest.mark.parametrize("sequence", [False, True], ids=["all-reduce", "sequence"])


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


class Attention(nn.Module):
    """As in transformers: shapes come from the input."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=True)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=True)
        self.q_norm = nn.RMSNorm(head_dim)

    def forward(self, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(shape).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = scaled_dot_product_attention(self.q_norm(q), k, v, enable_gqa=True, scale=scale)
        return self.o_proj(y.transpose(1, 2).reshape(*shape[:-2], -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.LayerNorm(hidden)
        self.self_attn, self.mlp = Attention(hidden, 4, 2, 4), MLP(hidden, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(hidden_states=self.norm1(x), scale=0.5)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A decoder, whose head has the weight of the embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.layers = nn.ModuleList(Layer(16) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def model(layers: int = 2) -> Model:
    return filled(lambda: Model(layers))


def filled(make: Callable[[], Any]) -> Any:
    """What ``make`` returns, with the same random parameters on every rank, none of them zero."""
    torch.manual_seed(0)
    made = make()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def ids_of(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 12, (2, 6), generator=torch.Generator().manual_seed(seed))


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def compare(part: nn.Module, reference: nn.Module, call: Any = None) -> None:
    """Results and gradients of both, on the same ids."""
    y, want = (part if call is None else call)(ids_of()), reference(ids_of())
    assert_near(y, want, 1e-4, 1e-5, "y")
    for result in (y, want):
        result.square().mean().backward()
    gradients(part, reference)


def train_alike(part: Any, reference: Any, y: Any, want: Any, near: float) -> None:
    """Results ``y`` and ``want`` of both, and their gradients, also of layers that were split."""
    assert_near(y, want, 1e-4, 1e-5, "y")
    for m, result in ((part, y), (reference, want)):
        m.zero_grad()
        result.square().mean().backward()
    found = join_projections(part, {name: p.grad for name, p in part.named_parameters()})
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None, name
        assert_near(whole(found[name]), parameter.grad, 1e-4, near, name)


def gradients(part: nn.Module, reference: nn.Module) -> None:
    wanted = dict(reference.named_parameters())
    assert [name for name, _ in part.named_parameters()] == list(wanted)
    for name, parameter in part.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.grad is not None and wanted[name].grad is not None, name
        assert_near(whole(parameter.grad), wanted[name].grad, 1e-4, 1e-5, name)


def over_ranks(me: Member, sequence: bool) -> None:
    part, reference = model(), model()
    tw.parallelize(part, plan="auto", sequence_parallel=sequence)
    assert part.head.weight is part.embed.weight
    assert part.layers[0].mlp.up_proj.weight.to_local().shape == (12, 16)
    compare(part, reference)
    norms = [float(whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1))) for m in (part, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for m in (part, reference):
        torch.optim.AdamW(m.parameters(), 0.01).step()
        m.zero_grad()
    compare(part, reference)
    state = {name: whole(t) for name, t in part.state_dict().items()}
    other = model()
    other.load_state_dict(state)
    part.load_state_dict(model().state_dict())
    assert_near(part(ids_of()), model()(ids_of()), 1e-4, 1e-5, "loaded whole weights")


@FORMS
def test_a_model_over_ranks(world: World, sequence: bool) -> None:
    run_either(world, False, over_ranks, sequence)


def compiled(me: Member, sequence: bool) -> None:
    part = tw.parallelize(model(1), sequence_parallel=sequence)
    compare(part, model(1), torch.compile(part, backend="aot_eager", fullgraph=True))


@FORMS
def test_a_compiled_model_is_one_graph(world: World, sequence: bool) -> None:
    run_either(world, False, compiled, sequence)


class CheckedMLP(nn.Module):
    """With a checkpoint around it. torch 2.13 cannot compile one around an attention of DTensors in
    one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), MLP(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = checkpoint(lambda: self.mlp(self.norm(x)), use_reentrant=False)
        return x + y


def compiled_with_checkpoints(me: Member, sequence: bool) -> None:
    """Layers that share an input note it, which the compiler must be told not to repeat."""
    part, reference = model(1), model(1)
    for one in (part, reference):
        torch.manual_seed(0)
        one.layers = nn.ModuleList(CheckedMLP() for _ in range(2))
    tw.parallelize(part, sequence_parallel=sequence)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        compare(part, reference, torch.compile(part, backend="aot_eager", fullgraph=True))


@FORMS
def test_a_compiled_model_has_checkpoints(world: World, sequence: bool) -> None:
    run_either(world, False, compiled_with_checkpoints, sequence)


@FORMS
def test_a_model_over_ranks_with_fused_kernels(world: World, sequence: bool) -> None:
    world.run(fused_kernels, sequence)


def fused_kernels(me: Member, sequence: bool) -> None:
    part = tw.parallelize(model(), plan="auto", sequence_parallel=sequence)
    compare(part, model())


def with_data_parallelism(me: Member, sequence: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part, reference = model(), model()
    tw.parallelize(part, mesh, sequence_parallel=sequence)  # the dimension named "tp"
    for layer in part.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(part, mesh=mesh["dp"])
    part(ids_of(mesh.get_local_rank("dp"))).square().mean().backward()
    (sum(reference(ids_of(r)).square().mean() for r in range(2)) / 2).backward()
    gradients(part, reference)


@FORMS
def test_fully_sharded_in_the_other_dimension(worlds: Worlds, sequence: bool) -> None:
    run_either(worlds("gloo", 4), False, with_data_parallelism, sequence)


# --- Layers that compute several projections ---


class FusedMLP(nn.Module):
    """``halves``: gate and up are the halves of one output; else its even and odd features."""

    def __init__(self, hidden: int, inner: int, halves: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * inner)
        self.down_proj, self.halves = nn.Linear(inner, hidden), halves
        self.dropout = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate_up_proj(x)
        gate, up = y.chunk(2, -1) if self.halves else (y[..., ::2], y[..., 1::2])
        return self.down_proj(silu(gate) * self.dropout(up))


class FusedAttention(nn.Module):
    """Takes the number of heads from shapes, with as many queries as keys in each group."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.share, self.head = heads // kv_heads, head_dim
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * head_dim)
        self.out = nn.Linear(heads * head_dim, hidden)

    def forward(self, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
        y = self.qkv(hidden_states).unflatten(-1, (-1, self.head)).transpose(1, 2)
        kv_heads = y.shape[1] // (self.share + 2)
        q, k, v = y.split([self.share * kv_heads, kv_heads, kv_heads], 1)
        z = scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=scale)
        return self.out(z.transpose(1, 2).flatten(2))


def fused_model(halves: bool = True) -> Model:
    torch.manual_seed(0)
    made = Model(2)
    for layer in made.layers:
        layer.mlp, layer.self_attn = FusedMLP(16, 12, halves), FusedAttention(16, 4, 2, 4)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.eval()


PARTS = {"q": 16, "k": 8, "v": 8}
PLAN = {
    "layers.*.mlp.gate_up_proj": "colwise",
    "layers.*.self_attn.qkv": tw.parallel.Colwise(parts=PARTS),
    "layers.*.self_attn.out": "rowwise",
}


def split_layers(me: Member) -> None:
    """The same results and gradients, also after weights of the whole model are loaded; a
    state_dict that has its names and tensors."""
    part, reference = tw.parallelize(fused_model(), plan=dict(PLAN)), fused_model()
    assert part.layers[0].self_attn.qkv.k.weight.to_local().shape == (4, 16)
    for _ in range(2):
        y, want = part(ids_of()), reference(ids_of())
        assert_near(y, want, 1e-4, 1e-5, "y")
        for result in (y, want):
            result.square().mean().backward()
        found = {name: p.grad for name, p in part.named_parameters()}
        found = tw.parallel.join_projections(part, found)
        wanted = dict(reference.named_parameters())
        assert found.keys() == wanted.keys()
        for name, grad in found.items():
            assert_near(whole(grad), wanted[name].grad, 1e-4, 1e-5, name)
        halved = {name: 0.5 * t for name, t in reference.state_dict().items()}
        for m in (part, reference):
            m.zero_grad()
            m.load_state_dict(halved)
    state = part.state_dict()
    assert state.keys() == halved.keys()
    assert all(torch.equal(whole(t), halved[name]) for name, t in state.items())


def test_projections_of_one_layer_are_split(world: World) -> None:
    run_either(world, False, split_layers)


def split_refused(me: Member) -> list[str]:
    mixed = fused_model(halves=False)
    before = [name for name, _ in mixed.named_parameters()]
    mlp = {"layers.*.mlp.gate_up_proj": "colwise"}
    parts = tw.parallel.Colwise(parts={"q": 16, "kv": 15})
    equal = {**PLAN, "layers.*.self_attn.qkv": "colwise"}
    found = [
        refusal(tw.parallelize, mixed, None, mlp),
        refusal(tw.parallelize, fused_model(), check=False),
        refusal(tw.parallelize, fused_model(), None, equal, check=False),
        refusal(tw.parallelize, fused_model(), None, {"layers.*.self_attn.qkv": parts}),
        refusal(tw.parallelize, fused_model(), None, {"layers.*.qkv": tw.parallel.Colwise()}),
        refusal(
            fused_model_of_part().load_state_dict, {"mlp.gate_up_proj.weight": torch.ones(3, 16)}
        ),
    ]
    assert [name for name, _ in mixed.named_parameters()] == before, "changed before it was refused"
    return found


def fused_model_of_part() -> nn.Module:
    model = nn.ModuleDict({"mlp": FusedMLP(16, 12)})
    return tw.parallelize(model)


SPLIT_NAMED = (
    "layers.0.mlp.gate_up_proj, which computes several",
    "layers.0.self_attn.qkv, which computes several",
    "layers.0.self_attn.qkv, which computes several",
    "layers.0.self_attn.qkv: parts {'q': 16, 'kv': 15} of 32",
    "layers.0.self_attn.qkv, which computes several",
    "mlp.gate_up_proj.weight with 3 output features",
)


def test_layers_that_cannot_be_split_are_named(world: World) -> None:
    for errors in run_either(world, False, split_refused):
        for error, named in zip(errors, SPLIT_NAMED, strict=True):
            assert error.startswith("InputError: asked:") and named in error, (named, error)


# --- Plans ---


def other_plans(me: Member) -> None:
    mesh = init_device_mesh("cpu", (me.world_size,))
    hugging = model()
    hugging._tp_plan, hugging.base_model_prefix = {"head": "colwise_gather_output"}, ""
    hugging.config = SimpleNamespace(
        base_model_tp_plan={
            **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
            "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
            "layers.*.mlp.*_proj": "colwise",
            "layers.*.mlp.down_proj": "rowwise",
        }
    )
    compare(tw.parallelize(hugging, mesh), model())
    plan = {"layers.*.mlp.*_proj": "colwise", "layers.*.mlp.down_proj": tw.parallel.Rowwise()}
    compare(tw.parallelize(model(), mesh, plan), model())


def test_plans_of_transformers_and_of_users(world: World) -> None:
    run_either(world, False, other_plans)


def styles_alone(me: Member) -> None:
    """The styles in torch's own function, on own rows in dimension 0."""
    mesh = init_device_mesh("cpu", (me.world_size,))
    torch.manual_seed(0)
    part = Layer(16).mlp
    part.norm = nn.LayerNorm(16)
    torch.manual_seed(0)
    reference = Layer(16).mlp
    reference.norm = nn.LayerNorm(16)
    column, row = tw.parallel.Colwise(sequence_dim=0), tw.parallel.Rowwise(sequence_dim=0)
    plan = {"gate_proj": column, "up_proj": column, "down_proj": row}
    parallelize_module(part, mesh, {**plan, "norm": tw.parallel.SequenceParallel()})
    x = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(2))
    y, want = part(part.norm(x.chunk(2)[me.rank])), reference(reference.norm(x))
    assert_near(y, want.chunk(2)[me.rank], 1e-4, 1e-5, "y")
    for result in (y, want):
        result.square().sum().backward()
    gradients(part, reference)


def test_styles_in_parallelize_module(world: World) -> None:
    run_either(world, False, styles_alone)


class Quantised(nn.Linear):
    """Its weight means something else."""


class Cross(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x + 1))


def refused(me: Member) -> list[str]:
    mesh = init_device_mesh("cpu", (1, me.world_size), mesh_dim_names=("a", "b"))
    quantised, odd, heads = model(), model(), model()
    quantised.layers[1].mlp.up_proj = Quantised(16, 24)
    odd.layers[0].mlp.gate_proj = nn.Linear(16, 25)
    heads.layers[0].self_attn.k_proj = nn.Linear(16, 4)
    inside, cross = model(), model()
    inside.layers[0].mlp.sub_norm = nn.LayerNorm(24)
    cross.layers[0].mlp = Cross(16, 24)
    before = [type(m) for m in quantised.modules()]
    tw.parallelize(cross, sequence_parallel=True, src_data_rank=me.world_size - 1)
    found = [
        refusal(tw.parallelize, quantised),
        refusal(tw.parallelize, odd),
        refusal(tw.parallelize, heads),
        refusal(tw.parallelize, inside),
        refusal(tw.parallelize, model(), mesh),
        refusal(tw.parallelize, model(), None, {"layers.*.mlp.gate": "colwise"}),
        refusal(tw.parallelize, model(), None, {"layers.*.mlp.gate_proj": "diagonal"}),
        refusal(tw.parallelize, model(), None, {"head": "colwise"}),
        refusal(tw.parallelize, nn.Sequential(nn.Linear(4, 4))),
        refusal(cross, ids_of()),
        refusal(tw.parallelize, model(), src_data_rank=me.world_size),
        refusal(tw.parallelize, model(), src_data_rank=-1),
        refusal(tw.parallelize, model(), None, "automatic"),
    ]
    assert [type(m) for m in quantised.modules()] == before, "changed before it was refused"
    return found


NAMED = (
    "layers.1.mlp.up_proj, a tests.cpu.test_parallelize.Quantised",
    "layers.0.mlp.gate_proj: out_features=25",
    "layers.0.self_attn.k_proj: 4 features",
    "layers.0.mlp.sub_norm",
    "of 2 dimensions",
    "'layers.*.mlp.gate'",
    "layers.0.mlp.gate_proj: style 'diagonal'",
    "head, whose weight",
    'plan="auto" for Sequential',
    "layers.0.mlp.up_proj of another tensor",
    "src_data_rank=2",
    "src_data_rank=-1",
    "plan='automatic'",
)


def test_plans_that_do_not_fit_name_the_module(world: World) -> None:
    for errors in run_either(world, False, refused):
        for error, named in zip(errors, NAMED, strict=True):
            assert error.startswith("InputError: asked:") and named in error, (named, error)
