"""Fused kernels for the parts of the MLPs of DLRM that are not matmuls; see ``dlrm_peers.py``.

=================  ==============================================================================
``relu_backward``  the gradient before a ReLU, and its sum over samples, the gradient of the bias
``last_layer``     ReLU, a layer with one output and the binary cross entropy, forward and
                   backward; z is read once
=================  ==============================================================================

In torch these are 30 kernels and take 160 us of a step of 16384 samples, half of it in short
kernels of 1 to 4 us. Sums over samples are partial sums of programs that one reduction adds, so
results have the same bits each time.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import binary_cross_entropy_with_logits

PROGRAMS, ROWS = 528, 4  # four programs per multiprocessor of an H200; samples at a time


@triton.jit
def relu_backward_kernel(
    g, y, masked, sums, samples, width, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """masked = g where y > 0, else 0; sums has its sum over the samples of each program."""
    col = tl.arange(0, COLS)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for begin in range(tl.program_id(0) * ROWS, samples, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        mask, index = (row < samples) & (col < width), row * width + col
        positive = tl.load(y + index, mask=mask, other=0.0) > 0
        value = tl.where(positive, tl.load(g + index, mask=mask, other=0.0), 0.0)
        tl.store(masked + index, value, mask=mask)
        total += value
    column = tl.arange(0, COLS)
    tl.store(sums + tl.program_id(0) * width + column, tl.sum(total, axis=0), mask=column < width)


@triton.jit
def last_layer_kernel(
    z,
    bias,
    weight,
    last_bias,
    labels,
    gz,
    sums,
    samples,
    width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """h = relu(z + bias), logit = h . weight + last_bias, the mean loss over samples, and their
    gradients.

    ``sums`` [programs, 2 * width + 2] has the gradients of bias, weight and last bias, and the
    loss, each summed over the samples of a program.
    """
    col = tl.arange(0, COLS)[None, :]
    b = tl.load(bias + col, mask=col < width, other=0.0)
    w = tl.load(weight + col, mask=col < width, other=0.0)
    of_bias, of_weight = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    of_last, loss = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for begin in range(tl.program_id(0) * ROWS, samples, tl.num_programs(0) * ROWS):
        sample = begin + tl.arange(0, ROWS)
        row, valid = sample[:, None], sample < samples
        mask, index = (row < samples) & (col < width), row * width + col
        h = tl.maximum(tl.load(z + index, mask=mask, other=0.0) + b, 0.0)
        logit = tl.sum(h * w, axis=1) + tl.load(last_bias)
        label = tl.load(labels + sample, mask=valid, other=0.0)
        small = tl.exp(-tl.abs(logit))  # at most 1
        sigmoid = tl.where(logit >= 0, 1.0, small) / (1.0 + small)
        g = tl.where(valid, (sigmoid - label) / samples, 0.0)
        loss += tl.where(valid, tl.maximum(logit, 0.0) - logit * label + tl.log(1.0 + small), 0.0)
        value = tl.where(h > 0, g[:, None] * w, 0.0)
        tl.store(gz + index, value, mask=mask)
        of_bias += value
        of_weight += g[:, None] * h
        of_last += g
    own, column = sums + tl.program_id(0) * (2 * width + 2), tl.arange(0, COLS)
    tl.store(own + column, tl.sum(of_bias, axis=0), mask=column < width)
    tl.store(own + width + column, tl.sum(of_weight, axis=0), mask=column < width)
    tl.store(own + 2 * width, tl.sum(of_last, axis=0))
    tl.store(own + 2 * width + 1, tl.sum(loss, axis=0) / samples)


def relu_backward(
    g: torch.Tensor, y: torch.Tensor, compiled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(g where y > 0 [b, n], its sum over samples [n]), fp32. ``compiled``: with the kernel, else
    in torch."""
    if not compiled:
        masked = g * (y > 0)
        return masked, masked.sum(0)
    samples, width = y.shape
    masked, sums = torch.empty_like(y), y.new_empty(programs_for(samples), width)
    cols = triton.next_power_of_2(width)
    relu_backward_kernel[(sums.shape[0],)](
        g, y, masked, sums, samples, width, ROWS=ROWS, COLS=cols, num_warps=4
    )
    return masked, sums.sum(0)


def last_layer(
    z: torch.Tensor, bias: torch.Tensor, last: torch.nn.Linear, labels: torch.Tensor, compiled: bool
) -> tuple[torch.Tensor, ...]:
    """z [b, n] -> (mean loss of ``last`` of relu(z + bias), gradients of z, bias, and the weight
    and bias of ``last``)."""
    if not compiled:
        leaves = [t.detach().requires_grad_() for t in (z, bias, last.weight, last.bias)]
        hidden = torch.relu(leaves[0] + leaves[1])
        loss = binary_cross_entropy_with_logits(
            (hidden @ leaves[2].T + leaves[3]).squeeze(1), labels
        )
        return loss.detach(), *torch.autograd.grad(loss, leaves)
    samples, width = z.shape
    gz, sums = torch.empty_like(z), z.new_empty(programs_for(samples), 2 * width + 2)
    last_layer_kernel[(sums.shape[0],)](
        z,
        bias,
        last.weight,
        last.bias,
        labels,
        gz,
        sums,
        samples,
        width,
        ROWS=ROWS,
        COLS=triton.next_power_of_2(width),
        num_warps=4,
    )
    of_bias, of_weight, of_last, loss = sums.sum(0).split([width, width, 1, 1])
    return loss[0], gz, of_bias, of_weight.view_as(last.weight), of_last


def programs_for(samples: int) -> int:
    """How many programs to launch: each has samples."""
    return min(PROGRAMS, triton.cdiv(samples, ROWS))
