"""A first call may be in the warm-up of ``torch.compile(mode="reduce-overhead")``, where nothing
that this thread allocates may be left after the call, except results."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.support.matmul_cases import AG, AR, IN, OUT, RS
from tests.support.worlds import Member, Worlds
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tileweave as tw
from tileweave.ops.core import operator
from tileweave.ops.core.registry import REGISTRY, name_of
from tileweave.planning import choices
from tileweave.planning.problem import MatmulConfig
from tileweave.transport import lasting_memory
from tileweave.transport.cpu import CpuTransport

LIBRARY = MatmulConfig("library", "sm", 16, 32, 64, 1, 4)
ONE_SHOT = MatmulConfig("triton", "sm", 16, 32, 64, 1, 4, shots=1)
TILES = MatmulConfig("triton", "copy_engine", 16, 32, 64, 1, 4, num_slices=2, split_tail=False)
SHARDS = MatmulConfig("library", "copy_engine", 16, 32, 64, 1, 4)
CONFIGS = {AG: (LIBRARY, TILES, SHARDS), RS: (LIBRARY, TILES, SHARDS), AR: (LIBRARY, ONE_SHOT)}


class Allocations(TorchDispatchMode):
    """Remembers what operators of torch allocate in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[str, StorageWeakRef]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        results = made if isinstance(made, (tuple, list)) else (made,)
        for t, result in zip(results, func._schema.returns, strict=False):
            if isinstance(t, torch.Tensor) and t.numel() and result.alias_info is None:
                ref = StorageWeakRef(t.untyped_storage())
                self.found[ref.cdata] = str(func), ref
        return made

    def left(self) -> list[str]:
        gc.collect()
        return [name for name, ref in self.found.values() if not ref.expired()]


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return call


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Allocate in another thread. Copy to the device. Make memory of the host, and memory that
    peers map, without torch's allocator. Call around the dispatcher, below which there are no
    modes."""
    to = torch.Tensor.to
    with (
        mock.patch.object(lasting_memory, "_may_warm_up", return_value=True),
        mock.patch.object(torch.Tensor, "to", lambda t, *args, **how: to(t, *args, copy=True)),
        mock.patch.object(CpuTransport, "allocate", _unseen(CpuTransport.allocate)),
        mock.patch.object(CpuTransport, "host_visible", _unseen(CpuTransport.host_visible)),
        mock.patch.object(operator, "_dispatch_modes", return_value=0),
    ):
        yield


def bags() -> torch.Tensor:
    table = torch.ones(7, 4)
    indices = torch.arange(8, dtype=torch.int32) % 7
    offsets = torch.arange(0, 9, 2, dtype=torch.int32)
    layout = tw.EmbeddingLayout.in_rank_order([[4], [4]])
    return tw.embedding_bag_all_to_all([table], indices, offsets, layout=layout)


def experts(me: Member) -> torch.Tensor:
    x, ids = torch.ones(6, 8), torch.arange(12, dtype=torch.int32).view(6, 2) % (2 * me.world_size)
    y, plan = tw.dispatch_grouped_matmul(x, torch.ones(2, 4, 8), ids)
    return tw.grouped_matmul_combine(y, torch.ones(2, 8, 4), plan)


def of_matmul(me: Member, op: str) -> torch.Tensor:
    options = {"scatter_dim": 0, "gather_dim": 1} if op in (OUT, IN) else {}
    depth = 64 * (me.world_size if op == IN else 1)
    rows = 8 if op == AR else 32 * me.world_size
    return getattr(tw, op)(torch.ones(rows, 64), torch.ones(64, depth), **options)


def left_over(me: Member) -> dict[str, list[str]]:
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "bags": bags,
        "experts": lambda: experts(me),
        **{op: (lambda op=op: of_matmul(me, op)) for op in (AG, RS, AR, OUT, IN)},
    }
    found = {}
    for name, call in calls.items():
        for config in CONFIGS.get(name, (TILES,)):
            tw.close()
            me.barrier()
            planned = choices.forced(name, config) if name in CONFIGS else nullcontext()
            with as_on_a_gpu(), planned, torch.no_grad(), Allocations() as allocations:
                y = call()
            assert allocations.found
            del y
            found[f"{name}, {config}"] = allocations.left()
    return found


def test_first_calls_leave_nothing_but_results(worlds: Worlds) -> None:
    for found in worlds("gloo", 2).run(left_over):
        assert len(found) == 12
        assert not any(found.values()), found


def compiled_lookups(me: Member) -> tuple[bool, bool]:
    """Whether an eager and a compiled lookup return memory that peers map."""

    def is_lent(y: torch.Tensor) -> bool:
        workspace = REGISTRY.find(name_of(dist.group.WORLD), me.device)
        assert workspace is not None
        slots = workspace.instance("embedding_bag_all_to_all", "sm").slots
        return slots.data_ptr() <= y.data_ptr() < slots.data_ptr() + slots.numel()

    with torch.no_grad():
        return is_lent(bags()), is_lent(torch.compile(bags, backend="aot_eager", fullgraph=True)())


def test_results_in_graphs_are_their_own(worlds: Worlds) -> None:
    """torch requires that of results in the memory of its CUDA graphs."""
    assert worlds("gloo", 2).run(compiled_lookups) == [(True, False)] * 2
