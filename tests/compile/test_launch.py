"""Launches from prepared parameters: the block has the layout of the compiler's PTX, and a launch
writes what changed."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.compile.harness import Compiled, compile_kernel, offline
from tests.compile.test_all_gather_kernels import (
    HOPPER_CASES,
    TRITON_CASES,
    Case,
    compile_case,
    launch_of,
)
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from tileweave.kernels.embedding import bag_all_to_all as lookups
from tileweave.kernels.embedding.lookup import constants
from tileweave.kernels.runtime import launch
from tileweave.kernels.runtime.compile_all import compile_all
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.sharding import EmbeddingConfig

PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)(?:\s+\.ptr[^,\n]*?)?\s+\w+(?:\[(\d+)\])?"
)
STREAM, FUNCTION = 77, 4242


@triton.jit
def every_kind_kernel(desc, x, flag, count, one, large, scale, SIZE: tl.constexpr):
    tile = desc.load([0, 0])
    at = tl.arange(0, SIZE)
    tl.store(
        x + at,
        tl.sum(tile, 1) * scale + tl.load(x + at) * flag + (count + one + large).to(tl.float32),
    )


def every_kind() -> list[Any]:
    desc = TensorDescriptor(torch.empty(64, 32), [64, 32], [32, 1], [16, 32], padding="nan")
    return [desc, torch.empty(64), True, 7, 1, 1 << 40, 0.5, 16]


def sizes_in_ptx(compiled: Compiled) -> list[int]:
    entry = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)\s*(?:\.\w|\{)", str(compiled.ptx), re.DOTALL)
    assert entry is not None
    return [int(bits) // 8 * int(count or 1) for bits, count in PARAMETER.findall(entry[1])]


def sizes_laid_out(signature: dict[str, Any]) -> list[int]:
    kinds = launch.layout(signature)
    assert kinds is not None
    return [
        launch.MAP_BYTES if kind == launch.MAP else ctypes.sizeof(launch.WORDS[kind])
        for kind in kinds.values()
    ]


@pytest.mark.parametrize("case", [TRITON_CASES[0], HOPPER_CASES[0], HOPPER_CASES[-1]], ids=str)
def test_our_kernels_take_the_parameters_laid_out(case: Any) -> None:
    compiled = compile_case(case)
    assert sizes_laid_out(dict(compiled.signature)) == sizes_in_ptx(compiled)


def test_every_kind_of_parameter_is_laid_out() -> None:
    compiled = compile_kernel(every_kind_kernel, (1,), *every_kind())
    assert sizes_laid_out(dict(compiled.signature)) == sizes_in_ptx(compiled)
    kinds = launch.layout(compiled.signature)
    assert kinds is not None
    assert list(kinds)[:5] == ["desc", "desc.shape0", "desc.shape1", "desc.stride0", "desc.stride1"]
    assert "one" not in kinds and "SIZE" not in kinds, "constants take no place"


def test_an_unknown_kind_is_left_to_triton() -> None:
    assert launch.layout({"x": "fp8"}) is None
    assert launch.layout({"x": "*fp32", "pair": ("i32", "fp8")}) is None


def test_tuples_are_taken_apart() -> None:
    signature = {"pair": ("i32", ("constexpr", "*fp32")), "last": "i64"}
    kinds = launch.layout(signature)
    assert kinds is not None
    assert list(kinds.items())[:3] == [("pair.0", "i32"), ("pair.1.1", "pointer"), ("last", "i64")]


# --- A driver that records calls ---


class _Map(bytearray):
    """Replaces Triton's object around a tensor map."""


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Prepares in the driver of the harness. ``launches`` are (config, function, addresses of
    parameters)."""
    found = SimpleNamespace(launches=[], maps=[], status=0)

    def note(config: int, function: int, parameters: int, extra: None) -> int:
        config_then = launch._Config.from_buffer_copy(launch._Config.from_address(config))
        found.launches.append((config_then, function, parameters))
        return found.status

    def fill(address: int, *rest: object) -> _Map:
        found.maps.append((address, rest))
        return _Map()

    with offline("sm_90"):
        driver = launch.active.active
        monkeypatch.setattr(driver.utils, "fill_tma_descriptor_tiled", fill, raising=False)
        monkeypatch.setattr(
            driver, "get_current_stream", lambda device: STREAM + len(found.launches)
        )
        monkeypatch.setattr(launch, "_launch_function", lambda: note)
        monkeypatch.setattr(launch, "_map_offset", lambda: 128)
        monkeypatch.setattr(nvidia, "TMA_DTYPE_DEVICE_TO_HOST", dict(enumerate(range(16))))
        yield found


def compiled_by_a_device(arguments: list[Any]) -> Any:
    """What a launch returns on a device: the offline kernel, with a handle."""
    compiled = every_kind_kernel[(3,)](*arguments)
    compiled.function = FUNCTION
    return compiled


def prepared(arguments: list[Any]) -> launch.Prepared:
    found = launch.prepare(compiled_by_a_device(arguments), 3, arguments, ["x", "count"], ["desc"])
    assert found is not None
    return found


def parameters(found: launch.Prepared, at: int) -> dict[str, Any]:
    """Values of the words and addresses of the maps that the driver sees at ``at``."""
    kinds = launch.layout(found._compiled.src.signature)
    assert kinds is not None
    places = (ctypes.c_void_p * len(kinds)).from_address(at)
    return {
        name: place if kind == launch.MAP else launch.WORDS[kind].from_address(place).value
        for (name, kind), place in zip(kinds.items(), places, strict=True)
    }


def test_a_launch_writes_what_changed(notes: SimpleNamespace) -> None:
    arguments = every_kind()
    found = prepared(arguments)
    found((4096, 9), (8192,))
    (config, function, at), seen = notes.launches[-1], parameters(found, notes.launches[-1][2])
    assert (list(config.grid), function, config.stream, config.num_attributes) == (
        [3, 1, 1],
        FUNCTION,
        STREAM,
        0,
    )
    assert list(config.block) == [128, 1, 1] and config.shared == found._compiled.metadata.shared
    assert (seen["x"], seen["count"], seen["flag"], seen["large"], seen["scale"]) == (
        4096,
        9,
        1,
        1 << 40,
        0.5,
    )
    sizes = [seen[f"desc.{what}"] for what in ("shape0", "shape1", "stride0", "stride1")]
    assert sizes == [64, 32, 32, 1] and (seen["global_scratch"], seen["profile_scratch"]) == (0, 0)
    assert [address for address, _ in notes.maps] == [arguments[0].base.data_ptr(), 8192]
    (meta,) = found._compiled.metadata.tensordesc_meta
    kind = (meta["swizzle"], meta["elem_size"], meta["elem_type"])
    assert notes.maps[-1][1] == (*kind, meta["block_size"], [64, 32], [32, 1], 1), "padded with NaN"
    first = seen["desc"]
    assert first == id(found._maps[0]._made[-1]) + 128, "after the header"
    found((4096, 10), (16384,))
    assert parameters(found, at)["count"] == 10 and parameters(found, at)["desc"] != first
    assert notes.launches[-1][0].stream == STREAM + 1, "the current one"
    found((4096, 11), (8192,))
    assert parameters(found, at)["desc"] == first, "the map of an address is kept"
    assert len(notes.maps) == 3


def test_few_maps_are_kept(notes: SimpleNamespace) -> None:
    found = prepared(every_kind())
    for n in range(3 * launch._MAX_MAPS):
        found((4096, n), (16 * n,))
        assert len(found._maps[0].known) == len(found._maps[0]._made) <= launch._MAX_MAPS


def test_maps_of_a_triton_that_knows_one_kind(
    notes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = launch.active.active.utils
    monkeypatch.setattr(
        utils, "fill_tma_descriptor", utils.fill_tma_descriptor_tiled, raising=False
    )
    monkeypatch.delattr(utils, "fill_tma_descriptor_tiled")
    prepared(every_kind())
    assert notes.maps


@pytest.mark.parametrize(("size", "offset"), [(192, 64), (256, 128), (136, None)])
def test_maps_are_where_they_are_known_to_be(
    size: int, offset: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "PyCUtensorMap", SimpleNamespace(__basicsize__=size), raising=False)
    assert launch._map_offset.__wrapped__() == offset


def test_a_refused_launch_raises(notes: SimpleNamespace) -> None:
    found = prepared(every_kind())
    notes.status = 700
    with pytest.raises(RuntimeError, match=r"every_kind_kernel.*700"):
        found((4096, 1), (8192,))


def test_what_is_not_plain_is_left_to_triton(
    notes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = every_kind()
    compiled = compiled_by_a_device(arguments)
    assert launch.prepare(None, 3, arguments, ["x"]) is None, "the interpreter compiles nothing"
    changes = (
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"tensordesc_meta": None},
    )
    scratch = ({"global_scratch_size": 8}, {"profile_scratch_size": 8})
    for change in (*changes, *scratch, {"target": GPUTarget("hip", "gfx942", 64)}):
        changed = SimpleNamespace(
            src=compiled.src, function=FUNCTION, metadata=compiled.metadata._replace(**change)
        )
        assert launch.prepare(changed, 3, arguments, ["x"]) is None, change
    assert launch.prepare(compiled, 3, arguments, ["x"]) is not None
    no_device = SimpleNamespace(src=compiled.src, function=None, metadata=compiled.metadata)
    assert launch.prepare(no_device, 3, arguments, ["x"]) is None
    monkeypatch.setattr(launch, "_map_offset", lambda: None)
    assert launch.prepare(compiled, 3, arguments, ["x"]) is None, "Triton keeps its maps elsewhere"


def test_listeners_of_triton_are_noticed() -> None:
    listener = lambda metadata: None  # noqa: E731
    assert not launch.hooked()
    knobs.runtime.launch_enter_hook.add(listener)
    try:
        assert launch.hooked()
    finally:
        knobs.runtime.launch_enter_hook.remove(listener)


def test_what_is_listened_to_is_launched_by_triton(
    notes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, made, listener = every_kind(), [], lambda metadata: None
    found = prepared(arguments)
    monkeypatch.setattr(launch, "prepare", lambda *rest: made.append(rest) or found)
    named = dict(zip(every_kind_kernel.arg_names, arguments, strict=True))
    call: launch.Call = ("one", (4096, 9), lambda: named, (8192,))
    launches = launch.Launcher(
        every_kind_kernel, 3, {}, lambda: call, words=["x", "count"], maps=["desc"]
    )
    for listening, seen in ((False, 0), (False, 1), (True, 1), (False, 2)):
        if listening:
            knobs.runtime.launch_enter_hook.add(listener)
        try:
            launches()
        finally:
            if listening:
                knobs.runtime.launch_enter_hook.remove(listener)
        assert (len(notes.launches), len(made)) == (seen, 1)


def test_registers_are_limited_where_a_compiler_can() -> None:
    for target, options in (("sm_90", {"maxnreg": 96}), ("gfx942", {})):
        with offline(target):
            assert launch.limit_registers(96) == options
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        assert launch.limit_registers(96) == {}


@pytest.fixture
def on_a_device(notes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``notes``, with launchers that prepare what Triton launches."""
    prepare = launch.prepare

    def with_a_device(compiled: Any, *rest: Any) -> launch.Prepared | None:
        compiled.function = FUNCTION
        return prepare(compiled, *rest)

    monkeypatch.setattr(launch, "prepare", with_a_device)
    return notes


@pytest.mark.parametrize(
    "case", [next(c for c in cases if c.trace) for cases in (TRITON_CASES, HOPPER_CASES)], ids=str
)
def test_a_matmul_is_launched_again_with_what_changed(
    case: Case, on_a_device: SimpleNamespace
) -> None:
    """Every parameter, by name, is what Triton would get for the second call."""
    again, first = launch_of(case)
    again(*first)
    assert not on_a_device.launches, "the first one is Triton's"
    *tensors, _, trace = launch_of(case)[1]
    second = (*tensors, 1, trace)
    again(*second)
    (prepared,) = again.prepared.values()
    assert prepared is not None
    seen = parameters(prepared, on_a_device.launches[-1][2])
    wanted = launch.flat({**again.fixed, **again._pack(*second)[2]()})
    del wanted["tensors.partials"]  # allocated by each call
    compared = [name for name in seen if name in wanted and not name.endswith("_desc")]
    groups = {name.partition(".")[0] for name in compared}
    assert groups >= {"tensors", "peers", "sizes", "slot", "num_tiles", "k_blocks"}
    for name in compared:
        value = wanted[name]
        assert seen[name] == (value.data_ptr() if hasattr(value, "data_ptr") else value), name
    assert seen["tensors.x"] == tensors[0].data_ptr() and seen["slot"] == 1
    if case.config.kernel == "hopper":
        bases = [address for address, _ in on_a_device.maps]
        assert {tensor.data_ptr() for tensor in tensors[:2]} <= set(bases[-3:])


def test_lookups_are_launched_again_with_what_changed(on_a_device: SimpleNamespace) -> None:
    """Everything the driver gets, by name: at first as from Triton, then changed only where the
    next batch differs."""
    notes = on_a_device
    tables, columns, config = (
        [torch.empty(100, 64) for _ in range(3)],
        (0, 64, 128),
        EmbeddingConfig(),
    )
    word, meta = torch.zeros(4096, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int64)
    peers = Peers(
        torch.empty(3 * 65536), 65536, meta[0], meta[1], word, word[8:], word[16:], word[24:]
    )
    made = constants(tables, columns, 384, 4, config)
    samples = lookups.Samples(40, 20, 384, 40)
    again = lookups.launcher(peers, 1, 2, samples, 3, made, True, 132, config)
    first, second = (
        (torch.zeros(n, dtype=torch.int64), torch.zeros(121, dtype=torch.int64)) for n in (640, 64)
    )
    again(meta, *first, None, 1)
    assert not notes.launches, "the first one is Triton's"
    for (indices, offsets), region in ((first, 1), (second, 2)):
        again(meta, indices, offsets, None, region)
        config_then, function, at = notes.launches[-1]
        (prepared,) = again.prepared.values()
        assert prepared is not None
        blocks = -(-20 // config.bags)
        at_once = {
            "global_scratch": 0,
            "profile_scratch": 0,
            "rank": 1,
            "region": region,
            "peers.slot_size": 65536,
        }
        sizes = {
            "num_indices": indices.numel(),
            "samples.batch": 40,
            "samples.chunk": 20,
            "tables": 3,
            "blocks": blocks,
            "samples.width": 384,
            "samples.there": 40,
        }
        cut = {"run": config.run_of(blocks), "lag": min(config.lag, 3 * blocks), "rows_here": 20}
        given = {
            "bags.meta": meta,
            "bags.indices": indices,
            "bags.offsets": offsets,
            "bags.weights": indices,
            "peers.slots": peers.slots,
        }
        given |= {
            f"peers.{name}": getattr(peers, name)
            for name in ("slot_table", "signal_table", "signals", "control", "report", "counters")
        }
        wanted = at_once | sizes | cut | {name: tensor.data_ptr() for name, tensor in given.items()}
        seen = parameters(prepared, at)
        assert seen == {name: wanted[name] for name in seen} and set(wanted) - set(seen) <= {
            "rank"
        }, "what is 1 takes no place"
        assert (config_then.grid[0], function, len(notes.launches)) == (
            again.programs,
            FUNCTION,
            region,
        )
    again(meta, second[0].new_zeros(1 + 640)[1:], second[1], None, 0)
    assert len(again.prepared) == 2, "other alignment, other code"


def test_launches_are_compiled_before_they_are_made() -> None:
    """What was collected is compiled at once, each variant once; the launches find it."""
    cases = (TRITON_CASES[0], TRITON_CASES[1], TRITON_CASES[0], HOPPER_CASES[0])
    with offline("sm_90") as launched:
        made, before = [], knobs.runtime.jit_post_compile_hook

        def count(**given: Any) -> None:
            made.append(given["key"])
            before(**given)

        knobs.runtime.jit_post_compile_hook = count
        calls = [launch_of(case) for case in cases]
        with launch.collect_launches() as launches:
            for launcher, arguments in calls:
                launcher(*arguments)
        assert len(launches) == len(cases) and not launched and not made
        kernels = compile_all(launches, 1, 2)
        assert len(made) == 3 and not launched
        assert kernels[0] is kernels[2] and len({id(kernel) for kernel in kernels}) == 3
        for launcher, arguments in calls:
            launcher(*arguments)
        assert len(made) == 3 and len(launched) == 3


def test_a_kernel_that_the_gpu_has_no_room_for_is_found_before_a_launch() -> None:
    case = TRITON_CASES[0]
    large = replace(case, config=replace(case.config, tile_k=128, num_stages=8))  # 256 kB
    with offline("sm_90"), launch.collect_launches() as launches:
        for each in (case, large):
            launcher, arguments = launch_of(each)
            launcher(*arguments)
    with offline("sm_90"):
        assert [launch.fits(kernel) for kernel in compile_all(launches, 0, 1)] == [True, False]
