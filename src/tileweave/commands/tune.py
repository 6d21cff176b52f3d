"""``tileweave tune``: which shapes, what was found, and what the cache has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from tileweave.bench.report import new_table, number
from tileweave.bench.samples import samples_of
from tileweave.errors import InputError, require
from tileweave.planning import cache
from tileweave.planning.candidates import PLANNED, TUNABLE
from tileweave.planning.problem import SCALES
from tileweave.tune.models import MODELS, ROWS, cases_of
from tileweave.tune.run import Outcome
from tileweave.tune.shapes import from_file, of_sizes


@dataclass(frozen=True)
class Asked:
    """Where the shapes come from: exactly one of a file, random numbers, a model, and sizes."""

    shapes: Path | None = None
    random: int = 0
    seed: int = 0
    model: str | None = None
    rows: str | None = None
    cols: int | None = None
    depth: int | None = None
    dtype: str = "bfloat16"
    scales: str | None = None


def operators(op: str) -> tuple[str, ...]:
    """The operators that are tuned, of one name or "all"."""
    if op == "all":
        return TUNABLE
    require(
        op in TUNABLE,
        f"to tune {op!r}",
        f"all, {', '.join(TUNABLE)}",
        "pass one of these names: other operators have one plan for each shape",
    )
    return (op,)


def cases_for(ops: Sequence[str], asked: Asked) -> list[Any]:
    """The cases of these operators; raises :class:`InputError` unless ``asked`` names them."""
    if asked.scales is not None:
        return _with_scales(ops, asked, asked.scales)
    sized = asked.cols is not None or asked.depth is not None
    sources = {
        "--shapes": asked.shapes is not None,
        "--random": asked.random > 0,
        "--model": asked.model is not None,
        "--rows, --cols and --depth": sized,
    }
    given = [name for name, there in sources.items() if there]
    require(
        len(given) == 1,
        f"shapes from {' and '.join(given) or 'nowhere'}",
        f"one of {'; '.join(sources)}",
        "pass one of them",
    )
    require(
        asked.rows is None or asked.model is not None or sized,
        f"--rows with {given[0]}",
        "--rows with --model, or with --cols and --depth",
        "leave out --rows",
    )
    if asked.shapes is not None:
        return [case for op in ops for case in from_file(op, asked.shapes, asked.dtype)]
    if asked.random:
        drawn = (samples_of(op).random_cases(asked.random, asked.seed, False) for op in ops)
        return [case for cases in drawn for case in cases]
    if asked.model is not None:
        require(
            asked.model in MODELS,
            f"model {asked.model!r}",
            ", ".join(MODELS),
            "name one of these, or pass --shapes",
        )
        rows = ROWS if asked.rows is None else _numbers(asked.rows)
        return [case for op in ops for case in cases_of(op, asked.model, rows, asked.dtype)]
    cols, depth = asked.cols, asked.depth
    if cols is None or depth is None or asked.rows is None:
        raise InputError(
            "asked: sizes without one of --rows, --cols and --depth; allowed: all three; "
            "remedy: pass the other"
        )
    return [
        of_sizes(op, rows, cols, depth, asked.dtype) for op in ops for rows in _numbers(asked.rows)
    ]


def _with_scales(ops: Sequence[str], asked: Asked, scales: str) -> list[Any]:
    """The cases with FP8 operands; of all operators those that take them."""
    require(
        scales in SCALES and asked.dtype in ("bfloat16", "float16"),
        f"--scales {scales} with --dtype {asked.dtype}",
        f"{', '.join(SCALES)}; the dtype of the result: bfloat16 or float16",
        "pass one of these",
    )
    able = [op for op in ops if PLANNED[op].fp8]
    require(
        bool(able),
        f"--scales {scales} for {', '.join(ops)}",
        f"{', '.join(name for name, one in PLANNED.items() if one.fp8)}, which take FP8",
        "leave out --scales",
    )
    plain = cases_for(able, replace(asked, scales=None))
    if asked.random:  # sizes that tensor cores take, of up to 8 ranks
        plain = [
            replace(case, cols=-(-case.cols // 128) * 128, depth=-(-case.depth // 128) * 128)
            for case in plain
        ]
    return [
        replace(case, scales=scales, dtype=asked.dtype, name=f"fp8-{scales}-{case.name}")
        for case in plain
    ]


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    require(
        all(word.isdecimal() and int(word) > 0 for word in words),
        f"--rows {text}",
        "positive numbers, separated by commas",
        "pass such a list",
    )
    return tuple(map(int, words))


def table_of(outcome: Outcome) -> Table:
    """What was found, in the order of measurement."""
    title = f"{len(outcome.rows)} shapes tuned in {outcome.seconds:.0f} s; us, median of repeats"
    texts = ("operator", "M, N, K", "before", "now")
    table = new_table(title, (*texts, "us before", "us", "unfused", "gain"), {}, texts)
    for row in outcome.rows:
        table.add_row(
            row.op,
            ", ".join(map(str, row.sizes)),
            row.before,
            row.now if row.now != row.before else "the same",
            number(row.us_before, 1),
            number(row.us, 1),
            number(row.us_unfused, 1),
            number(row.gain, 3),
        )
    return table


def notes_on(outcome: Outcome) -> list[str]:
    """Candidates that were wrong, and shapes that were not measured."""
    lines = [
        f"WRONG, never chosen: {row.op} {row.name}, {', '.join(row.wrong)}"
        for row in outcome.rows
        if row.wrong
    ]
    unfit = sorted({f"{row.op}: {name}" for row in outcome.rows for name in row.unfit})
    if unfit:
        lines.append(f"needs more shared memory than this GPU has: {'; '.join(unfit)}")
    if outcome.skipped:
        lines.append(f"skipped, out of time: {', '.join(outcome.skipped)}")
    if outcome.rows:
        lines.append(f"kept in {outcome.path}")
    return lines


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome for a file; NaN as None."""
    plain = asdict(outcome)
    for row in plain["rows"]:
        row |= {
            name: None
            for name, value in row.items()
            if isinstance(value, float) and math.isnan(value)
        }
    return plain


def shown() -> tuple[list[Table], list[str]]:
    """What the cache has: a table for each file that can be read, and a line for each other."""
    tables, lines = [], []
    for path in cache.files():
        try:
            key, measured = cache.read(path)
        except InputError as error:
            lines.append(str(error))
            continue
        if key is None:  # removed meanwhile
            continue
        facts = f"{key.gpu}, {key.num_sms} multiprocessors, driver {key.driver}, " + (
            f"tileweave {key.tileweave}, torch {key.torch}, triton {key.triton}"
        )
        kernels = "" if key.kernels == "all" else f", {key.kernels} kernels"
        texts = ("operator", "rows, cols, depth", "dtype", "plan")
        title = f"{path.name}: {facts}{kernels}, {key.world_size} ranks; sizes of one rank, us"
        table = new_table(title, (*texts, "us", "unfused"), {}, texts)
        for one in measured:
            p, fastest = one.problem, one.fastest()
            plan = "unfused" if fastest is None else str(fastest)
            sizes = f"{p.rows}, {p.cols}, {p.depth}"
            times = (number(one.us[fastest], 1), number(one.us[None], 1))
            table.add_row(one.op, sizes, f"{p.dtype} {p.scales}".strip(), plan, *times)
        tables.append(table)
    return tables, lines
