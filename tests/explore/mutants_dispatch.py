"""Faults planted in routing plans and dispatch_grouped_matmul; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import Mutant

DI, RO = "dispatch_grouped_matmul/", "moe_routing/"
KERNEL, ROUTING, ROWS = (
    "kernels/dispatch_grouped_matmul.py", "kernels/moe_routing.py", "kernels/expert_rows.py",
)  # fmt: skip

_WAIT = "        token = wait(signals, 1, epoch, source * MAX_BLOCKS + block, tile, control, report)\n"
_LAST = "        wait_steps(signals, blocks - 1, 1, WORLD_SIZE - 1, rank, epoch, -1, control, report, WORLD_SIZE)\n"
_COUNT = '        if tl.atomic_add(pushed, 1, sem="acq_rel", scope="gpu") == num_producers - 1:\n'
_SIGNAL = "            notify_all(signal_table, rank * MAX_BLOCKS + block, rank, epoch, WORLD_SIZE, False)\n"
_IDS = "        wait(signals, SLICES, epoch, source * MAX_SLICES, -1, control, report)\n"
_SENT = "    notify_all(signal_table, rank * MAX_SLICES + piece, rank, epoch, WORLD_SIZE, True)\n"

MUTANTS: tuple[Mutant, ...] = (
    Mutant("rows do not wait for their sources", KERNEL, _WAIT, "        token = 0\n", DI),
    Mutant("rows wait for the last call", KERNEL, _WAIT, _WAIT.replace("epoch", "epoch - 1"), DI),
    Mutant("rows wait for the first experts only", KERNEL, _WAIT, _WAIT.replace("+ block", "+ block * 0"), DI),
    Mutant("rows wait for the nearest source", KERNEL, "nearest, farthest, rank, epoch, tile", "nearest, nearest, rank, epoch, tile", DI),
    Mutant("a dispatch ends before its peers have begun", KERNEL, _LAST, "        pass\n", DI),
    Mutant("a block is signalled by the first to have pushed", KERNEL, _COUNT, _COUNT.replace("num_producers - 1", "0"), DI + "producers"),
    Mutant("pushed tokens are counted without a release", KERNEL, _COUNT, _COUNT.replace("acq_rel", "relaxed"), DI + "producers"),
    Mutant("a block is never signalled", KERNEL, _SIGNAL, "            pass\n", DI),
    Mutant("tokens of all calls in one slot", KERNEL, "slot_offset = (epoch & 1).to", "slot_offset = (epoch & 0).to", DI),
    Mutant("counters of the next call are not cleared", KERNEL, "        clear_counters(counters, epoch)\n", "        pass\n", DI),
    Mutant("counters of this call are cleared", KERNEL, "(1 - (epoch & 1)) * SET", "(epoch & 1) * SET", DI + "producers"),
    Mutant("tokens into the neighbour's place", KERNEL, "slot += (step - 1) *", "slot += (WORLD_SIZE - 1 - step) *", DI),
    Mutant("what came is kept from the other slot", ROWS, "(load_epoch(control) - 1) & 1", "load_epoch(control) & 1", DI),
    Mutant("sorting does not wait for ids", ROUTING, _IDS, "        pass\n", RO),
    Mutant("sorting waits for the ids of the last call", ROUTING, _IDS, _IDS.replace("epoch", "epoch - 1"), RO),
    Mutant("ids are signalled to peers only", ROUTING, _SENT, _SENT.replace("True", "False"), RO),
    Mutant("ids of all calls in one slot", ROUTING, "slot_offset = (epoch & 1).to", "slot_offset = (epoch & 0).to", RO),
    Mutant("own entries do not come first", ROUTING, "(rank + WORLD_SIZE - block // per_source)", "(block // per_source)", RO, count=2),
)  # fmt: skip
