"""Cases of the matmul operators: operands for every rank, and expected results in fp64.

All of these operators share one set: a :class:`Case` names its operator, and everything else
follows from it.

Every rank draws the data of all ranks from seeds, so expected results are computed locally, without
any code under test. Each call has fresh data, so that a stale slot or a stale signal cannot go
unnoticed because values are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from tests.support.seeds import generator
from tests.support.tolerances import TOLERANCE, assert_near

from tileweave.planning.problem import MatmulConfig

# factor on that absolute difference where partial sums of ranks are rounded before they are added
PARTIALS = 2.5
EPS = 0.05  # not the default
AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OUT, IN = "matmul_all_to_all", "all_to_all_matmul"
PRIVATE = (AG, OUT, IN)  # operators whose weight, bias and result differ between ranks


def has_kernel(op: str) -> bool:
    return op == IN or find_spec(f"tileweave.ops.matmul.{op}_fused") is not None


@dataclass(frozen=True)
class Case:
    """One call: rows of a shard (of the whole x for an all-reduce), columns and K per rank.

    ``how`` of an exchange is (scatter_dim, gather_dim). The exchanged tensor has parts of ``rows``
    rows, and ``cols`` columns (of the product) or ``depth`` (of x).

    ``integers``: small whole numbers, so results are exact. ``gathered`` applies to an all-gather;
    ``residual`` and ``norm`` to an all-reduce. Without these the call has one result, with
    ``gathered`` or ``norm`` two.
    """

    rows: int
    cols: int
    depth: int
    dtype: str = "float32"
    bias: bool = False
    gathered: bool = False
    integers: bool = False
    op: str = AG
    residual: bool = False
    norm: bool = False
    how: tuple[int, int] | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def fit(self, config: MatmulConfig) -> Case:
        """This case with one more tile of rows where copy engines push: they need shards at least
        as tall as a tile."""
        sources_in_rows = self.op in (AG, RS) or (
            self.op == IN and self.how is not None and self.how[1] == 0
        )
        short = config.transport != "sm" and self.rows < config.tile_m and sources_in_rows
        return replace(self, rows=self.rows + config.tile_m) if short else self

    def x_rows(self, size: int) -> int:
        """Rows of x per rank in a group of ``size``."""
        return (
            self.rows * size
            if self.op == RS or (self.how is not None and self.how[0] == 0)
            else self.rows
        )

    def x_cols(self, size: int) -> int:
        return (
            self.depth * size
            if self.op == IN and self.how is not None and self.how[0] == 1
            else self.depth
        )

    def w_shape(self, size: int) -> tuple[int, int]:
        if self.how is None:
            return self.cols, self.depth
        return (
            self.cols * size if self.op == OUT and self.how[0] == 1 else self.cols,
            self.depth * size if self.op == IN and self.how[1] == 1 else self.depth,
        )

    def out_rows(self, size: int) -> int:
        return (
            self.rows * size
            if self.op == AG or (self.how is not None and self.how[1] == 0)
            else self.rows
        )

    def out_cols(self, size: int) -> int:
        return (
            self.cols * size
            if self.op == OUT and self.how is not None and self.how[1] == 1
            else self.cols
        )

    def options(self) -> dict[str, int]:
        """Keyword arguments of a public call other than operands."""
        return {} if self.how is None else {"scatter_dim": self.how[0], "gather_dim": self.how[1]}


def draw(
    shape: tuple[int, ...], case: Case, scale: float, device: torch.device, *seed: object
) -> torch.Tensor:
    numbers = generator(device, *seed)
    if case.integers:  # so small that bf16 represents the partial sum of a rank exactly
        return torch.randint(-1, 2, shape, generator=numbers, device=device).to(case.torch_dtype)
    return (torch.randn(shape, generator=numbers, device=device) * scale).to(case.torch_dtype)


@dataclass
class Operands:
    """The operands that one rank passes. ``names()``: those that are present, in the order of the
    call."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None

    def names(self) -> list[str]:
        return [name for name, tensor in vars(self).items() if tensor is not None]

    def options(self) -> dict[str, object]:
        """Operands that a public call takes by keyword."""
        found = {"residual": self.residual, "norm_weight": self.norm_weight}
        if self.norm_weight is not None:
            found["norm_eps"] = EPS
        return {name: value for name, value in found.items() if value is not None}


def draw_operands(case: Case, rank: int, size: int, device: torch.device, seed: int) -> Operands:
    """The operands of one rank of a group. Replicated operands are the same on every rank."""
    summed = case.op not in PRIVATE
    w_shape = case.w_shape(size)
    scale = max(w_shape[1] * (size if summed else 1), 1) ** -0.5
    x = draw((case.x_rows(size), case.x_cols(size)), case, 1.0, device, seed, rank, 0)
    w = draw(w_shape, case, scale, device, seed, rank, 1)
    bias = (
        draw(w_shape[:1], case, 1.0, device, seed, 0 if summed else rank, 2) if case.bias else None
    )
    residual = (
        draw((case.rows, case.cols), case, 1.0, device, seed, 0, 3) if case.residual else None
    )
    norm_weight = (
        draw((case.cols,), replace(case, integers=False), 1.0, device, seed, 0, 4)
        if case.norm
        else None
    )
    return Operands(x, w, bias, residual, norm_weight)


def expected(
    case: Case, everyone: list[Operands], rank: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The results of ``rank`` in fp64, computed by one process from the operands of all ranks;
    differentiable."""
    size, mine = len(everyone), everyone[rank]
    if case.op == AG:
        gathered = torch.cat([operands.x.double() for operands in everyone])
        y = gathered @ mine.w.double().t()
        return (
            y if mine.bias is None else y + mine.bias.double()
        ), gathered if case.gathered else None
    if case.how is not None:
        scatter, gather = case.how
        wholes = [o.x.double() if case.op == IN else _product(o) for o in everyone]
        exchanged = torch.cat([whole.tensor_split(size, scatter)[rank] for whole in wholes], gather)
        return (exchanged if case.op == OUT else _product(replace(mine, x=exchanged))), None
    total = everyone[0].x.double() @ everyone[0].w.double().t()
    for operands in everyone[1:]:
        total = total + operands.x.double() @ operands.w.double().t()
    if mine.bias is not None:
        total = total + mine.bias.double()
    if case.op == RS:
        return total.view(size, case.rows, case.cols)[rank], None
    if mine.residual is not None:
        total = total + mine.residual.double()
    if mine.norm_weight is None:
        return total, None
    normed = (
        total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * mine.norm_weight.double()
    )
    return normed, total


def _product(operands: Operands) -> torch.Tensor:
    y = operands.x.double() @ operands.w.double().t()
    return y if operands.bias is None else y + operands.bias.double()


@dataclass(frozen=True)
class Call:
    """Operands of one call on one rank, poisoned memory for its results, and the expected results.

    ``second`` is the gathered input, or the sum before the norm.
    """

    case: Case
    operands: Operands
    out: torch.Tensor
    second: torch.Tensor | None
    want: torch.Tensor
    want_second: torch.Tensor | None

    @property
    def x(self) -> torch.Tensor:
        return self.operands.x

    @property
    def w(self) -> torch.Tensor:
        return self.operands.w

    @property
    def bias(self) -> torch.Tensor | None:
        return self.operands.bias

    def verify(
        self, what: str, out: torch.Tensor | None = None, second: torch.Tensor | None = None
    ) -> None:
        what = f"{what}, {self.case}"
        verify(
            self.out if out is None else out,
            self.want,
            replace(self.case, integers=self.exact),
            what,
        )
        second = self.second if second is None else second
        if second is None:
            return
        assert self.want_second is not None, f"{what}: a second result that was not requested"
        if self.case.op == AR:
            verify(second, self.want_second, self.case, f"{what}: residual_out")
            return
        assert second.shape == self.want_second.shape, f"{what}: gathered {tuple(second.shape)}"
        rows = rows_that_differ(second, self.want_second)
        assert not rows, f"{what}: gathered differs in rows {rows}"

    @property
    def exact(self) -> bool:
        """Results of a norm are not whole numbers."""
        return self.case.integers and not self.case.norm


def prepare(case: Case, rank: int, size: int, device: torch.device, seed: int) -> Call:
    everyone = [draw_operands(case, r, size, device, seed) for r in range(size)]
    want, second = expected(case, everyone, rank)
    out = torch.full(want.shape, float("nan"), dtype=case.torch_dtype, device=device)
    place = (
        torch.full(second.shape, float("nan"), dtype=out.dtype, device=device)
        if second is not None
        else None
    )
    return Call(case, everyone[rank], out, place, want, second)


def verify(got: torch.Tensor, want: torch.Tensor, case: Case, what: str) -> None:
    assert got.shape == want.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    assert got.dtype == case.torch_dtype, f"{what}: dtype {got.dtype}"
    if case.integers:  # sums of whole numbers are exact in fp32; only the last rounding is left
        rounded = want.to(got.dtype)
        assert torch.equal(got, rounded), (
            f"{what}: not exact in rows {rows_that_differ(got, rounded)}"
        )
        return
    relative, absolute = TOLERANCE[case.dtype]
    if case.op not in PRIVATE:
        absolute *= PARTIALS
    if case.norm:  # it multiplies its input by a weight of up to 4
        relative, absolute = 2 * relative, 4 * absolute
    assert_near(got.double(), want, relative, absolute, what)


def rows_that_differ(got: torch.Tensor, want: torch.Tensor) -> list[int]:
    return (got != want).any(dim=1).nonzero().flatten().tolist()[:20]
