"""Matmul operators over nodes: time over the longer of the collective alone and the matmul alone.

    python examples/bench_nodes.py                 # one host: GPUs as 2 nodes (NCCL by sockets)
    torchrun --nnodes 2 --nproc-per-node 8 ... examples/bench_nodes.py    # a real network

For each operator: sizes whose transfer takes longer than the matmul (goal: at most 1.10), and sizes
whose transfer takes a fifth of it (goal: 1.08). "unfused" is the collective, then one matmul.
Calls are eager and take turns; medians over calls, slowest rank. On CPUs only the program is tried.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.launcher import (
    Member,
    default_device_type,
    default_world_size,
    end_with,
    given_world_size,
    launch,
)
from tileweave.transport.torch_collectives import (
    queue_all_gather,
    queue_all_reduce,
    queue_reduce_scatter,
)

# rows of a shard (all-reduce: all rows), columns, depth of a rank
LONG_TRANSFER = {
    "all_gather_matmul": [(1024, 4096, 4096), (2048, 7168, 8192), (4096, 14336, 8192)],
    "matmul_reduce_scatter": [(1024, 4096, 4096), (2048, 8192, 7168)],
    "matmul_all_reduce": [(4096, 8192, 4096)],
}
# which size grows until the transfer takes a fifth: it must not change what is sent
SHORT_TRANSFER = {
    "all_gather_matmul": (1024, None, 4096),
    "matmul_reduce_scatter": (1024, 4096, None),
    "matmul_all_reduce": (1536, 16384, None),
}
GOALS = {"long": 1.10, "short": 1.08}
FIRST = 65536  # the first try of a size that grows
TINY = {"all_gather_matmul": (8, 16, 32), "matmul_reduce_scatter": (8, 16, 32)}
Calls = dict[str, Callable[[], Any]]


def calls_of(member: Member, op: str, m: int, n: int, k: int) -> Calls:
    size, dtype = member.world_size, torch.bfloat16 if member.on_gpu else torch.float32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=member.device, dtype=dtype)

    rows = m * size if op == "matmul_reduce_scatter" else m
    x, w = draw(rows, k), draw(n, k)
    fused = getattr(tw, op)
    if op == "all_gather_matmul":
        whole, y = draw(size * m, k), draw(size * m, n)

        def send() -> None:
            queue_all_gather(whole, x, member.group)

        def multiply() -> None:
            torch.mm(whole, w.t(), out=y)

        order = (send, multiply)
    else:
        whole, y = draw(rows, n), draw(m, n)

        def send() -> None:
            if op == "matmul_all_reduce":
                queue_all_reduce(whole, member.group)
            else:
                queue_reduce_scatter(y, whole, member.group)

        def multiply() -> None:
            torch.mm(x, w.t(), out=whole)

        order = (multiply, send)

    def unfused() -> None:
        for step in order:
            step()

    calls: Calls = {"transfer": send, "matmul": multiply, "unfused": unfused}
    return {**calls, "ours": lambda: fused(x, w, out=y)}


def times_of(member: Member, calls: Calls, repeats: int) -> dict[str, float]:
    """Medians in ms, of the slowest rank."""

    def settle() -> None:
        if member.on_gpu:
            torch.cuda.synchronize()

    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 2):
        for name, call in calls.items():
            settle()
            dist.barrier()
            settle()
            began = time.perf_counter()
            call()
            settle()
            if number >= 2:
                found[name].append((time.perf_counter() - began) * 1e3)
    medians = torch.tensor([statistics.median(t) for t in found.values()], device=member.device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(found, medians.tolist(), strict=True))


def grown(member: Member, op: str, sizes: tuple[Any, ...]) -> tuple[int, int, int]:
    """``sizes`` with a number for None, so that the transfer takes a fifth of the matmul."""
    at = sizes.index(None)
    first = tuple(size or FIRST for size in sizes)
    calls = calls_of(member, op, *first)
    times = times_of(member, {name: calls[name] for name in ("transfer", "matmul")}, 3)
    del calls
    torch.cuda.empty_cache()
    wanted = int(FIRST * 5 * times["transfer"] / times["matmul"])
    most = 2**31 // sizes[0] - 8192  # elements that 32 bits can index
    made = [*first]
    made[at] = max(2048, min(wanted, most) // 2048 * 2048)
    m, n, k = made
    return m, n, k


def measure(member: Member, repeats: int) -> list[str]:
    said = [f"{'':22} {'m, n, k':22} transfer  matmul    ours  unfused   (ms; over the longer)"]
    cases = [("long", op, s) for op, every in LONG_TRANSFER.items() for s in every]
    cases += [("short", op, s) for op, s in SHORT_TRANSFER.items()]
    if not member.on_gpu:
        cases = [("long", op, s) for op, s in TINY.items()]
    for kind, op, sizes in cases:
        m, n, k = sizes if None not in sizes else grown(member, op, sizes)
        calls = calls_of(member, op, m, n, k)
        times = times_of(member, calls, repeats)
        longer = max(times["transfer"], times["matmul"])
        ours, unfused = times["ours"] / longer, times["unfused"] / longer
        goal = GOALS[kind]
        verdict = f"goal {goal:.2f} {'met' if ours <= goal else 'MISSED'}" if member.on_gpu else ""
        figures = f"{times['transfer']:8.2f} {times['matmul']:7.2f} {ours:7.2f} {unfused:8.2f}"
        said.append(f"{op:22} {f'{m}, {n}, {k}':22} {figures}   {verdict}")
        del calls
        if member.on_gpu:
            torch.cuda.empty_cache()
    tw.close()
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description="Matmul operators over nodes, timed.")
    parser.add_argument("--ranks", type=int, help="on one host: how many, an even number")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls of each")
    given = parser.parse_args()
    device_type = default_device_type()
    size = default_world_size(device_type, given.ranks)
    nodes = 2 if given_world_size() is None else 1
    options: dict[str, Any] = {"device_type": device_type, "nodes": nodes}
    said = launch(measure, given.repeats, world_size=size, **options) or []
    print("\n".join(said))
    return 0


if __name__ == "__main__":
    end_with(main)
