"""The interaction of DLRM, all dot products of a sample's features, as one kernel for forward and
one for backward; see ``dlrm.py``.

    x [b, D] from the bottom MLP, pooled [b, (F - 1) * D]
    -> y [b, D + pairs, zeros to a multiple of 8]

y has x, then the products of features r > c, row after row of the triangle. x is the first of the F
features.

In torch (``cat``, ``bmm``, ``index_select``) the pooled vectors pass through eight kernels,
including backward. Here they are read once in forward, and read and written once in backward.
"""

import torch
import triton
import triton.language as tl


def width_of(features: int, dim: int) -> int:
    """Columns of y."""
    return -(-(dim + features * (features - 1) // 2) // 8) * 8


@triton.jit
def features_at(x, pooled, sample, FEATURES: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """(addresses [ROWS, DIM] of the row of x and then of the pooled vectors, mask of those that
    exist)"""
    row = tl.arange(0, ROWS)
    begin = tl.where(
        row == 0, x + sample * DIM + row * 0, pooled + (sample * (FEATURES - 1) + row - 1) * DIM
    )
    return begin[:, None] + tl.arange(0, DIM)[None, :], (row < FEATURES)[:, None]


@triton.jit
def pair_of(ROWS: tl.constexpr):
    """The index of each pair of features, [ROWS, ROWS]."""
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    high, low = tl.maximum(row, col), tl.minimum(row, col)
    return high * (high - 1) // 2 + low


@triton.jit
def interact(
    x,
    pooled,
    y,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One sample per program."""
    sample = tl.program_id(0).to(tl.int64)
    row, col = tl.arange(0, ROWS), tl.arange(0, DIM)
    pointers, mask = features_at(x, pooled, sample, FEATURES, ROWS, DIM)
    features = tl.load(pointers, mask=mask, other=0.0)
    products = tl.dot(features, tl.trans(features), input_precision=PRECISION)
    out = y + sample * WIDTH
    tl.store(out + col, tl.load(x + sample * DIM + col))
    below = (row[:, None] > row[None, :]) & (row < FEATURES)[:, None]
    tl.store(out + DIM + pair_of(ROWS), products, mask=below)
    pad = DIM + FEATURES * (FEATURES - 1) // 2 + tl.arange(0, 8)
    tl.store(out + pad, tl.zeros((8,), tl.float32), mask=pad < WIDTH)


@triton.jit
def interact_backward(
    x,
    pooled,
    gy,
    gx,
    gpooled,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a feature is the sum over all others of the gradient of the pair times the
    other feature."""
    sample = tl.program_id(0).to(tl.int64)
    row, col = tl.arange(0, ROWS), tl.arange(0, DIM)
    pointers, mask = features_at(x, pooled, sample, FEATURES, ROWS, DIM)
    features = tl.load(pointers, mask=mask, other=0.0)
    g = gy + sample * WIDTH
    pairs = (row[:, None] != row[None, :]) & (row < FEATURES)[:, None] & (row < FEATURES)[None, :]
    weights = tl.load(g + DIM + pair_of(ROWS), mask=pairs, other=0.0)
    gradient = tl.dot(weights, features, input_precision=PRECISION)
    gradient += tl.load(g + (row * 0)[:, None] + col[None, :], mask=(row == 0)[:, None], other=0.0)
    pointers, mask = features_at(gx, gpooled, sample, FEATURES, ROWS, DIM)
    tl.store(pointers, gradient, mask=mask)


class Interaction(torch.autograd.Function):
    """The kernels, for fp32 and D a power of two, 16 at least. They use TF32 if torch does
    (``set_float32_matmul_precision``)."""

    @staticmethod
    def forward(ctx, x, pooled):
        x, pooled = x.contiguous(), pooled.contiguous()
        ctx.save_for_backward(x, pooled)
        y = x.new_empty(x.shape[0], width_of(pooled.shape[1] // x.shape[1] + 1, x.shape[1]))
        _run(interact, x, pooled, y)
        return y

    @staticmethod
    def backward(ctx, gy):
        x, pooled = ctx.saved_tensors
        gx, gpooled = torch.empty_like(x), torch.empty_like(pooled)
        _run(interact_backward, x, pooled, gy.contiguous(), gx, gpooled)
        return gx, gpooled


def _run(kernel, x, pooled, *others):
    (samples, dim), features = x.shape, pooled.shape[1] // x.shape[1] + 1
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    kernel[(samples,)](
        x,
        pooled,
        *others,
        FEATURES=features,
        ROWS=max(triton.next_power_of_2(features), 16),
        DIM=dim,
        WIDTH=width_of(features, dim),
        PRECISION=precision,
        num_warps=4,
    )


def interaction(x: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
    """x [b, D], pooled [b, (F - 1) * D] -> y; with the kernels on a GPU, else in torch."""
    if x.is_cuda:
        return Interaction.apply(x, pooled)
    features = torch.cat([x[:, None], pooled.view(x.shape[0], -1, x.shape[1])], 1)
    rows, cols = torch.tril_indices(features.shape[1], features.shape[1], -1)
    products = torch.bmm(features, features.transpose(1, 2))[:, rows, cols]
    width = width_of(features.shape[1], x.shape[1])
    y = torch.cat([x, products], 1)
    return torch.nn.functional.pad(y, (0, width - y.shape[1]))
