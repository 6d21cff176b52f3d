"""Faults planted in routing plans and dispatch_grouped_matmul; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import Mutant

DI, RO = "dispatch_grouped_matmul/", "dispatch_grouped_matmul.routing/"
KERNEL, ROUTING, SORT, ROWS = (
    "kernels/experts/dispatch_triton.py",
    "kernels/experts/routing.py",
    "kernels/experts/sort.py",
    "kernels/experts/rows.py",
)

_WAIT = "        token = wait(peers, source * MAX_BLOCKS + block, epoch, tile)\n"
_LAST = "        wait_steps(peers, rank, blocks - 1, 1, WORLD_SIZE - 1, epoch, -1, WORLD_SIZE)\n"
_COUNT = (
    '        if tl.atomic_add(pushed, 1, sem="acq_rel", scope="gpu") == sizes.num_producers - 1:\n'
)
_SIGNAL = (
    "            notify_all(peers, rank * MAX_BLOCKS + block, rank, epoch, WORLD_SIZE, False)\n"
)
_IDS = "        wait(peers, source * MAX_SLICES, epoch)\n"
_COUNTED = "                wait(peers, source * MAX_SLICES, epoch, COUNT=SLICES)\n"
_KEPT = "\n\n@triton.jit(do_not_specialize=_SAME)\ndef place_kernel"
_SENT = "    notify_all(peers, rank * MAX_SLICES + piece, rank, epoch, WORLD_SIZE, True)\n"

MUTANTS: tuple[Mutant, ...] = (
    Mutant("rows do not wait for their sources", KERNEL, _WAIT, "        token = 0\n", DI),
    Mutant("rows wait for the last call", KERNEL, _WAIT, _WAIT.replace("epoch", "epoch - 1"), DI),
    Mutant(
        "rows wait for the first experts only",
        KERNEL,
        _WAIT,
        _WAIT.replace("+ block", "+ block * 0"),
        DI,
    ),
    Mutant(
        "rows wait for the nearest source",
        KERNEL,
        "block, nearest, farthest, epoch, tile, WORLD_SIZE)",
        "block, nearest, nearest, epoch, tile, WORLD_SIZE)",
        DI,
    ),
    Mutant("a dispatch ends before its peers have begun", KERNEL, _LAST, "        pass\n", DI),
    Mutant(
        "a block is signalled by the first to have pushed",
        KERNEL,
        _COUNT,
        _COUNT.replace("sizes.num_producers - 1", "0"),
        DI + "producers",
    ),
    Mutant(
        "pushed tokens are counted without a release",
        KERNEL,
        _COUNT,
        _COUNT.replace("acq_rel", "relaxed"),
        DI + "producers",
    ),
    Mutant("a block is never signalled", KERNEL, _SIGNAL, "            pass\n", DI),
    Mutant(
        "tokens of all calls in one slot",
        KERNEL,
        "slot_offset = (epoch & 1).to",
        "slot_offset = (epoch & 0).to",
        DI,
    ),
    Mutant(
        "counters of the next call are not cleared",
        KERNEL,
        "        clear_counters(peers, epoch)\n",
        "        pass\n",
        DI,
    ),
    Mutant(
        "a dispatch clears its own counters",
        KERNEL,
        "(1 - (epoch & 1)) * SET",
        "(epoch & 1) * SET",
        DI + "producers",
    ),
    Mutant(
        "tokens into the neighbour's place",
        KERNEL,
        "slot += (step - 1) *",
        "slot += (WORLD_SIZE - 1 - step) *",
        DI,
    ),
    Mutant(
        "what came is kept from the other slot",
        ROWS,
        ") - 1) & 1).to",
        ") - 0) & 1).to",
        DI,
        count=2,
    ),
    Mutant("sorting does not wait for ids", ROUTING, _IDS, "        pass\n", RO + "few"),
    Mutant(
        "sorting waits for the ids of the last call",
        ROUTING,
        _IDS,
        _IDS.replace("epoch", "epoch - 1"),
        RO + "few",
    ),
    Mutant("ids are signalled to peers only", SORT, _SENT, _SENT.replace("True", "False"), RO),
    Mutant(
        "ids of all calls in one slot",
        ROUTING,
        "slot_offset = (epoch & 1).to",
        "slot_offset = (epoch & 0).to",
        RO + "few",
    ),
    Mutant(
        "sources in the wrong order",
        ROUTING,
        "(rank + WORLD_SIZE - block // per_source)",
        "(rank + block // per_source)",
        RO + "few",
        count=2,
    ),
    Mutant(
        "counting does not wait for ids", SORT, _COUNTED, "                pass\n", RO + "sorted"
    ),
    Mutant(
        "counting waits for the ids of the last call",
        SORT,
        _COUNTED,
        _COUNTED.replace("epoch", "epoch - 1"),
        RO + "sorted",
    ),
    Mutant(
        "sorted ids of all calls in one slot",
        SORT,
        "(epoch & 1).to",
        "(epoch & 0).to",
        RO + "sorted",
        count=2,
    ),
    Mutant(
        "counting ends the call",
        SORT,
        _KEPT,
        "    leave(peers, epoch, tl.num_programs(0))\n" + _KEPT,
        RO + "sorted",
    ),
    Mutant("a unit starts after itself", SORT, "(row < unit)", "(row <= unit)", RO + "sorted"),
)
