"""``torch.compile(mode="reduce-overhead")``, whose first call is that of the operator, too: it
allocates memory that stays, which torch does not allow in the memory of its graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.matmul_cases import AG, AR, IN, OUT, RS
from tests.support.worlds import Member, World

import tileweave as tw
from tileweave.planning import choices
from tileweave.planning.problem import MatmulConfig

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

LIBRARY = MatmulConfig("library", "sm", 16, 128, 64, 1, 4)
ONE_SHOT = MatmulConfig("triton", "sm", 16, 64, 128, 5, 4, team=2, shots=1)
TILES = MatmulConfig("triton", "copy_engine", 128, 128, 64, 3, 8, num_slices=2, split_tail=False)
CASES = {
    "AG by cuBLAS": (AG, 512, LIBRARY),
    "AG by tiles": (AG, 512, TILES),
    "RS by cuBLAS": (RS, 512, LIBRARY),
    "RS by tiles": (RS, 512, TILES),
    "AR by cuBLAS": (AR, 256, LIBRARY),
    "AR of few rows": (AR, 8, ONE_SHOT),
    "AR by tiles": (AR, 1024, TILES),
    "exchange after": (OUT, 512, LIBRARY),
    "exchange before": (IN, 512, LIBRARY),
    "unfused": (RS, 512, None),
}


def repeated(me: Member, call: Callable[[torch.Tensor], torch.Tensor], rows: int) -> list[float]:
    """How far replays are from eager calls, each with an input of its own."""
    compiled = torch.compile(call, mode="reduce-overhead")
    xs = [torch.randn(rows, 256, device=me.device, dtype=torch.bfloat16) for _ in range(4)]
    found = []
    for x in xs:
        torch.compiler.cudagraph_mark_step_begin()
        found.append(compiled(x).clone())
    tw.synchronize()
    return [(y - call(x)).abs().max().item() for x, y in zip(xs, found, strict=True)]


def matmuls(me: Member, name: str, trains: bool) -> list[float]:
    op, rows, config = CASES[name]
    depth = 256 * (me.world_size if op == IN else 1)
    options = {"scatter_dim": 0, "gather_dim": 1} if op in (OUT, IN) else {}
    w = torch.randn(512, depth, device=me.device, dtype=torch.bfloat16).div_(16)

    def call(x: torch.Tensor) -> torch.Tensor:
        return getattr(tw, op)(x, w, **options).relu()

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        call(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    torch._dynamo.reset()
    tw.close()
    me.barrier()
    with choices.forced(op, config):
        if not trains:
            with torch.no_grad():
                return repeated(me, call, rows)
        compiled = torch.compile(call, mode="reduce-overhead")
        found = []
        for _ in range(4):
            x = torch.randn(rows, 256, device=me.device, dtype=torch.bfloat16)
            given = x.clone().requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            compiled(given).square().sum().backward()
            assert given.grad is not None
            found.append((given.grad - gradient(x)).abs().max().item())
        return found


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_matmuls(largest: World, name: str, trains: bool) -> None:
    for differences in largest.run(matmuls, name, trains, timeout=120):
        assert len(differences) == 4
        assert max(differences) <= 0.5, differences


class Lookups(torch.nn.Module):
    """Tables are parameters: of other tensors torch copies what it replays."""

    def __init__(self, me: Member) -> None:
        super().__init__()
        tables = [torch.randn(100, 32, device=me.device) for _ in range(2)]
        self.tables = torch.nn.ParameterList(tables)
        self.offsets = torch.arange(0, 2 * 64 * 4 + 1, 4, device=me.device)
        self.layout = tw.EmbeddingLayout.in_rank_order([[32, 32]] * me.world_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = (x[: 2 * 64 * 4, 0].float().abs() * 30).long() % 100
        tables = list(self.tables)
        return tw.embedding_bag_all_to_all(tables, indices, self.offsets, layout=self.layout) * 2


def lookups(me: Member) -> list[float]:
    torch._dynamo.reset()
    tw.close()
    me.barrier()
    with torch.no_grad():
        return repeated(me, Lookups(me), 512)


def test_lookups(largest: World) -> None:
    for differences in largest.run(lookups, timeout=120):
        assert max(differences) == 0.0


def experts(me: Member) -> list[float]:
    first, second = (
        torch.randn(2, 256, 256, device=me.device, dtype=torch.bfloat16) / 16 for _ in range(2)
    )
    ids = torch.arange(128, device=me.device, dtype=torch.int32).view(64, 2) % (2 * me.world_size)

    def call(x: torch.Tensor) -> torch.Tensor:
        y, plan = tw.dispatch_grouped_matmul(x, first, ids)
        return tw.grouped_matmul_combine(y.relu(), second, plan) * 2

    torch._dynamo.reset()
    tw.close()
    me.barrier()
    with torch.no_grad():
        return repeated(me, call, 64)


def test_experts(largest: World) -> None:
    for differences in largest.run(experts, timeout=120):
        assert max(differences) <= 0.25
