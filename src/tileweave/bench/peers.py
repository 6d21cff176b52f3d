"""Who is measured beside us, on one rank and for one case: callables over the same operands.

=============  ===================================================================================================
tileweave      the public operator, result into memory that is there
nccl+cublas    all-gather into a buffer, then one matmul (over gloo and torch where there is no GPU)
torch fused    ``torch.ops.symm_mem.fused_all_gather_matmul``, the shard already in symmetric memory
gemm           that matmul alone, on an input already gathered: no communication
co-run bound   the same matmul while copy engines push a shard to every peer beside it, with no dependence: the limit
=============  ===================================================================================================

The only file besides ``transport/cuda.py`` that touches torch's private symmetric memory, for the last two.
Weights rotate through copies past the L2, for all peers alike; each call takes the next one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

import tileweave as tw
from tileweave.bench.cases import Case
from tileweave.bench.subjects import SUBJECTS, Operands, Shape, normal, poisoned, worst_of
from tileweave.launcher import Member
from tileweave.transport.collectives import all_gather_flat

OURS, UNFUSED, TORCH, GEMM, CORUN = "tileweave", "nccl+cublas", "torch fused", "gemm", "co-run bound"
PEERS = (OURS, UNFUSED, TORCH, GEMM, CORUN)
_MAX_WEIGHTS = 8
_L2_TIMES = 2.5


class AllGatherMatmulPeers:
    """The callables of one all_gather_matmul case. Collective to make (symmetric memory).

    ``functions``: name -> one call. ``missing``: name -> why it cannot run here.
    """

    def __init__(self, case: Case, member: Member, names: tuple[str, ...], seed: int) -> None:
        self.case, self.member = case, member
        self.group, self.device, self.rank, self.size = member.group, member.device, member.rank, member.world_size
        self.dtype = getattr(torch, case.dtype)
        m, n, k = case.shard(self.size)
        self.subject = SUBJECTS[case.op]
        self.operands = self.subject.draw(Shape(m, n, k), self.dtype, self.device, self.rank, self.size, seed, False)
        self.weights = self._weights()
        self.out = poisoned((m * self.size, n), self.dtype, self.device)
        self.gathered = torch.empty_like(self.operands.everyone)
        self.missing: dict[str, str] = {}
        self._held: list[object] = []
        made = {name: self._make(name) for name in PEERS if name in names}
        self.functions = {name: function for name, function in made.items() if function is not None}

    def _weights(self) -> list[torch.Tensor]:
        """The weight and enough others that together they do not fit the L2."""
        w = self.operands.w
        if not self.member.on_gpu:
            return [w]
        l2 = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 60 << 20)
        count = min(_MAX_WEIGHTS, max(1, round(_L2_TIMES * l2 / (w.numel() * w.element_size()) + 0.5)))
        shape, scale = (w.shape[0], w.shape[1]), w.shape[1] ** -0.5
        return [w] + [normal(shape, scale, self.dtype, self.device, 77, self.rank, i) for i in range(count - 1)]

    def _make(self, name: str) -> Callable[[], object] | None:
        makers = {
            OURS: self._ours, UNFUSED: self._unfused, TORCH: self._torch_fused, GEMM: self._gemm, CORUN: self._corun
        }  # fmt: skip
        if name in (TORCH, CORUN) and not self.member.on_gpu:
            self.missing[name] = "needs GPUs"
            return None
        return makers[name]()

    def _ours(self) -> Callable[[], object]:
        x, group, out, ws = self.operands.x, self.group, self.out, cycle(self.weights)
        return lambda: tw.all_gather_matmul(x, next(ws), group=group, out=out)

    def _unfused(self) -> Callable[[], object]:
        x, group, gathered, out = self.operands.x, self.group, self.gathered, torch.empty_like(self.out)
        ws = cycle([w.t() for w in self.weights])

        def call() -> None:
            all_gather_flat(gathered, x, group=group)
            torch.mm(gathered, next(ws), out=out)

        return call

    def _gemm(self) -> Callable[[], object]:
        everyone, out, ws = self.operands.everyone, torch.empty_like(self.out), cycle([w.t() for w in self.weights])
        return lambda: torch.mm(everyone, next(ws), out=out)

    def _torch_fused(self) -> Callable[[], object] | None:
        shard, _ = self._symmetric(self.operands.x.shape)  # imports what registers the operator
        if not hasattr(torch.ops.symm_mem, "fused_all_gather_matmul"):
            self.missing[TORCH] = "this torch has no torch.ops.symm_mem.fused_all_gather_matmul"
            return None
        shard.copy_(self.operands.x)
        ws, name = cycle([w.t() for w in self.weights]), self.group.group_name
        return lambda: torch.ops.symm_mem.fused_all_gather_matmul(shard, [next(ws)], 0, name)

    def _corun(self) -> Callable[[], object]:
        x, rank, size = self.operands.x, self.rank, self.size
        local, handle = self._symmetric(self.operands.everyone.shape)
        rows = slice(rank * x.shape[0], (rank + 1) * x.shape[0])
        targets = [handle.get_buffer((rank + i) % size, local.shape, self.dtype)[rows] for i in range(1, size)]
        side, gemm = torch.cuda.Stream(self.device, priority=-1), self._gemm()

        def call() -> None:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for target in targets:
                    target.copy_(x, non_blocking=True)
            gemm()
            current.wait_stream(side)

        return call

    def _symmetric(self, shape: torch.Size) -> tuple[torch.Tensor, Any]:
        """Collective: symmetric memory of ``shape``, and torch's handle on it."""
        import torch.distributed._symmetric_memory as symm_mem

        with warnings.catch_warnings():  # deprecated where it is not needed any more
            warnings.simplefilter("ignore")
            symm_mem.enable_symm_mem_for_group(self.group.group_name)
        tensor = symm_mem.empty(*shape, dtype=self.dtype, device=self.device)
        handle = symm_mem.rendezvous(tensor, self.group.group_name)
        self._held += [tensor, handle]  # peers copy into it for as long as this object lives
        return tensor, handle

    def errors(self) -> tuple[float, float]:
        """Collective use of the operator, twice: worst error on this rank against fp32, and against one cuBLAS matmul.

        Outputs are full of NaN before; the second call has other data.
        """
        against_fp32, against_matmul = [], []
        for attempt in range(2):
            operands = self.operands if attempt == 0 else self._other_operands()
            self.out.fill_(float("nan"))
            self.subject.call(operands, self.group, out=self.out)
            tw.synchronize(self.group)
            against_fp32.append(self.subject.error(operands, self.out))
            want = torch.mm(operands.everyone, operands.w.t())
            against_matmul.append(((self.out - want).float().norm() / want.float().norm()).item())
        return worst_of(against_fp32), worst_of(against_matmul)

    def _other_operands(self) -> Operands:
        m, n, k = self.case.shard(self.size)
        return self.subject.draw(Shape(m, n, k), self.dtype, self.device, self.rank, self.size, 4242, False)


PEERS_OF = {"all_gather_matmul": AllGatherMatmulPeers}
