"""A mixture-of-experts layer with its experts sharded over ranks, trained beside the same layer on one device.

    python examples/moe_layer.py                        # 4 ranks, a Qwen3-MoE-style layer: the same losses as on one device?
    python examples/moe_layer.py --style deepseek       # sigmoid router with a correction bias, a shared expert
    python examples/moe_layer.py --style mixtral --ranks 2

A layer is ``tw.nn.MoE``; a step is

    router | tokens to the ranks of their experts, gate and up projections | silu(gate) * up
           | down projection, weighted sums back to the tokens' ranks | loss, backward: the same two operators, swapped

Each rank has tokens of its own, and ranks have different numbers of them. Gradients of experts are complete; those of router
and shared expert, which every rank has, are summed over ranks.
"""

import argparse
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, mse_loss, silu

import tileweave as tw
from tileweave.launcher import Member, default_device_type, default_world_size, launch
from tileweave.nn import MoE, SoftmaxTopK

# Largest relative difference of a loss from that on one device. fp32 differs by the order of sums only; in bf16 a partial
# sum is rounded once a rank.
ALLOWED = {"float32": 1e-5, "bfloat16": 2e-2}
TOKENS, RATE = 6, 1.0


@dataclass(frozen=True)
class Style:
    """Sizes of a layer, reduced; ``experts`` of all ranks."""

    hidden: int
    width: int
    experts: int
    topk: int
    shared: int = 0
    sigmoid: bool = False


STYLES = {
    "mixtral": Style(32, 48, 4, 2),
    "qwen3": Style(32, 16, 8, 3),
    "deepseek": Style(32, 16, 8, 3, shared=16, sigmoid=True),
}


class SigmoidTopK(nn.Module):
    """DeepSeek-V3's router without groups: a bias corrects who is chosen, not how much it weighs."""

    def __init__(self, s: Style, scale: float = 2.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(s.experts, s.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(s.experts))
        self.topk, self.scale = s.topk, scale

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = linear(x, self.weight).float().sigmoid()
        ids = (scores + self.e_score_correction_bias).topk(self.topk, -1).indices
        weights = scores.gather(1, ids)
        return weights / weights.sum(-1, keepdim=True) * self.scale, ids


class WholeMoE(nn.Module):
    """The layer on one device in plain torch, expert by expert, with the names of transformers' blocks."""

    def __init__(self, s: Style) -> None:
        super().__init__()
        self.gate = router(s)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(s.experts, 2 * s.width, s.hidden))
        self.experts.down_proj = nn.Parameter(torch.empty(s.experts, s.hidden, s.width))
        if s.shared:
            self.shared_experts = nn.Module()
            self.shared_experts.gate_proj = nn.Linear(s.hidden, s.shared, bias=False)
            self.shared_experts.up_proj = nn.Linear(s.hidden, s.shared, bias=False)
            self.shared_experts.down_proj = nn.Linear(s.shared, s.hidden, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x)
        y = torch.zeros_like(x)
        for expert in range(self.experts.down_proj.shape[0]):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            gate, up = linear(x[token], self.experts.gate_up_proj[expert]).chunk(2, -1)
            row = linear(silu(gate) * up, self.experts.down_proj[expert])
            y = y.index_add(0, token, (row * weights[token, choice, None]).to(x.dtype))
        if hasattr(self, "shared_experts"):
            shared = self.shared_experts
            y = y + shared.down_proj(silu(shared.gate_proj(x)) * shared.up_proj(x))
        return y


def router(s: Style) -> nn.Module:
    return SigmoidTopK(s) if s.sigmoid else SoftmaxTopK(s.hidden, s.experts, s.topk)


def train(member: Member, style: str, steps: int, dtype: str) -> list[tuple[float, float]]:
    """Losses of each step, over ranks and on one device, from the same weights and data."""
    s, kind = STYLES[style], getattr(torch, dtype)
    torch.manual_seed(0)  # all ranks draw the same layer and data
    whole = WholeMoE(s).to(member.device, kind)
    part = MoE(
        s.hidden, s.width, s.experts, s.topk, shared_intermediate_size=s.shared, router=router(s).to(member.device, kind),
        max_tokens=TOKENS, device=member.device, dtype=kind,
    )  # fmt: skip
    part.load_whole_state_dict(whole.state_dict())
    counts = [max(TOKENS - rank, 0) for rank in range(member.world_size)]
    x, target = (torch.randn(sum(counts), s.hidden).to(member.device, kind) for _ in range(2))
    mine = [t.split(counts)[member.rank] for t in (x, target)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=RATE) for layer in (part, whole)]
    losses = []
    for _ in range(steps):
        loss = (part(mine[0]) - mine[1]).float().square().sum() / target.numel()
        loss.backward()
        for name, parameter in part.named_parameters():
            if not name.startswith("experts."):
                dist.all_reduce(parameter.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)
        alone = mse_loss(whole(x).float(), target.float())
        alone.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((total.item(), alone.item()))
    tw.synchronize()
    tw.close()
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--style", choices=list(STYLES), default="qwen3")
    parser.add_argument("--ranks", type=int, help="2 or 4, or 8 but for Mixtral; default: the GPUs there are, or 4 on the CPU")
    parser.add_argument("--steps", type=int, default=4)
    words = parser.parse_args()
    kind = default_device_type()
    size, dtype = default_world_size(kind, words.ranks), "bfloat16" if kind == "cuda" else "float32"
    losses = launch(train, words.style, words.steps, dtype, world_size=size, device_type=kind)
    print(f"losses, {words.style}, {size} ranks on {'GPUs' if kind == 'cuda' else 'the CPU'}, {STYLES[words.style]}")
    for number, (over_ranks, alone) in enumerate(losses):
        print(
            f"  step {number}: over ranks {over_ranks:.6f}, one device {alone:.6f}, differ by {abs(over_ranks / alone - 1):.1e}"
        )
    worst = max(abs(over_ranks / alone - 1) for over_ranks, alone in losses)
    right = worst < ALLOWED[dtype] and (words.steps < 2 or losses[-1][0] < losses[0][0])
    print(f"largest difference {worst:.1e}, allowed {ALLOWED[dtype]:.0e}" + ("" if right else ": WRONG"))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
