"""vLLM: row-parallel layers whose matmul and all-reduce are one operator.

    TILEWEAVE_VLLM=1 vllm serve ... --tensor-parallel-size 2

vLLM calls :func:`register` in every process that it starts, by the entry point
``vllm.general_plugins`` of this package; without the variable it does nothing. It registers a
subclass of ``RowParallelLinear``, which overrides ``forward`` only: weights, their loading, fused
qkv and gate_up, LoRA and quantisation are vLLM's.

A layer calls tileweave if it is not quantised and reduces its result over two ranks or more. Of
those calls, sizes for which ``tileweave.explain`` says "fused" run
:func:`tileweave.matmul_all_reduce`; others run a matmul and vLLM's own all-reduce. This is decided
inside one operator, by the number of rows, so that compiled graphs do not depend on it.

In compiled graphs, a residual and RMSNorm that follow such a layer become part of its operator
(``_vllm_norm.py``): vLLM's own fusion of them with the all-reduce does not see it.

Tried without a GPU only, in eager mode and compiled: see ``docs/integrations/vllm.md``.
"""

from __future__ import annotations

import os
from importlib import import_module
from inspect import getsource
from typing import Any

import torch

__all__ = ["register"]

VARIABLE = "TILEWEAVE_VLLM"
OPERATOR = "tileweave_row_linear"
WITH_NORM = f"{OPERATOR}_norm"


def register() -> None:
    """Register the layer with vLLM if ``TILEWEAVE_VLLM=1``. More calls do nothing."""
    if os.environ.get(VARIABLE) != "1":
        return
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    import tileweave

    if "RowParallelLinear" in op_registry_oot:
        return
    envs = import_module("vllm.envs")
    # vLLM's key of compiled graphs knows nothing of plugins: without this entry, graphs with and
    # without tileweave, or of two versions, take each other's place.
    envs.environment_variables[VARIABLE] = lambda: tileweave.__version__
    # a worker that is late for tileweave is late for vLLM, too
    os.environ.setdefault("TILEWEAVE_TIMEOUT", str(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS))
    PluggableLayer.register_oot(name="RowParallelLinear")(_layer())
    _add_pass()


def _add_pass() -> None:
    """Let vLLM run the pass of ``_vllm_norm.py`` on its graphs, before its own passes."""
    from vllm.logger import init_logger

    import tileweave
    from tileweave.integrations import _vllm_norm

    logger = init_logger("vllm.tileweave")
    try:
        from vllm.compilation.passes import inductor_pass, pass_manager
        from vllm.ir.ops import fused_add_rms_norm  # noqa: F401 - makes the operator to look for
    except ImportError as error:
        logger.warning(
            "tileweave: norms stay vLLM's, its passes are not where 0.32 has them: %s", error
        )
        return

    class NormPass(inductor_pass.InductorPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            ops = torch.ops
            found = _vllm_norm.fuse(
                graph,
                _vllm_norm.Operators(
                    ops.vllm.tileweave_row_linear.default,
                    ops.vllm.all_reduce.default,
                    ops.vllm_ir.fused_add_rms_norm.default,
                    ops.vllm.tileweave_row_linear_norm.default,
                ),
            )
            if found:
                logger.info_once("tileweave: residual and norm join %d layers of a graph", found)

        def uuid(self) -> str:
            return self.hash_source(getsource(_vllm_norm), tileweave.__version__)

    configure = pass_manager.PostGradPassManager.configure

    def with_ours(self: Any, config: Any) -> None:
        configure(self, config)
        self.passes.insert(0, NormPass())

    pass_manager.PostGradPassManager.configure = with_ours


def _define_operators() -> None:
    """Define the two operators of compiled graphs: a layer, and a layer with residual and norm."""
    from vllm.distributed import parallel_state
    from vllm.logger import init_logger
    from vllm.utils.torch_utils import direct_register_custom_op

    from tileweave.ops.core.registration import explain
    from tileweave.ops.matmul.matmul_all_reduce import matmul_all_reduce

    logger = init_logger("vllm.tileweave")  # vLLM shows only loggers below its own
    paths: dict[tuple[Any, ...], str] = {}  # path of a call, by its sizes
    said: set[tuple[Any, ...]] = set()

    def path_of(x: torch.Tensor, w: torch.Tensor, name: str) -> str:
        key = (x.shape, w.shape, x.dtype)
        if key not in paths:
            plan = explain("matmul_all_reduce", x, w, group=name)
            paths[key] = plan.path
            if (w.shape, plan.path) not in said:
                said.add((w.shape, plan.path))
                sizes = f"x {list(x.shape)}, w {list(w.shape)}"
                logger.info("tileweave, %s: %s", sizes, plan.summary)
        return paths[key]

    def coordinator_of(group: str) -> Any:
        # vLLM's name of the group means the same in every process; torch's is a number, which may
        # be another group's by the time a cached graph is loaded
        coordinator = parallel_state._groups[group]()
        if coordinator is None:
            raise ValueError(f"group {group} is destroyed")
        return coordinator

    def row_linear(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: str
    ) -> torch.Tensor:
        coordinator = coordinator_of(group)
        name = coordinator.device_group.group_name
        x = x.contiguous()
        if path_of(x, w, name) == "fused":
            y: Any = matmul_all_reduce(x, w, bias, group=name)
            return y
        y = coordinator.all_reduce(torch.nn.functional.linear(x, w))
        return y if bias is None else y + bias

    def row_linear_norm(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        name = coordinator_of(group).device_group.group_name
        x = x.contiguous()
        if path_of(x, w, name) == "fused":
            more = {"residual": residual, "norm_weight": weight, "norm_eps": eps}
            y: Any = matmul_all_reduce(x, w, bias, group=name, **more)
            return y
        from vllm.ir.ops import fused_add_rms_norm

        return fused_add_rms_norm(row_linear(x, w, bias, group), residual, weight, eps)

    def fake(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: str
    ) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], w.shape[0]))

    def fake_norm(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(residual), torch.empty_like(residual)

    direct_register_custom_op(op_name=OPERATOR, op_func=row_linear, fake_impl=fake)
    direct_register_custom_op(op_name=WITH_NORM, op_func=row_linear_norm, fake_impl=fake_norm)


def _layer() -> type:
    """The subclass of vLLM's ``RowParallelLinear``. Made once, and only in a process of vLLM."""
    from vllm.distributed import parallel_state
    from vllm.logger import init_logger
    from vllm.model_executor.layers import linear

    logger = init_logger("vllm.tileweave")  # vLLM shows only loggers below its own
    _define_operators()

    class KeepsWeight(linear.UnquantizedLinearMethod):
        """On the CPU vLLM packs the weight for oneDNN and leaves an empty one: this keeps it."""

        def process_weights_after_loading(self, layer: Any) -> None:
            if linear.current_platform.is_cpu():
                layer.cpu_linear = torch.nn.functional.linear
            else:
                super().process_weights_after_loading(layer)

    class TileweaveRowParallelLinear(linear.RowParallelLinear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            plain = type(self.quant_method) is linear.UnquantizedLinearMethod
            reduces = self.reduce_results and self.input_is_parallel and self.tp_size > 1
            self.tileweave_group = None
            if plain and reduces:
                self.quant_method = KeepsWeight()
                self.tileweave_group = parallel_state.get_tp_group().unique_name
            elif reduces:
                logger.info_once(
                    "tileweave: a layer with %s keeps vLLM's matmul and all-reduce",
                    type(self.quant_method).__name__,
                )

        def forward(self, input_: torch.Tensor) -> Any:
            if self.tileweave_group is None:
                return super().forward(input_)
            bias = None if self.skip_bias_add else self.bias
            y = torch.ops.vllm.tileweave_row_linear(input_, self.weight, bias, self.tileweave_group)
            if not self.return_bias:
                return y
            return y, self.bias if self.skip_bias_add else None

    return TileweaveRowParallelLinear
