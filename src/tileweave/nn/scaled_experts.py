"""Experts of :class:`tileweave.nn.MoE` in FP8 with scales of blocks, for inference.

Names and layouts are those of ``FP8Experts`` of transformers. Tensors of 16 or 32 bits that are
loaded are quantised once, one expert at a time, each rank its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tileweave.errors import require
from tileweave.nn.gated_experts import Experts, activate
from tileweave.nn.linear import draw_seed, generator_of, under_autocast
from tileweave.nn.shards import is_dtensor, local
from tileweave.ops.core.registry import rank_and_size
from tileweave.ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul
from tileweave.ops.experts.grouped_matmul_combine import grouped_matmul_combine
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.ops.experts.swiglu import swiglu
from tileweave.ops.matmul.quantize import quantize
from tileweave.ops.matmul.scaled import ALIGN, BLOCK, FP8, OUT_DTYPES, blocks

WEIGHTS = ("gate_up_proj", "down_proj")


def scale_of(name: str) -> str:
    """The name of the scales of a weight."""
    return f"{name}_scale_inv"


def quantize_experts(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [E, N, K] -> FP8, and scales [E, ceil(N/128), ceil(K/128)]."""
    data = torch.empty(w.shape, dtype=FP8, device=w.device)
    scale = torch.empty(w.shape[0], blocks(w.shape[1]), blocks(w.shape[2]), device=w.device)
    for i, one in enumerate(w):
        of_one, scale[i] = quantize(one, "tile")
        data[i].view(torch.uint8).copy_(of_one.view(torch.uint8))
    return data, scale


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers that an FP8 weight [N, K] represents, in float32."""
    rows, cols = weight.shape
    wide = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return weight.float() * wide


class FP8Experts(Experts):
    """As :class:`Experts`, whose weights are float8_e4m3fn, with ``gate_up_proj_scale_inv``
    [E, ceil(2 I / 128), ceil(H / 128)] and ``down_proj_scale_inv`` [E, ceil(H / 128),
    ceil(I / 128)] in float32. Nothing has a gradient."""

    trained = False

    def shapes(self, bias: bool) -> dict[str, tuple[int, ...]]:
        found = super().shapes(bias)
        for name in WEIGHTS:
            rows, cols = found[name]
            require(
                rows % ALIGN == 0 and cols % ALIGN == 0,
                f"FP8 experts with {name} [{rows}, {cols}]",
                f"hidden_size and intermediate_size that are multiples of {ALIGN}, which tensor "
                "cores need",
                "make the layer without fp8=",
            )
            found[scale_of(name)] = (blocks(rows), blocks(cols))
        return found

    def dtype_of(self, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
        if name in WEIGHTS:
            return FP8
        return torch.float32 if name.endswith("_scale_inv") else dtype

    @classmethod
    def of(cls, experts: Experts) -> FP8Experts:
        """The experts of a layer, quantised."""
        first: Any = experts.gate_up_proj
        found = cls(
            first.shape[0],
            experts.hidden_size,
            experts.intermediate_size,
            "gate_up_proj_bias" in experts._parameters,
            first.device_mesh,
            first.device,
            first.dtype,
            draw=False,
        )
        for name, parameter in experts.named_parameters():
            found.put(name, local(parameter).detach())
        return found

    def put(self, name: str, shard: torch.Tensor) -> None:
        """Fill a parameter, and its scales, with what this rank has of it."""
        with torch.no_grad():
            if name in WEIGHTS:
                data, scale = quantize_experts(shard)
                local(getattr(self, name)).view(torch.uint8).copy_(data.view(torch.uint8))
                local(getattr(self, scale_of(name))).copy_(scale)
            else:
                local(getattr(self, name)).copy_(shard)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FP8Experts:
        """``layer.to(dtype)`` leaves FP8 and its scales as they are."""
        fixed = [p for name, p in self._parameters.items() if not name.endswith("_bias")]

        def moved(t: Any) -> Any:
            found = fn(t)
            changed = found.dtype != t.dtype and any(t is p for p in fixed)
            return t.to(found.device) if changed else found

        return super()._apply(moved, recurse)

    def reset_parameters(self) -> None:
        shapes = self.shapes("gate_up_proj_bias" in self._parameters)
        rank, _ = rank_and_size(self.group_name)
        for name, parameter in self._parameters.items():
            if name.endswith("_scale_inv"):
                continue
            shard = local(parameter)
            # of the same number of draws on each rank, whatever experts it has
            generator = generator_of(shard, draw_seed(shard), rank)
            inner = self.hidden_size if "gate_up" in name else self.intermediate_size
            bound = 1 / math.sqrt(inner)
            if shard.is_meta or hasattr(shard, "fake_mode"):
                continue
            dtype = torch.get_default_dtype() if name in WEIGHTS else shard.dtype
            drawn = torch.empty(shapes[name], dtype=dtype, device=shard.device)
            with torch.no_grad():
                for i in range(shard.shape[0]):
                    nn.init.uniform_(drawn, -bound, bound, generator)
                    if name in WEIGHTS:
                        data, scale = quantize(drawn, "tile")
                        shard[i].view(torch.uint8).copy_(data.view(torch.uint8))
                        local(getattr(self, scale_of(name)))[i] = scale
                    else:
                        shard[i] = drawn

    def dispatch(
        self, tokens: torch.Tensor, ids: torch.Tensor, max_tokens: int | None
    ) -> tuple[torch.Tensor, RoutingPlan]:
        (rows,) = under_autocast(tokens)
        return dispatch_grouped_matmul(
            rows,
            self.whole_shard("gate_up_proj"),
            ids,
            group=self.group_name,
            max_tokens=max_tokens,
            w_scale=self.whole_shard(scale_of("gate_up_proj")),
            quantize="block",
        )

    def combine(
        self, y: torch.Tensor, plan: RoutingPlan, weights: torch.Tensor, hidden_act: str
    ) -> torch.Tensor:
        if hidden_act in ("silu", "swiglu"):
            data, scale = swiglu(y, plan, quantize="block")
        else:
            data, scale = quantize(activate(y, plan, hidden_act), "block")
        return grouped_matmul_combine(
            data,
            self.whole_shard("down_proj"),
            plan,
            weights,
            group=self.group_name,
            y_scale=scale,
            w_scale=self.whole_shard(scale_of("down_proj")),
            out_dtype=y.dtype,
        )

    def run(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        max_tokens: int | None,
        hidden_act: str,
    ) -> torch.Tensor:
        require(
            not (torch.is_grad_enabled() and (tokens.requires_grad or weights.requires_grad)),
            "gradients through FP8 experts",
            "inference",
            "call the layer under torch.no_grad(), or make it without fp8= for training",
        )
        z = super().run(tokens, ids, weights, max_tokens, hidden_act)
        # products have 16 bits
        wide = tokens.dtype not in OUT_DTYPES.values() and not _autocast(tokens)
        return z.to(tokens.dtype) if wide else z

    def prepared(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        for name in WEIGHTS:
            given, of_scale = state.get(prefix + name), prefix + scale_of(name)
            if given is None:
                continue
            require(
                given.dtype != FP8 or of_scale in state,
                f"{prefix}{name} of float8_e4m3fn without {of_scale}",
                "both",
                "pass the state_dict of the whole layer, or weights of 16 bits",
            )
            own: Any = getattr(self, name)
            if given.dtype == FP8 or given.shape != own.shape or own.is_meta:
                continue  # the base class reports another shape
            state[prefix + name], state[of_scale] = self._quantized(given, own, of_scale, prefix)
        return state

    def _quantized(
        self, given: Any, own: Any, of_scale: str, prefix: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of a weight of 16 or 32 bits as the parameters ``own`` and its scales
        are."""
        from torch.distributed.tensor import DTensor

        if is_dtensor(given):
            part = given.redistribute(own.device_mesh, own.placements).to_local()
        else:
            rank, _ = rank_and_size(self.group_name)
            part = given[rank * self.each : (rank + 1) * self.each]
        of_own = getattr(self, of_scale.removeprefix(prefix))
        made = quantize_experts(part.detach().to(local(own).device))
        data, scale = (
            DTensor.from_local(
                tensor,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
            for tensor, like in zip(made, (own, of_own), strict=True)
        )
        return data, scale


def _autocast(tokens: torch.Tensor) -> bool:
    kind = tokens.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)
