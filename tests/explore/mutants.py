"""Faults planted in the real source, one at a time. Exploration must find each of them.

A mutant is a text in one file of ``src/tileweave`` and the text that replaces it. ``scenarios``:
the beginning of the names of the scenarios that run the mutated lines, after which ``$`` ends the
name of one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    scenarios: str
    count: int = 1  # how often ``old`` stands in the file; all are replaced

    def apply(self, text: str) -> str:
        changed, found = re.subn(pattern(self.old), lambda _: self.new, text)
        if found != self.count:
            raise ValueError(
                f"mutant {self.name!r}: {self.file} has the text {found} times, "
                f"expected {self.count}"
            )
        return changed


def pattern(text: str) -> str:
    """A regular expression for ``text``, however a formatter breaks its argument lists."""
    found, before = [], ""
    for token in re.findall(r"\w+|\s+|[^\w\s]", text):
        if token.isspace():
            if before not in ("(", "[", ","):
                found.append(r"\s+" if token == " " else re.escape(token))
                before = token
            continue
        if token in (")", "]"):
            found.append(rf",?\s*\{token}" if before != "," else rf"\{token}")
        else:
            found.append(re.escape(token) + (r"\s*" if token in ("(", "[", ",") else ""))
        before = token
    return "".join(found)


AG = "all_gather_matmul/"
KERNEL, FUSED = "kernels/all_gather/triton.py", "ops/matmul/all_gather_matmul_fused.py"
ARRIVALS = "kernels/all_gather/arrivals.py"
WORDS, REMOTE, MATMUL, TILE = (
    "device/interpreter/words.py",
    "device/triton/remote.py",
    "device/triton/matmul.py",
    "device/triton/tiles.py",
)

RS, AR = "matmul_reduce_scatter/", "matmul_all_reduce/"
REDUCE, REDUCED, MARKED = (
    "kernels/reduce_scatter/triton.py",
    "ops/matmul/matmul_reduce_scatter_fused.py",
    "device/triton/self_signaling.py",
)
EXCHANGE = "kernels/all_reduce/collective.py"
REGISTRY = "ops/core/registry.py"
MEET = "device/triton/meet.py"

PARITY = "return 0 if instance.captured else instance.calls & 1"
BARRIER = "    barrier(peers, instance.transport.world_size, instance.transport.rank)\n"

_PUSH = (
    "        put_all(peers.slot_table, rank, C.WORLD_SIZE, slot_offset, size, x, begin, end, "
    "C.SPANS, "
    "C.PUSH_BLOCK)\n"
)
_NOTIFY = (
    "        notify_all(peers, rank * MAX_SLICES + piece, rank, epoch, C.WORLD_SIZE, C.SPANS)\n"
)
_EXACT = "unit.tile, COUNT=C.NUM_SLICES, EXACT=not C.PUSH)"
_WAIT = "token = wait(peers, signal, epoch, " + _EXACT
_PUSHED = "            await_pushed(peers, epoch, C.WORLD_SIZE)\n"
_LEAVE = "    leave(peers, epoch, num_programs)\n"
_DATA = """        if pitch == width:
            copies.append(Copy(target, 0, (end - begin) * width, start))
        else:
            copies.append(Copy(target, 0, width, start, rows=end - begin,
                               target_pitch=width, source_pitch=pitch))
"""
_MEET = "        meet(peers, rank, epoch, -1, C.WORLD_SIZE)\n"
_OPEN = "        count_in(counters + num_segments * num_programs)\n"
_ALL_WAIT = "range(1, WORLD_SIZE):\n        wait"
_NEVER = "            if 0: tl.store(counters + num_segments"
_SIGNAL = "        copies.append(instance.signal_copy(peer, instance.layout.data(rank, chunk)))\n"
_GIVE = (
    "    tl.store(partials + (base + share.program).to(tl.int64) * (TILE_M * TILE_N) + within, "
    "acc)\n"
)
_COUNT = (
    '    tl.atomic_add(counters + (base + tile - share.whole), 1, sem="release", scope="gpu")\n'
)

_OWNERS = "range(FIRST, WORLD_SIZE):\n        owner"
_PEERS = "range(1, WORLD_SIZE):\n        peer"
_OVER = "finished = slot_offset"
_CLEANED = "    tl.store(pointers, tl.zeros(value.shape, value.dtype), mask=mask)\n"
_ANY = "return acc, tl.max(tl.max(missing, axis=1), axis=0)"
_EACH = "missing = tl.max(_missing(value, mask) + 2 * overdue, axis=1)"

_STAGE = (
    "                store_rows(value, tensors.staging, staged, col, cols, mask, sizes.pitch)\n"
)
_MET = (
    "                if tile == 0:\n"
    "                    meet(peers, rank, epoch, tile, WORLD_SIZE)\n"
)
_IN = "                count_in(counters + num_programs + place * MAX_SLICES + chunk)\n"
_COUNTED = (
    "                chunk = (first_row - home * rows) // TILE_M // chunk_rows\n" + _MET + _IN
)

MUTANTS: tuple[Mutant, ...] = (
    # --- all_gather_matmul: the kernel ---
    Mutant("a tile does not wait", ARRIVALS, _WAIT, "token = 0", AG),
    Mutant(
        "a tile waits for one slice of several",
        ARRIVALS,
        _WAIT,
        _WAIT.replace("C.NUM_SLICES", "1"),
        AG + "sm",
    ),
    Mutant(
        "a tile waits for another source",
        ARRIVALS,
        _WAIT,
        _WAIT.replace("signal", "(source + 1) % 2 * MAX_SLICES"),
        AG,
    ),
    Mutant(
        "a tile waits for the next call", ARRIVALS, _WAIT, _WAIT.replace("epoch", "epoch + 1"), AG
    ),
    Mutant(
        "a tile waits for the call before", ARRIVALS, _WAIT, _WAIT.replace("epoch", "epoch - 1"), AG
    ),
    Mutant(
        "who is a call ahead is refused",
        ARRIVALS,
        _EXACT,
        _EXACT.replace("not C.PUSH", "True"),
        AG + "sm",
    ),
    Mutant(
        "a tile waits for the last source only",
        ARRIVALS,
        "range(unit.first_row // rows, last_row",
        "range(last_row // rows, last_row",
        AG + "sm, spans",
    ),
    Mutant(
        "a slice is signalled before it is stored",
        KERNEL,
        _PUSH + _NOTIFY,
        _NOTIFY + _PUSH,
        AG + "sm",
    ),
    Mutant(
        "the last slice is never signalled",
        KERNEL,
        "range(program, C.NUM_SLICES, num_producers)",
        "range(program, C.NUM_SLICES - 1, num_producers)",
        AG + "sm",
    ),
    Mutant("one slot", KERNEL, "slot = epoch & 1", "slot = epoch & 0", AG + "sm"),
    Mutant(
        "a shard is looked for in the next place",
        KERNEL,
        "place = (rank + C.WORLD_SIZE - source - 1)",
        "place = (rank + C.WORLD_SIZE - source)",
        AG,
    ),
    Mutant(
        "the gathered input is copied without a wait",
        ARRIVALS,
        "wait(peers, source * MAX_SLICES, epoch, COUNT=C.NUM_SLICES, EXACT=not C.PUSH)\n",
        "pass\n",
        AG + "sm, cut, gathered",
    ),
    Mutant(
        "the epoch may move before the last push",
        KERNEL,
        _PUSHED,
        "            pass\n",
        AG + "copy engine",
    ),
    Mutant(
        "a program leaves before the last push",
        KERNEL,
        "    if not C.PUSH:\n        if program == num",
        _LEAVE + "    if not C.PUSH:\n        if program == num",
        AG + "copy engine",
    ),
    Mutant(
        "one program leaves twice",
        KERNEL,
        _LEAVE,
        _LEAVE + "    if program == 0:\n    " + _LEAVE,
        AG,
    ),
    Mutant(
        "the epoch stands still",
        KERNEL,
        _LEAVE,
        _LEAVE.replace("num_programs", "num_programs + 1"),
        AG,
    ),
    # --- all_gather_matmul: copy engines ---
    Mutant(
        "a copied shard is signalled before it is copied",
        FUSED,
        _DATA + _SIGNAL,
        _SIGNAL + _DATA,
        AG + "copy engine",
    ),
    Mutant("a copied shard is not signalled", FUSED, _SIGNAL, "", AG + "copy engine"),
    Mutant(
        "copies to the slot of the other parity",
        FUSED,
        "call.copies[slot], source",
        "call.copies[1 - slot], source",
        AG + "copy engine",
        3,
    ),
    Mutant(
        "captured copies go before ranks have met",
        FUSED,
        "counter=gate, count=1",
        "",
        AG + "copy engine, captured",
    ),
    Mutant(
        "the gate is opened before ranks meet",
        KERNEL,
        _MEET + _OPEN,
        _OPEN + _MEET,
        AG + "copy engine, captured",
    ),
    Mutant(
        "the gate stays open",
        KERNEL,
        "            tl.store(counters + num_segments",
        _NEVER,
        AG + "copy engine, captured",
    ),
    Mutant("nobody opens the gate", KERNEL, _OPEN, "", AG + "copy engine"),
    Mutant(
        "ranks meet in one another's word",
        MEET,
        "MAX_SLICES + rank, rank",
        "MAX_SLICES + (rank + 1) % WORLD_SIZE, rank",
        AG + "copy",
    ),
    Mutant(
        "a meeting that does not wait",
        MEET,
        "        wait(signals",
        "        0 and wait(signals",
        AG + "copy engine, captured",
    ),
    Mutant(
        "a meeting with one",
        MEET,
        _ALL_WAIT,
        _ALL_WAIT.replace("WORLD_SIZE", "2"),
        AG + "copy engine, captured",
    ),
    Mutant(
        "no word for the last push",
        FUSED,
        "    copies.append(instance.signal_copy(rank, instance.layout.pushed))\n",
        "",
        AG + "copy engine",
    ),
    Mutant(
        "a signal to the wrong word",
        FUSED,
        "layout.data(rank, chunk)",
        "layout.data(peer, chunk)",
        AG + "copy engine",
    ),
    Mutant(
        "a barrier that does nothing",
        "kernels/runtime/barrier.py",
        "    meet(peers",
        "    0 and meet(peers",
        AG + "concurrent gather, captured",
    ),
    # --- the words ---
    Mutant(
        "notify without a release",
        WORDS,
        "    MEMORY.release(_value(signal), _value(epoch))",
        "    MEMORY.store(_value(signal), _value(epoch))",
        AG + "sm",
    ),
    Mutant("wait without an acquire", WORDS, "MEMORY.acquire(base", "MEMORY.load(base", AG),
    Mutant("wait is satisfied one call early", WORDS, "return lag < 0", "return lag < -1", AG),
    Mutant("wait is satisfied one call late", WORDS, "return lag < 0", "return lag <= 0", AG),
    Mutant("wait wants the epoch itself", WORDS, "return lag < 0", "return lag != 0", AG),
    Mutant(
        "wait compares across the wrap",
        WORDS,
        "    lag = wrapped(seen - expected)\n",
        "    lag = seen - expected\n",
        AG,
    ),
    Mutant(
        "wait forgets the last signal",
        WORDS,
        "range(index, index + number)",
        "range(index, index + max(number - 1, 1))",
        AG + "sm",
    ),
    Mutant("notify_all forgets a peer", WORDS, "else 1, size)", "else 1, size - 1)", AG + "sm"),
    Mutant(
        "the count of programs is not reset",
        WORDS,
        "    MEMORY.store(block + 4 * protocol.LEAVERS, 0)\n",
        "",
        AG,
    ),
    Mutant(
        "the first to leave moves the epoch",
        WORDS,
        "left == _value(num_programs) - 1",
        "left == 0",
        AG,
    ),
    Mutant(
        "leaving is not atomic",
        WORDS,
        "MEMORY.add(_value(control) + 4 * protocol.LEAVERS, 1)",
        "(n := MEMORY.load(_value(control) + 4), MEMORY.store(_value(control) + 4, n + 1))[0]",
        AG,
    ),
    Mutant(
        "put_all to the wrong peer",
        REMOTE,
        "symm_at(table, (rank + i) %",
        "symm_at(table, (rank + i + 1) %",
        AG + "sm",
    ),
    Mutant(
        "put_all forgets the last element",
        REMOTE,
        "        mask = index < end\n        value",
        "        mask = index < end - 1\n        value",
        AG + "sm",
    ),
    Mutant(
        "put_all into the neighbour's place",
        REMOTE,
        "target += (i - 1) * size",
        "target += (i % 2) * size",
        AG + "sm",
    ),
    # --- cut tiles ---
    Mutant(
        "a part is counted before it is stored",
        MATMUL,
        _GIVE + "    tl.debug_barrier()\n" + _COUNT,
        _COUNT + _GIVE,
        AG + "sm, cut",
    ),
    Mutant(
        "a part is counted without a release",
        MATMUL,
        'sem="release"',
        'sem="relaxed"',
        AG + "sm, cut",
    ),
    Mutant(
        "parts are taken without an acquire",
        MATMUL,
        'sem="acquire"',
        'sem="relaxed"',
        AG + "sm, cut",
    ),
    Mutant(
        "parts are taken one too early",
        MATMUL,
        'scope="gpu") < helpers:',
        'scope="gpu") < helpers - 1:',
        AG + "sm, cut",
    ),
    Mutant(
        "the count of parts is not reset",
        MATMUL,
        "    tl.store(counters + cut_tile, 0)\n",
        "",
        AG + "sm, cut",
    ),
    Mutant(
        "owners wait for higher programs",
        TILE,
        "(num_programs // team - 1 - program // team) * span",
        "(program // team) * span",
        AG + "sm, cut",
    ),
    # --- what goes between ranks beside the library's matmul ---
    Mutant("one slot for shards", EXCHANGE, "(epoch & 1)", "(epoch & 0)", AR + "library"),
    Mutant(
        "shards into the neighbour's place",
        EXCHANGE,
        "(source > reader)",
        "(source < reader)",
        RS + "library",
    ),
    Mutant(
        "the last peer gets no partials",
        EXCHANGE,
        _OWNERS,
        _OWNERS.replace("SIZE)", "SIZE - 1)"),
        RS + "library",
    ),
    Mutant(
        "the last peer gets no shard",
        EXCHANGE,
        _PEERS,
        _PEERS.replace("SIZE)", "SIZE - 1)"),
        AG + "library",
    ),
    Mutant(
        "a shard is taken for the neighbour's",
        EXCHANGE,
        "(peer >= rank)",
        "(peer > rank)",
        AG + "library",
    ),
    Mutant(
        "finished shards over partials",
        EXCHANGE,
        "finished = slot_offset + PLACES * size",
        _OVER,
        AR + "library",
    ),
    Mutant("a place is not cleaned", MARKED, _CLEANED, "", AG + "library"),
    Mutant(
        "shards are taken before they have all come",
        MARKED,
        _EACH,
        _EACH.replace("max", "min"),
        AG + "library",
    ),
    # --- matmul_reduce_scatter, matmul_all_reduce ---
    Mutant("one slot for marked tiles", REDUCE, "slot = epoch & 1", "slot = epoch & 0", RS + "sm"),
    Mutant(
        "partials into the neighbour's place",
        REDUCE,
        "place = rank - (rank > owner)",
        "place = rank - (rank < owner)",
        RS + "sm",
    ),
    Mutant(
        "partials to the wrong owner",
        REDUCE,
        "slots_at(peers, owner, dtype",
        "slots_at(peers, (owner + 1) % WORLD_SIZE, dtype",
        RS + "sm",
    ),
    Mutant(
        "a partial is counted before it is stored",
        REDUCE,
        _STAGE + _COUNTED,
        _COUNTED + _STAGE,
        RS + "copy engine",
    ),
    Mutant(
        "a partial is not counted",
        REDUCE,
        "                count_in(counters",
        "                0 and count_in(counters",
        RS + "copy engine",
    ),
    Mutant(
        "own tiles do not wait for their chunk",
        REDUCE,
        "        signal.wait(peers",
        "        0 and signal.wait(peers",
        RS + "copy engine",
    ),
    Mutant(
        "own tiles wait for chunk 0",
        REDUCE,
        "wait(peers.signals + chunk,",
        "wait(peers.signals,",
        RS + "copy engine",
    ),
    Mutant(
        "own tiles wait for one peer",
        REDUCE,
        "for i in tl.static_range(1, WORLD_SIZE):\n        signal.wait",
        "for i in tl.static_range(1, 2):\n        signal.wait",
        RS + "copy engine",
    ),
    Mutant(
        "counts move before the last push",
        REDUCE,
        "    await_pushed(peers, epoch, WORLD_SIZE)\n",
        "",
        RS + "copy engine",
    ),
    Mutant(
        "counts of chunks are not reset",
        REDUCE,
        "    tl.store(counters + words",
        "    0 and tl.store(counters + words",
        RS + "copy engine",
    ),
    Mutant(
        "the first part is taken for all",
        MARKED,
        "        value = tl.load(pointers + i * stride, mask=mask, volatile=True)\n        missing",
        "        value = tl.load(pointers, mask=mask, volatile=True)\n        missing",
        RS + "sm",
    ),
    Mutant(
        "taken before all has come",
        MARKED,
        _ANY,
        _ANY.replace("tl.max(tl.max", "tl.max(tl.min"),
        RS + "sm",
    ),
    Mutant(
        "taken without a look",
        MARKED,
        "    if missing > 0:\n        started",
        "    if missing < 0:\n        started",
        RS + "sm",
    ),
    Mutant(
        "zeros are not written back",
        MARKED,
        "        tl.store(pointers + i * stride, tl.zeros",
        "        0 and tl.store(pointers + i * stride, tl.zeros",
        RS + "sm",
    ),
    Mutant(
        "zeros are written back for one part",
        MARKED,
        "    for i in tl.static_range(COUNT):\n        tl.store",
        "    for i in tl.static_range(1):\n        tl.store",
        RS + "sm",
    ),
    Mutant(
        "a zero travels as zero",
        MARKED,
        "tl.where(bits == 0, tl.full([], -(2**31), tl.int32), bits)",
        "bits",
        RS + "sm",
    ),
    Mutant(
        "chunks go before they are counted",
        REDUCED,
        "counter, count))",
        "counter, 0))",
        RS + "copy engine",
    ),
    Mutant(
        "chunks go one tile early",
        REDUCED,
        "(end - first) * s.tile_cols, from",
        "(end - first) * s.tile_cols - 1, from",
        RS + "copy engine",
    ),
    Mutant(
        "captured chunks go before ranks have met", REDUCE, _MET, "", RS + "copy engine, captured"
    ),
    Mutant(
        "ranks meet when a chunk is counted",
        REDUCE,
        _MET + _IN,
        _IN + _MET,
        RS + "copy engine, captured",
    ),
    Mutant(
        "a chunk is not signalled",
        REDUCED,
        "        copies.append(instance.signal_copy(owner, "
        "instance.layout.data(s.rank, chunk), aside=True))\n",
        "",
        RS + "copy engine",
    ),
)
