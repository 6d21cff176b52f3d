"""Faults planted in embedding_bag_all_to_all and its backward; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import Mutant

EB = "embedding_bag_all_to_all/"
KERNEL, REGIONS = "kernels/embedding/bag_all_to_all.py", "transport/regions.py"

_ANNOUNCE = (
    "    for step in tl.static_range(1, WORLD_SIZE):\n"
    "        signals = signals_at(peers, (rank + step) % WORLD_SIZE)\n"
    "        tl.store(signals + rank * MAX_SLICES + REGION, region)\n"
)
_READY = "    notify_all(peers, rank * MAX_SLICES + READY, rank, epoch, WORLD_SIZE, False)\n"
_WAIT = (
    "                    wait(peers, peer * MAX_SLICES + READY, epoch, ticket, LIMIT=MEETING_US)\n"
)
_DONE = "            wait(peers, source * MAX_SLICES + DONE, epoch)\n"
_CLEAR = "    tl.store(peers.counters + (1 - (epoch & 1)) * 2 + {}, 0)\n"
_LOOP = "    while ticket < total:\n"
_LAST = "== num_programs - 1:\n        index"
_PASS = "    count_passed(peers, rank, epoch, num_programs, WORLD_SIZE)\n    passed += 1\n"

TG = "embedding_bag_all_to_all_backward/"
PUSH, SUMS = "kernels/embedding/gradient.py", "kernels/embedding/table_sums.py"
_HERE = "                wait_here(peers, peers.counters, group + 1, ARRIVED, table, PUSHED_US)\n"
_OF_ALL = "        for source in tl.static_range(WORLD_SIZE):\n"
_PEER = "            wait(peers, peer * MAX_SLICES + READY, epoch, ticket, LIMIT=MEETING_US)\n"
_FOR_ALL = "wait(peers, peer * MAX_SLICES + READY, epoch, -1, LIMIT=MEETING_US)"
ONE = TG + "of one rank"
_ZERO = (
    "        other = peers.counters + (1 - (epoch & 1)) * SET\n"
    "        tl.store(other + tl.arange(0, SET), tl.zeros((SET,), tl.int32))\n"
)
_SAYS = "    if stored + tickets == all_tickets:\n"
_COUNT = "                count_group(peers, rank, group, stored,"
_TOLD = (
    _SAYS
    + "        index = rank * MAX_SLICES + DONE + group\n"
    + "        notify_all(peers, index, rank, call_done(peers, epoch), WORLD_SIZE, True)"
)
BY_COPIES, COPIES = TG + "groups by copy engines", "ops/embedding/bag_all_to_all_fused.py"
ALONE = TG + "alone$"
NINE = TG + "nine tables by copy engines"
_GROUPS = "    for group in range(0, GROUPS):\n        for source"
_MET = "        await_all(peers, rank, epoch, -1, WORLD_SIZE)\n"
_PUSHED = "        await_pushed(peers, epoch, WORLD_SIZE)\n"
_SENT = (
    "        copies.append(instance.signal_copy(owner, instance.layout.data(rank, DONE.value + "
    "group)))\n"
)
_SHUT = "        tl.store(peers.counters + GATE, 0)\n"

MUTANTS: tuple[Mutant, ...] = (
    Mutant("sums wait for nothing", SUMS, _HERE, "                pass\n", TG),
    Mutant("sums wait for the group before", SUMS, _HERE, _HERE.replace("group + 1", "group"), TG),
    Mutant("sums think all groups are here", SUMS, "seen = group + 1", "seen = GROUPS", TG),
    Mutant(
        "sums read rows of peers as their own",
        SUMS,
        "(mine < source.rows_here)",
        "(mine <= source.rows_here)",
        TG,
    ),
    Mutant(
        "sums read own rows from the slot", SUMS, "    if OWN:\n", "    if OWN and False:\n", TG
    ),
    Mutant("the watcher leaves out a source", PUSH, _OF_ALL, _OF_ALL.replace("(", "(1, "), TG),
    Mutant("the watcher is a group ahead", PUSH, "ARRIVED, group + 1,", "ARRIVED, group + 2,", TG),
    Mutant("the watcher says so without a release", PUSH, 'sem="release"', 'sem="relaxed"', TG),
    Mutant(
        "groups that arrived are not forgotten",
        SUMS,
        "            tl.store(arrived, 0)\n",
        "            pass\n",
        TG,
    ),
    Mutant("gradients do not wait for the slot", PUSH, _PEER, "            pass\n", TG),
    Mutant(
        "gradients wait for the last call's slot",
        PUSH,
        _PEER,
        _PEER.replace("epoch", "epoch - 1"),
        TG,
    ),
    Mutant("a group is counted without a release", PUSH, 'sem="acq_rel"', 'sem="relaxed"', ALONE),
    Mutant("the first to store a group says done", PUSH, _SAYS, "    if stored == 0:\n", ALONE),
    Mutant(
        "a group's end is never said",
        PUSH,
        _SAYS,
        _SAYS.replace("all_tickets", "all_tickets + 1"),
        TG,
    ),
    Mutant(
        "a group is counted before its last ticket",
        PUSH,
        _COUNT,
        _COUNT.replace("stored,", "stored + 1,"),
        TG,
    ),
    Mutant(
        "a ticket is counted for the next group",
        PUSH,
        "            stored = rank * 0\n",
        "            stored += 0\n",
        TG,
    ),
    Mutant("a group without tickets is not said to be there", PUSH, "& 1 == 1:", "& 1 == 2:", TG),
    Mutant(
        "a program without tickets waits for the next call",
        PUSH,
        _FOR_ALL,
        _FOR_ALL.replace("epoch", "epoch + 1"),
        ONE,
    ),
    Mutant("counts of groups are not cleared", PUSH, _ZERO, "        pass\n", TG),
    Mutant(
        "counts of this call's groups are cleared",
        PUSH,
        _ZERO,
        _ZERO.replace("(1 - (epoch & 1))", "(epoch & 1)"),
        TG,
    ),
    Mutant(
        "own gradients are not said to be there", PUSH, _TOLD, _TOLD.replace("True", "False"), TG
    ),
    Mutant("copies of gradients do not wait for all ranks", PUSH, _MET, "", BY_COPIES),
    Mutant(
        "copies of gradients wait for nothing",
        COPIES,
        "GATE.value, count=1)",
        "GATE.value, count=0)",
        BY_COPIES,
    ),
    Mutant("the watcher leaves before its copies are done", PUSH, _PUSHED, "", BY_COPIES),
    Mutant(
        "the watcher waits for two groups alone",
        PUSH,
        _OF_ALL,
        _OF_ALL.replace("E)", "E if group < 2 else 0)"),
        NINE,
    ),
    Mutant(
        "the last group is never said to be there",
        PUSH,
        _GROUPS,
        _GROUPS.replace("GROUPS)", "GROUPS - 1)"),
        NINE,
    ),
    Mutant("the gate of copies stays open", PUSH, _SHUT, "", BY_COPIES),
    Mutant(
        "signals of gradients go before them",
        COPIES,
        _SENT,
        _SENT.replace("append(", "insert(0, "),
        BY_COPIES,
    ),
    Mutant(
        "sums look for other groups than travel",
        SUMS,
        "1 + (table - 1) * (GROUPS - 1)",
        "(table - 1) * (GROUPS - 1)",
        BY_COPIES,
    ),
    Mutant(
        "a region is announced after its signal",
        KERNEL,
        _ANNOUNCE + _READY,
        _READY + _ANNOUNCE,
        EB,
    ),
    Mutant("stores do not wait for a region", KERNEL, _WAIT, "                    pass\n", EB),
    Mutant(
        "stores wait for the last call's region",
        KERNEL,
        _WAIT,
        _WAIT.replace("epoch", "epoch - 1"),
        EB,
    ),
    Mutant("results do not wait for peers", KERNEL, _DONE, "            pass\n", EB),
    Mutant(
        "results wait for one peer", KERNEL, _DONE, "            if step == 1:\n    " + _DONE, EB
    ),
    Mutant("done before the last store", KERNEL, _LOOP, _PASS + _LOOP, EB),
    Mutant("passing is counted without a release", KERNEL, 'sem="acq_rel"', 'sem="relaxed"', EB),
    Mutant(
        "the first to pass says done", KERNEL, _LAST, _LAST.replace("num_programs - 1", "0"), EB
    ),
    Mutant("done is never said", KERNEL, _LAST, _LAST.replace(" - 1", ""), EB),
    Mutant("tickets are not cleared", KERNEL, _CLEAR.format("TICKETS"), "", EB + "tickets"),
    Mutant(
        "counts of programs that passed are not cleared", KERNEL, _CLEAR.format("PASSED"), "", EB
    ),
    Mutant(
        "counters of this call are cleared",
        KERNEL,
        "counters + (1 - (epoch & 1)) * 2",
        "counters + (epoch & 1) * 2",
        EB,
        count=2,
    ),
    Mutant(
        "vectors into the wrong region",
        KERNEL,
        "place.to(tl.int64) * peers.slot_size",
        "region.to(tl.int64) * peers.slot_size",
        EB + "held",
    ),
    Mutant(
        "a held region is given out again", REGIONS, "if k not in self.held and", "if", EB + "held"
    ),
)
