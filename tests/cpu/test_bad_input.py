"""Wrong inputs raise and say so, missing peers lead to timeouts, and dead ranks leave nothing
behind."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support import parity
from tests.support.calls import SLACK, refusal
from tests.support.matmul_cases import AG, AR, IN, OUT, RS, Case, prepare
from tests.support.worlds import Member, World, Worlds, one_shot

import tileweave as tw
from tileweave.ops.core.registry import name_of
from tileweave.planning.problem import MatmulConfig
from tileweave.transport import host_memory

SECONDS = 2.0  # TILEWEAVE_TIMEOUT of the worlds in which waits time out
CASE = Case(18, 18, 40, bias=True)
SM = MatmulConfig("triton", "sm", 16, 16, 16, 1, 4, group_m=2, num_slices=4, num_producers=1)
COPY_ENGINE = MatmulConfig(
    "triton", "copy_engine", 16, 16, 16, 1, 4, group_m=2, num_slices=4, num_producers=1
)
transports = pytest.mark.parametrize(
    "config", [SM, COPY_ENGINE], ids=lambda config: config.transport
)


# --- Wrong on one rank: raised there, before anything is sent ---

M, K, N = 4, 8, 6


def x() -> torch.Tensor:
    return torch.randn(M, K)


def w() -> torch.Tensor:
    return torch.randn(N, K)


Call = Callable[[int], object]
shared = torch.zeros(256)


def into_input(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, size: int) -> object:
    """A result in the storage of an input, also where they do not overlap."""
    return tw.all_gather_matmul(x, w, bias, out=shared[80 : 80 + size * M * N].view(size * M, N))


WRONG: dict[str, tuple[Call, str]] = {
    "x_and_w_differ_in_dtype": (
        lambda size: tw.all_gather_matmul(x().half(), w()),
        "float16.*float32",
    ),
    "bias_differs_in_dtype": (
        lambda size: tw.all_gather_matmul(x(), w(), torch.zeros(N).half()),
        "float16",
    ),
    "out_differs_in_dtype": (
        lambda size: tw.all_gather_matmul(x(), w(), out=torch.zeros(size * M, N).half()),
        "dtype",
    ),
    "float64": (lambda size: tw.all_gather_matmul(x().double(), w().double()), "float64.*float16"),
    "int32": (lambda size: tw.all_gather_matmul(x().int(), w().int()), "int32"),
    "complex": (lambda size: tw.all_gather_matmul(x().cfloat(), w().cfloat()), "complex64"),
    "k_differs": (lambda size: tw.all_gather_matmul(x(), torch.zeros(N, K + 1)), "4, 8.*6, 9"),
    "w_is_transposed": (
        lambda size: tw.all_gather_matmul(x(), torch.zeros(K, N)),
        r"Linear layout \[n, K\]",
    ),
    "x_has_one_dimension": (lambda size: tw.all_gather_matmul(torch.zeros(K), w()), "(8,)"),
    "w_has_one_dimension": (lambda size: tw.all_gather_matmul(x(), torch.zeros(K)), "(8,)"),
    "w_has_three_dimensions": (
        lambda size: tw.all_gather_matmul(x(), torch.zeros(1, N, K)),
        "1, 6, 8",
    ),
    "rows_of_w_are_strided": (
        lambda size: tw.all_gather_matmul(x(), torch.zeros(N, 2 * K)[:, ::2]),
        "contiguous",
    ),
    "bias_is_too_long": (lambda size: tw.all_gather_matmul(x(), w(), torch.zeros(N + 1)), "7,.*6,"),
    "bias_has_two_dimensions": (
        lambda size: tw.all_gather_matmul(x(), w(), torch.zeros(1, N)),
        "1, 6",
    ),
    "bias_is_strided": (
        lambda size: tw.all_gather_matmul(x(), w(), torch.zeros(2 * N)[::2]),
        "contiguous",
    ),
    "out_is_not_gathered": (
        lambda size: tw.all_gather_matmul(x(), w(), out=torch.zeros(M, N)),
        "out",
    ),
    "out_is_flat": (
        lambda size: tw.all_gather_matmul(x(), w(), out=torch.zeros(size * M * N)),
        "out",
    ),
    "out_is_a_scalar": (lambda size: tw.all_gather_matmul(x(), w(), out=torch.zeros(())), "out"),
    "out_is_strided": (
        lambda size: tw.all_gather_matmul(x(), w(), out=torch.zeros(N, size * M).t()),
        "contiguous",
    ),
    "out_with_three_dimensions_is_permuted": (
        lambda size: tw.all_gather_matmul(
            torch.zeros(M, 3, K), w(), out=torch.zeros(3, size * M, N).transpose(0, 1)
        ),
        "contiguous",
    ),
    "out_lost_a_dimension": (
        lambda size: tw.all_gather_matmul(
            torch.zeros(M, 3, K), w(), out=torch.zeros(size * M * 3, N)
        ),
        "out",
    ),
    "out_is_x": (
        lambda size: into_input(shared[: M * K].view(M, K), w(), None, size),
        "memory of its own",
    ),
    "out_is_w": (
        lambda size: into_input(x(), shared[-N * K :].view(N, K), None, size),
        "memory of its own",
    ),
    "out_is_bias": (lambda size: into_input(x(), w(), shared[-N:], size), "memory of its own"),
    "out_and_gathered": (
        lambda size: tw.all_gather_matmul(
            x(), w(), out=torch.zeros(size * M, N), return_gathered=True
        ),
        "return_gathered",
    ),
    "out_and_gradients": (
        lambda size: tw.all_gather_matmul(x(), w().requires_grad_(), out=torch.zeros(size * M, N)),
        "grad",
    ),
    "no_such_group": (
        lambda size: tw.all_gather_matmul(x(), w(), group="no such group"),
        "no such group",
    ),
}


def ask(me: Member, name: str) -> str:
    call, pattern = WRONG[name]
    with pytest.raises(tw.InputError, match=f"(?s){pattern}") as caught:
        call(me.world_size)
    return str(caught.value)


def ask_alone(me: Member, name: str) -> str:
    """The other ranks do not call: an error must be found before anything is sent."""
    text = ask(me, name) if me.rank == me.world_size - 1 else ""
    tw.close()  # else peers would learn of the refusal
    return text


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(worlds: Worlds, name: str) -> None:
    text = worlds("gloo", 2).run(ask_alone, name)[-1]
    parts = [text.index(part) for part in ("asked: ", "allowed: ", "remedy: ")]
    assert parts == sorted(parts), text


def a_group_of_others(me: Member) -> None:
    me.group(0, 1)
    if me.rank == 2:
        with pytest.raises(tw.InputError, match=r"asked: .*allowed: .*remedy: "):
            tw.all_gather_matmul(x(), w(), group=dist.GroupMember.NON_GROUP_MEMBER)
    me.barrier()


def test_group_without_this_rank_is_refused(worlds: Worlds) -> None:
    worlds("gloo", 3).run(a_group_of_others)


def still_usable(me: Member) -> None:
    """Errors on all ranks leave nothing half done. ``test_call_breaks_off.py`` tests errors of a
    single rank."""
    for name in ("k_differs", "out_is_strided", "float64"):
        ask(me, name)
    later = prepare(CASE, me.rank, me.world_size, me.device, 1)
    later.verify("after errors", tw.all_gather_matmul(later.x, later.w, later.bias))


def test_calls_work_after_errors(world: World) -> None:
    world.run(still_usable)


# --- Ranks that disagree, with TILEWEAVE_DEBUG=1 ---

ODD: dict[str, Callable[[], object]] = {
    "rows": lambda: tw.all_gather_matmul(torch.zeros(M + 1, K), w()),
    "columns": lambda: tw.all_gather_matmul(x(), torch.zeros(N + 1, K)),
    "dtype": lambda: tw.all_gather_matmul(x().half(), w().half()),
    "gathered": lambda: tw.all_gather_matmul(x(), w(), return_gathered=True),
}


def disagree(me: Member, name: str, odd: int) -> str:
    with mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1"):
        agreed = prepare(CASE, me.rank, me.world_size, me.device, 2)
        agreed.verify("all agree", tw.all_gather_matmul(agreed.x, agreed.w, agreed.bias))
        with pytest.raises(tw.RankMismatchError) as caught:
            ODD[name]() if me.rank == odd else tw.all_gather_matmul(x(), w())
        agreed.verify("all agree again", tw.all_gather_matmul(agreed.x, agreed.w, agreed.bias))
    return str(caught.value)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("name", ODD)
def test_mismatched_calls_raise_on_every_rank(worlds: Worlds, name: str, odd: int) -> None:
    texts = worlds("gloo", 3).run(disagree, name, odd)
    assert len(set(texts)) == 1, "the same error on every rank"
    assert f"rank {odd}" in texts[0]
    assert all(f"rank {other}" not in texts[0] for other in range(3) if other != odd)
    assert all(part in texts[0] for part in ("asked: ", "allowed: ", "remedy: "))


# --- One rank refuses its own arguments, with TILEWEAVE_DEBUG=1: all raise at once ---

ROWS = {AG: 2 * M, RS: M // 2}  # shapes of a result of two ranks; of other M
WAYS: dict[str, dict[str, int]] = {op: {"scatter_dim": 0, "gather_dim": 0} for op in (OUT, IN)}
ONE_BUFFER = torch.zeros(256)

# indexed by whether this rank differs from the others
BROKEN: dict[str, Callable[[bool, int], dict[str, torch.Tensor]]] = {
    "x_of_one_dimension": lambda odd, _: {"x": torch.zeros(K) if odd else x()},
    "w_of_another_depth": lambda odd, _: {"w": torch.zeros(N, K + odd)},
    "w_in_another_dtype": lambda odd, _: {"w": w().half() if odd else w()},
    "bias_is_strided": lambda odd, _: {"bias": torch.zeros(2 * N)[::2] if odd else torch.zeros(N)},
    "out_of_another_shape": lambda odd, rows: {"out": torch.zeros(rows + odd, N)},
    "out_of_another_number_of_dimensions": lambda odd, rows: {
        "out": torch.zeros((1, rows, N)[1 - odd :])
    },
    "out_in_the_storage_of_x": lambda odd, rows: {
        "x": ONE_BUFFER[: M * K].view(M, K) if odd else x(),
        "out": ONE_BUFFER[-rows * N :].view(rows, N),
    },
}


def refuse_together(me: Member, op: str) -> dict[str, str]:
    """The error that each mistake of rank 1 alone raises on this rank."""
    said = {}
    with mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1", TILEWEAVE_TIMEOUT="3"):
        for name, given in BROKEN.items():
            odd, rows = me.rank == 1, ROWS.get(op, M)
            said[name] = refusal(
                getattr(tw, op), **{"x": x(), "w": w(), **WAYS.get(op, {}), **given(odd, rows)}
            )
            if "PeerTimeout" in said[name]:
                tw.close()
            me.barrier()
        assert not refusal(
            getattr(tw, op), torch.ones(M, K), torch.ones(N, K), **WAYS.get(op, {})
        ), "after all of them"
    return said


@pytest.mark.parametrize("op", [AG, RS, AR, OUT, IN])
def test_all_ranks_raise_where_one_refuses(worlds: Worlds, op: str) -> None:
    other, own = worlds("gloo", 2).run(refuse_together, op)
    for name in BROKEN:
        assert own[name].startswith("InputError"), (name, own[name])
        assert other[name].startswith("RankMismatchError"), (name, other[name])
        assert "rank 1" in other[name] and "refused" in other[name], (name, other[name])
        assert all(
            part in text
            for part in ("asked: ", "allowed: ", "remedy: ")
            for text in (own[name], other[name])
        )


# --- Absent peers ---


def call_after(
    me: Member, good_calls: int, absent: int, config: MatmulConfig | None, debug: bool
) -> dict | None:
    """Make some good calls, then one that ``absent`` skips. Return what the others see, and after
    how long."""
    group = dist.group.WORLD
    for n in range(good_calls):
        call = prepare(CASE, me.rank, me.world_size, me.device, n)
        parity.run(call, group, config)
        call.verify(f"call {n}")
    me.barrier()
    if me.rank == absent:
        time.sleep(SECONDS + SLACK)
        return None
    os.environ["TILEWEAVE_DEBUG"] = "1" if debug else "0"
    call = prepare(CASE, me.rank, me.world_size, me.device, 99)
    started = time.monotonic()

    def ask() -> None:
        if config is None:
            tw.all_gather_matmul(call.x, call.w, call.bias)
        else:
            parity.run(call, group, config)

    with pytest.raises(tw.PeerTimeout) as caught:
        ask()
    taken = time.monotonic() - started
    if good_calls and not debug:
        for again in (tw.synchronize, ask):
            with pytest.raises(tw.PeerTimeout):
                again()
    tw.close()
    tw.synchronize()
    error = caught.value
    return {
        "taken": taken,
        "op": error.op,
        "rank": error.rank,
        "peer": error.peer,
        "lag": error.expected - error.seen,
    }


def check_timed_out(ends: list, absent: int) -> list[dict]:
    found = []
    for rank, end in enumerate(ends):
        assert end.exit_code == 0, f"rank {rank} exited with {end.exit_code}: {end.answer}"
        if rank != absent:
            assert end.value["taken"] < SECONDS + SLACK, f"rank {rank}: {end.value}"
            assert end.value["rank"] == rank
            found.append(end.value)
    return found


@transports
def test_a_peer_that_stops_calling(config: MatmulConfig) -> None:
    extra = {"TILEWEAVE_TIMEOUT": str(SECONDS)}
    for seen in check_timed_out(
        one_shot("gloo", 3, call_after, 2, 1, config, False, extra=extra), 1
    ):
        assert (seen["op"], seen["peer"], seen["lag"]) == ("all_gather_matmul", 1, 1)
        assert seen["taken"] >= SECONDS


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_a_peer_that_never_calls(debug: bool) -> None:
    """The first call is collective on the host: that wait is bounded, too."""
    extra = {"TILEWEAVE_TIMEOUT": str(SECONDS)}
    check_timed_out(one_shot("gloo", 3, call_after, 0, 2, None, debug, extra=extra), 2)


# --- Ranks that die ---


def die_inside(me: Member, victim: int, event: str, config: MatmulConfig) -> str | None:
    """After two good calls ``victim`` is killed inside a call, at ``event``. The others must
    end."""
    from tileweave.device.interpreter.words import OBSERVERS

    group = dist.group.WORLD
    for n in range(2):
        parity.run(prepare(CASE, me.rank, me.world_size, me.device, n), group, config)
    me.barrier()
    if me.rank == victim:
        OBSERVERS.append(
            lambda seen, details: os.kill(os.getpid(), signal.SIGKILL) if seen == event else None
        )
    try:
        # a rank that was signalled before the end may finish that call, and at most one more
        for n in range(2, 6):
            parity.run(prepare(CASE, me.rank, me.world_size, me.device, n), group, config)
    except tw.PeerTimeout as error:
        tw.close()
        return f"{error.peer}"
    return None


@pytest.mark.parametrize(
    ("event", "config"),
    [("notify", SM), ("wait", SM), ("waited", COPY_ENGINE)],
    ids=lambda value: getattr(value, "transport", value),
)
def test_killed_rank(event: str, config: MatmulConfig) -> None:
    ends = one_shot(
        "gloo",
        3,
        die_inside,
        1,
        event,
        config,
        extra={"TILEWEAVE_TIMEOUT": str(SECONDS)},
        timeout=40,
    )
    assert ends[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert ends[rank].exit_code == 0, ends[rank].answer
        assert ends[rank].value is not None, f"rank {rank} never noticed"
    assert "1" in (ends[0].value, ends[2].value), (
        "the first rank that waits for the dead one names it"
    )


# --- Leftovers ---


def shared_memory(me: Member) -> None:
    """A buffer is accessible to its ranks only: it has an unguessable token, cannot be truncated,
    and is in no directory."""
    tw.close()
    group = dist.group.WORLD
    seen: list[tuple[str, int, int]] = []
    make = host_memory._make

    def looking(token: str, nbytes: int) -> int:
        descriptor = make(token, nbytes)
        link = os.readlink(f"/proc/self/fd/{descriptor}")
        seen.append(
            (link, stat.S_IMODE(os.fstat(descriptor).st_mode), os.fstat(descriptor).st_nlink)
        )
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        return descriptor

    with mock.patch.object(host_memory, "_make", looking):
        call = prepare(CASE, me.rank, me.world_size, me.device, 0)
        parity.run(call, group, SM)
        call.verify("first call")
    assert len(seen) == 3, "ledger, signals and slots"
    for link, mode, links in seen:
        assert link.startswith("/memfd:tileweave-")
        assert len(link.partition("-")[2].split()[0]) == 48, "24 random bytes"
        assert (mode, links) == (0o600, 0), f"mode {mode:o}, {links} names"
    assert len({link for link, _, _ in seen}) == 3
    me.barrier()
    tw.close()


def test_shared_memory(world: World) -> None:
    world.run(shared_memory)


def close_and_call_again(me: Member, config: MatmulConfig) -> None:
    group = dist.group.WORLD
    part = me.group(0, 1)
    for n in range(6):
        call = prepare(CASE, me.rank, me.world_size, me.device, n)
        parity.run(call, group, config)
        call.verify(f"after {n} times close()")
        if part is not None:
            inner = prepare(CASE, me.rank, 2, me.device, 50 + n)
            parity.run(inner, part, config)
            inner.verify(f"sub-group after {n} times close()")
        if n % 3 == 0:
            tw.close()
        elif n % 3 == 1:
            tw.close(group)
        else:
            tw.close(name_of(part) if part is not None else "a group of others")
        tw.synchronize()


@transports
def test_close_and_call_again(worlds: Worlds, config: MatmulConfig) -> None:
    worlds("gloo", 3).run(close_and_call_again, config)
