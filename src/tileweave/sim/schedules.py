"""The order in which a pipeline stage does its work: 1F1B, interleaved 1F1B, zero bubble (ZB-H1).

A stage has ``chunks`` parts of the model. Part ``chunk`` of a stage comes after the same part of
the stage before, and that of the first stage after part ``chunk - 1`` of the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

What = Literal["F", "B", "W"]


class Work(NamedTuple):
    """One piece of work: a forward (F), a backward (B), or the gradients of weights alone (W), of a
    micro-batch in a part of the stage."""

    what: What
    micro: int
    chunk: int = 0


def one_f_one_b(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> Iterator[Work]:
    """1F1B; with more than one chunk interleaved, as in Megatron (arXiv 2104.04473)."""
    total = micro_batches * chunks
    ahead = stages - stage - 1
    warm_up = min(ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages, total)
    for k in range(warm_up):
        yield _forward(k, stages, chunks)
    for k in range(total - warm_up):
        yield _forward(k + warm_up, stages, chunks)
        yield _backward(k, stages, chunks)
    for k in range(total - warm_up, total):
        yield _backward(k, stages, chunks)


def _forward(k: int, stages: int, chunks: int) -> Work:
    if chunks == 1:
        return Work("F", k)
    group, place = divmod(k, stages * chunks)
    return Work("F", group * stages + place % stages, place // stages)


def _backward(k: int, stages: int, chunks: int) -> Work:
    forward = _forward(k, stages, chunks)
    return Work("B", forward.micro, chunks - 1 - forward.chunk)


def zero_bubble(stage: int, stages: int, micro_batches: int) -> Iterator[Work]:
    """ZB-H1 (arXiv 2401.10241): 1F1B whose gradients of weights come later, at most ``stage``
    micro-batches, so that they fill the idle time at the end."""
    late: list[int] = []
    done = 0
    for work in one_f_one_b(stage, stages, micro_batches):
        yield work
        if work.what == "B":
            late.append(work.micro)
            done += 1
            # the last backwards wait for other stages: gradients of weights fill the time
            if len(late) > stage or done > micro_batches - (stages - stage - 1):
                yield Work("W", late.pop(0))
    for micro in late:
        yield Work("W", micro)


def in_flight(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Micro-batches whose activations the first stage keeps at most, each of the whole stage."""
    if chunks == 1:
        return float(min(stages, micro_batches))
    warm_up = min(2 * (stages - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)
    return warm_up / chunks
