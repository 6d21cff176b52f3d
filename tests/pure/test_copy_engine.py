"""Copies as a CUDA graph: which operation follows which, and what a push updates. The driver is a
fake that records calls."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tileweave.errors import TileweaveError  # noqa: E402
from tileweave.transport import copy_engine  # noqa: E402
from tileweave.transport.interface import Copies, Copy  # noqa: E402


@dataclass
class Driver:  # methods have the names of the driver
    """Handles are numbers from 1 on. A node is (kind, its predecessors, its other arguments)."""

    nodes: dict[int, tuple] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    refuse_to_move: bool = False
    handles: int = 0
    allocations: dict[int, int] = field(default_factory=dict)  # by address; others have number 1

    def cuPointerGetAttribute(self, found, attribute, address):  # noqa: N802
        found.value = self.allocations.get(address, 1)
        return int(found.value == 0)

    def _made(self, handle):
        self.handles += 1
        handle.value = self.handles
        return 0

    def _node(self, handle, follows, count, *facts):
        self._made(handle)
        self.nodes[handle.value] = (tuple(sorted(follows[:count])), *facts)
        return 0

    def cuStreamGetCtx(self, stream, context):  # noqa: N802
        return self._made(context)

    def cuGraphCreate(self, graph, flags):  # noqa: N802
        return self._made(graph)

    def cuGraphAddMemcpyNode(self, node, graph, follows, count, about, context):  # noqa: N802
        return self._node(
            node, follows, count, "copy", about.target_device, about.source_device, about.width
        )

    def cuGraphAddBatchMemOpNode(self, node, graph, follows, count, about):  # noqa: N802
        wait = about.first.contents
        return self._node(node, follows, count, "wait", wait.address, wait.value)

    def cuGraphInstantiateWithFlags(self, ready, graph, flags):  # noqa: N802
        return self._made(ready)

    def cuGraphExecMemcpyNodeSetParams(self, ready, node, about, context):  # noqa: N802
        facts = self.nodes[node.value]
        self.nodes[node.value] = (
            facts[0],
            "copy",
            about.target_device,
            about.source_device,
            about.width,
        )
        return int(self.refuse_to_move)

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: self.calls.append(name) or 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(copy_engine, "driver", lambda: found)
    monkeypatch.setattr(copy_engine, "current_handle", lambda index: 64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def engine(driver):
    found = object.__new__(copy_engine.CopyEngine)
    found._driver, found._index, found._start = driver, 0, 48
    found._graphs = {}
    found._lanes = [SimpleNamespace(handle=32, done=40), SimpleNamespace(handle=33, done=41)]
    return found


def push_again(line, copies, address, launch=None):
    """Push twice: the second push makes a graph."""
    line.push(copies, address)
    line._driver.calls.clear()
    line.push(copies, address, launch)


def scatter():
    """Two owners with a lane each: wait for tiles, data, signal. Then a signal to this rank."""
    return Copies(
        [
            Copy(1000, 0, 64, 8, counter=500, count=3),
            Copy(2000, 7, 4),
            Copy(1100, 0, 64, 16, counter=504, count=3, lane=1),
            Copy(2100, 7, 4, lane=1),
            Copy(3000, 7, 4),
        ]
    )


def test_structures_have_the_sizes_of_the_driver():
    sizes = [
        ctypes.sizeof(kind)
        for kind in (copy_engine._Pitched, copy_engine._Block, copy_engine._Operation)
    ]
    assert sizes == [128, 200, 48]
    assert ctypes.sizeof(copy_engine._Operations) == 32


def test_signals_follow_data_and_lanes_are_independent(driver):
    push_again(engine(driver), scatter(), 10_000)
    by_target = {facts[2]: (node, facts[0]) for node, facts in driver.nodes.items()}
    for counter, data, signal in ((500, 1000, 2000), (504, 1100, 2100)):
        assert by_target[counter][1] == ()
        assert by_target[data][1] == (by_target[counter][0],)
        assert by_target[signal][1] == (by_target[data][0],)
    assert by_target[3000][1] == (by_target[2000][0], by_target[2100][0])
    assert [
        facts[3]
        for facts in driver.nodes.values()
        if facts[1:3] in (("copy", 1000), ("copy", 1100))
    ] == [10_008, 10_016]


def test_waits_and_aside_copies_do_not_block_a_lane(driver):
    copies = Copies(
        [
            Copy(1000, 0, 64, 8, counter=500, count=3),
            Copy(2000, 7, 4, aside=True),
            Copy(1100, 0, 64, 16, counter=504, count=3),
            Copy(2100, 7, 4, aside=True),
            Copy(3000, 7, 4),
        ]
    )
    push_again(engine(driver), copies, 10_000)
    node = {facts[2]: found for found, facts in driver.nodes.items()}
    after = {facts[2]: set(facts[0]) for facts in driver.nodes.values()}
    assert after[1000] == {node[500]}
    assert after[1100] == {node[1000], node[504]}, "the data before it, and its own count"
    assert (after[500], after[504]) == (set(), {node[500]}), "counts are awaited in turn"
    assert (after[2000], after[2100]) == ({node[1000]}, {node[1100]}), "a signal after its data"
    assert after[3000] == {node[2000], node[1100], node[2100]}, "the last one after all"


def test_push_is_one_launch_with_only_data_addresses_updated(driver):
    copies, line = scatter(), engine(driver)
    push_again(line, copies, 10_000)
    fixed = {
        node: facts
        for node, facts in driver.nodes.items()
        if facts[2] in (500, 504, 2000, 2100, 3000)
    }
    driver.calls.clear()
    line.push(copies, 20_000)
    assert driver.calls == ["cuEventRecord", "cuStreamWaitEvent", "cuGraphLaunch"]
    assert sorted(facts[3] for facts in driver.nodes.values() if facts[2] in (1000, 1100)) == [
        20_008,
        20_016,
    ]
    assert all(driver.nodes[node] == facts for node, facts in fixed.items())


def test_graph_that_cannot_be_updated_is_replaced(driver):
    copies, line = scatter(), engine(driver)
    push_again(line, copies, 10_000)
    (graphs,) = line._graphs.values()
    first = graphs.find(10_000)
    driver.refuse_to_move = True
    line.push(copies, 20_000)
    assert first is not None and graphs.find(20_000) not in (None, first) and len(graphs) == 1
    assert driver.calls[-1] == "cuGraphLaunch" or driver.calls[-2:] == [
        "cuGraphExecDestroy",
        "cuGraphDestroy",
    ]
    assert sorted(
        facts[3] for facts in list(driver.nodes.values())[-7:] if facts[2] in (1000, 1100)
    ) == [20_008, 20_016]


@pytest.mark.parametrize("often", [False, True])
def test_memory_that_was_freed_has_no_graph(driver, often: bool) -> None:
    """New memory at the same address is another allocation: to launch the graph of the old one
    crashes the driver."""
    copies, line = scatter(), engine(driver)
    push_again(line, copies, 10_000)
    if often:
        for _ in range(copy_engine._OFTEN + 1):
            for address in (20_000, 10_000):
                line.push(copies, address)
    (graphs,) = line._graphs.values()
    address = 20_000 if often else 10_000
    stale = graphs.find(address)
    assert stale is not None
    driver.allocations[address] = 2
    assert graphs.find(address) is None
    line.push(copies, address)
    assert graphs.find(address) not in (None, stale)


def test_memory_that_is_kept_is_not_looked_up(driver) -> None:
    copies, line = scatter(), engine(driver)
    push_again(line, copies, 10_000)
    copies.kept, (graphs,) = 10_000, line._graphs.values()
    found = graphs.find(10_000)
    driver.allocations[10_000] = 2
    assert found is not None and graphs.find(10_000) is found
    line.push(copies, 20_000)
    driver.allocations[20_000] = 2
    assert graphs.find(20_000) is None, "other addresses are"


def test_a_graph_of_memory_that_is_gone_is_not_pointed_elsewhere(driver):
    copies, line = scatter(), engine(driver)
    push_again(line, copies, 10_000)
    (graphs,) = line._graphs.values()
    stale = graphs.find(10_000)
    driver.allocations[10_000] = 0
    line.push(copies, 20_000)
    assert stale is not None and graphs.find(20_000) not in (None, stale)


def test_pitched_copies_have_a_graph_per_repeated_address(driver):
    pitched = Copies(
        [Copy(0, 900, 64, rows=3, target_pitch=128, source_pitch=64), Copy(2000, 7, 4)]
    )
    line = engine(driver)
    for address in (10_000, 20_000):
        line.push(pitched, address)
        assert driver.calls[-2:] == ["cuMemcpy2DAsync_v2", "cuMemcpyDtoDAsync_v2"]
    for address in (20_000, 10_000, 20_000):
        line.push(pitched, address)
        assert driver.calls[-1] == "cuGraphLaunch"
    assert sorted(facts[2] for facts in driver.nodes.values() if facts[1] == "copy") == [
        2000,
        2000,
        10_000,
        20_000,
    ]


def test_copies_used_once_have_no_graph_and_are_forgotten(driver):
    line, often = engine(driver), scatter()
    push_again(line, often, 10_000)
    for _ in range(3 * copy_engine._MOST_GRAPHS):
        line.push(scatter(), 10_000)
        line.push(often, 10_000)
    assert driver.calls.count("cuGraphLaunch") == 1 + 3 * copy_engine._MOST_GRAPHS, (
        "what is used stays"
    )
    assert len(line._graphs) == copy_engine._MOST_GRAPHS
    assert [key for key, graphs in line._graphs.items() if len(graphs)] == [(id(often), 0)]
    fourth = [scatter() for _ in range(copy_engine._MOST_GRAPHS)]
    for copies in fourth:
        push_again(line, copies, 10_000)
    assert set(line._graphs) == {(id(copies), 0) for copies in fourth}


def test_addresses_that_come_often_have_graphs_of_their_own(driver):
    line, copies = engine(driver), scatter()
    push_again(line, copies, 10_000)
    (graphs,) = line._graphs.values()
    nodes = len(driver.nodes)
    for _ in range(copy_engine._OFTEN + 1):
        for address in (20_000, 10_000):
            line.push(copies, address)
    assert len(graphs) == 2 and len(driver.nodes) == 2 * nodes
    driver.refuse_to_move = True  # no graph is pointed elsewhere any more
    for address in (20_000, 10_000, 20_000):
        line.push(copies, address)
    assert len(driver.nodes) == 2 * nodes and driver.calls[-1] == "cuGraphLaunch"
    driver.refuse_to_move = False
    for _ in range(copy_engine._OFTEN + 1):
        for address in range(30_000, 60_000, 1000):
            line.push(copies, address)
    assert len(graphs) == 1 + copy_engine._MOST_FIXED


def test_graphs_of_all_copies_together_are_bounded(driver):
    line, pushed = engine(driver), [scatter() for _ in range(copy_engine._MOST_GRAPHS)]
    for copies in pushed:
        for address in (10_000, 20_000, 30_000) * (copy_engine._OFTEN + 2):
            line.push(copies, address)
    assert sum(map(len, line._graphs.values())) <= copy_engine._MOST_GRAPHS
    assert (id(pushed[-1]), 0) in line._graphs and (id(pushed[0]), 0) not in line._graphs


def test_captured_copies_are_queued_one_by_one(driver, monkeypatch):
    line = engine(driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    driver.calls.clear()
    line.push(scatter(), 10_000)
    assert "cuGraphLaunch" not in driver.calls
    assert driver.calls.count("cuMemcpyDtoDAsync_v2") == 5
    assert driver.calls.count("cuStreamWaitValue32_v2") == 2
    assert not driver.nodes


def test_a_kernel_is_queued_before_copies_that_wait_for_it(driver):
    push_again(engine(driver), scatter(), 10_000, lambda: driver.calls.append("kernel"))
    assert driver.calls.index("kernel") < driver.calls.index("cuGraphLaunch")


@pytest.mark.parametrize("capturing", [False, True], ids=["as a graph", "one by one"])
def test_no_copy_is_queued_if_the_launch_raises(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """Copies would wait for the counters of a kernel that never runs. Those of the next push are
    queued once."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    copies, line = scatter(), engine(driver)

    def refuse() -> None:
        raise MemoryError

    line.push(copies, 10_000)
    driver.calls.clear()
    with pytest.raises(MemoryError):
        line.push(copies, 10_000, refuse)
    queued = {"cuGraphLaunch", "cuMemcpyDtoDAsync_v2", "cuStreamWaitValue32_v2"}
    assert not queued & set(driver.calls)
    line.push(copies, 10_000, lambda: None)
    assert driver.calls.count("cuMemcpyDtoDAsync_v2") == 5 * capturing
    assert driver.calls.count("cuGraphLaunch") == (not capturing)


def test_a_pointed_graph_is_of_the_memory_that_it_has_now(driver):
    """Otherwise each push of an address that comes again would point it anew."""
    driver.allocations, line, copies = {20_000: 2}, engine(driver), scatter()
    push_again(line, copies, 10_000)
    line.push(copies, 20_000)
    (graphs,) = line._graphs.values()
    assert graphs.find(20_000) is not None and graphs.find(10_000) is None


def test_copies_follow_what_was_queued_before_the_kernel(driver):
    """Copies that wait for counters of the kernel run concurrently with it, not after it."""
    driver.cuEventRecord = lambda event, stream: driver.calls.append("record") or 0
    line = engine(driver)
    push_again(line, scatter(), 10_000, launch=lambda: driver.calls.append("launch"))
    assert driver.calls.index("record") < driver.calls.index("launch")


def test_the_last_copy_follows_all_lanes(driver):
    """It says that all copies have been done."""
    driver.cuEventRecord = lambda event, stream: driver.calls.append((event, stream)) or 0
    line = engine(driver)
    line._lanes.append(SimpleNamespace(handle=34, done=42))
    line._gather(3)
    assert [call for call in driver.calls if isinstance(call, tuple)] == [(41, 33), (42, 34)]


class Refusing:
    """A driver in which calls of one name fail."""

    def __init__(self, refused: str) -> None:
        self.refused = refused

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: 700 if name == self.refused else 0


class Lane:
    handle, done = 32, 40


@pytest.mark.parametrize(
    "refused",
    [
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyDtoDAsync_v2",
        "cuMemcpy2DAsync_v2",
        "cuStreamWaitValue32_v2",
    ],
)
def test_driver_errors_are_raised(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that was not queued means data that was never sent."""
    monkeypatch.setattr(copy_engine, "current_handle", lambda index: 64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    line = object.__new__(copy_engine.CopyEngine)
    line._driver, line._index, line._start, line._graphs = Refusing(refused), 0, 48, {}
    line._lanes = [Lane(), Lane()]
    flat, waits = Copy(1000, 2000, 64), Copy(1000, 2000, 64, counter=500, count=3)
    pitched = Copy(1000, 2000, 64, rows=3, target_pitch=128, source_pitch=64)
    with pytest.raises(RuntimeError, match=r"it returned 700") as caught:
        line.push(
            [
                {"cuMemcpy2DAsync_v2": pitched, "cuStreamWaitValue32_v2": waits}.get(refused, flat),
                flat,
            ]
        )
    assert not isinstance(caught.value, TileweaveError), (
        "this rank's alone, so that peers are told (decision 0025)"
    )
    if refused in ("cuEventRecord", "cuStreamWaitEvent"):
        with pytest.raises(RuntimeError):
            line.join()
        with pytest.raises(RuntimeError):
            line._gather(2)
