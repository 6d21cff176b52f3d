"""tileweave.integrations.sglang: its hooks alone, and what they expect of SGLang's source.

SGLang needs a GPU even to be imported, so its source is read: ``pip install --no-deps sglang``.
"""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.worlds import Member, World

from tileweave.integrations.sglang import MODULE, hooks, register

TOKENS, DEPTH, COLS = 7, 16, 12


class Unquantised:
    pass


class Quantised(Unquantised):
    pass


def ours(original: Any = None, **layer: Any) -> tuple[dict[str, Any], Any]:
    """(hooks in a stand-in of SGLang, a layer)"""
    group = SimpleNamespace(
        world_size=dist.get_world_size() if dist.is_initialized() else 2,
        device_group=dist.group.WORLD,
    )
    module = SimpleNamespace(
        get_parallel=lambda: SimpleNamespace(tp_group=group), sp_num_tokens=lambda: TOKENS
    )
    defaults: dict[str, Any] = {"bias": None, "quant_method": Unquantised()}
    return hooks(module, Unquantised), SimpleNamespace(**(defaults | layer))


def refuse(*_: Any) -> Any:
    raise AssertionError("SGLang's own function ran")


def computed(me: Member) -> dict[str, float]:
    torch.manual_seed(0)
    size, rank = me.world_size, me.rank
    padded = -(-TOKENS // size) * size
    x = torch.randn(padded, DEPTH, dtype=torch.bfloat16)
    x[TOKENS:] = 0
    up, down = torch.randn(COLS, DEPTH).bfloat16(), torch.randn(COLS, DEPTH).bfloat16()
    found, column = ours(weight=up.chunk(size)[rank].contiguous())
    y = found["column_parallel_g_matmul"](refuse, column, x.chunk(size)[rank], None)
    wanted_y = (x[:TOKENS].float() @ up.float().t()).chunk(size, 1)[rank]
    found, row = ours(weight=down.chunk(size, 1)[rank].contiguous())
    own = x[:TOKENS].chunk(size, 1)[rank].contiguous()
    z = found["row_parallel_gbar_matmul"](refuse, row, own, None)
    wanted_z = (x.float() @ down.float().t()).chunk(size)[rank]
    assert y.shape == wanted_y.shape and z.shape == wanted_z.shape
    return {
        "column": float((y.float() - wanted_y).abs().max() / wanted_y.abs().max()),
        "row": float((z.float() - wanted_z).abs().max() / wanted_z.abs().max()),
    }


def test_hooks_compute_what_sglang_does(pair: World) -> None:
    for found in pair.run(computed):
        assert max(found.values()) < 1e-2, found  # bf16


@pytest.mark.parametrize(
    "layer",
    [
        {"bias": torch.zeros(1)},
        {"quant_method": Quantised()},
        {"weight": torch.zeros(1)},
        {"_sp_use_cutlass": True},
    ],
    ids=["bias", "quantised", "float32", "cutlass"],
)
def test_other_layers_are_left_to_sglang(layer: dict[str, Any]) -> None:
    found, linear = ours(**({"weight": torch.zeros(1, dtype=torch.bfloat16)} | layer))
    for hook in found.values():
        said = hook(lambda *args: args, linear, "x", "bias")
        assert said == (linear, "x", "bias")


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWEAVE_SGLANG", raising=False)
    register()  # would import SGLang


# --- What SGLang's source must have ---


def source(module: str) -> ast.Module:
    try:
        listed = files("sglang") or []
    except PackageNotFoundError:
        pytest.skip("pip install --no-deps sglang")
    path = module.replace(".", "/") + ".py"
    found = [Path(str(file.locate())) for file in listed if str(file) == path]
    assert found, f"{module} is gone"
    return ast.parse(found[0].read_text("utf-8"))


def parameters(tree: ast.Module, name: str) -> list[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [argument.arg for argument in node.args.args]
    raise AssertionError(f"{name} is gone")


def test_functions_have_the_parameters_of_the_hooks() -> None:
    tree = source(MODULE)
    assert parameters(tree, "column_parallel_g_matmul") == ["linear", "input_parallel", "bias"]
    assert parameters(tree, "row_parallel_gbar_matmul") == ["linear", "input_", "bias"]
    assert parameters(tree, "sp_num_tokens") == []
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert "get_parallel" in imported


def test_layers_call_them_through_the_module() -> None:
    called = {
        ast.unparse(node.func)
        for node in ast.walk(source("sglang.srt.layers.linear"))
        if isinstance(node, ast.Call)
    }
    for name in ("column_parallel_g_matmul", "row_parallel_gbar_matmul"):
        assert f"layernorm_sp.{name}" in called


def test_hooks_are_registered_by_target_and_kind() -> None:
    tree = source("sglang.srt.plugins.hook_registry")
    assert parameters(tree, "register")[:4] == ["cls", "target", "hook", "hook_type"]
    kinds = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    (kind,) = [node for node in kinds if node.name == "HookType"]
    assert "AROUND" in ast.unparse(kind)
    unquant = source("sglang.srt.layers.quantization.unquant")
    assert any(
        isinstance(node, ast.ClassDef) and node.name == "UnquantizedLinearMethod"
        for node in unquant.body
    )
