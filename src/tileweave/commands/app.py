"""The command ``tileweave``: parses, starts a world where one is needed, and delegates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from tileweave import OPERATORS, __version__
from tileweave.bench.prerequisites import file_for, folder_for, need, need_kernels, picture_for
from tileweave.errors import require
from tileweave.files import write_text, writing
from tileweave.launcher import (
    DeviceType,
    RankFailure,
    default_device_type,
    default_world_size,
    end_with,
    launch,
    under_torchrun,
)

try:
    import typer

    from tileweave.bench.console import console
    from tileweave.commands.explore import fuzz, mutate
    from tileweave.commands.options import (
        MOST_DRAWN,
        MOST_SEED,
        MOST_SIZE,
        STAMPS,
        Device,
        World,
        finite,
        place,
    )
    from tileweave.commands.report import report
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich"):
        raise
    raise SystemExit(f"tileweave's commands need {error.name}: pip install typer rich") from None

app = typer.Typer(
    help="Matmuls and embedding lookups that overlap with the collectives they depend on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FIRST = next(iter(OPERATORS))


def _operator(name: str) -> str:
    require(
        name in OPERATORS, f"operator {name!r}", ", ".join(OPERATORS), "pass one of these names"
    )
    return name


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
def version() -> None:
    """Print the version."""
    console().print(__version__)


@app.command()
def doctor() -> None:
    """Show what this machine has, what will run on it, and why the rest will not."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tileweave.commands.doctor import diagnose

    found, screen = diagnose(), console()
    signs = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}
    for title, facts in (
        ("software", found.software),
        ("machine", found.devices),
        ("what will run", found.verdicts),
    ):
        table = Table(
            title=title, title_justify="left", box=SIMPLE_HEAD, show_header=False, pad_edge=False
        )
        for fact in facts:
            table.add_row(signs[fact.good], fact.name, fact.value)
        screen.print(table)
    if found.peer_access:
        table = Table(title="peer access", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("from \\ to", *map(str, range(len(found.peer_access)))):
            table.add_column(heading, justify="center")
        for index, row in enumerate(found.peer_access):
            table.add_row(
                str(index), *["-" if i == index else signs[yes] for i, yes in enumerate(row)]
            )
        screen.print(table)


@app.command()
def demo(
    world: World = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the traces.")] = Path(
        "tileweave-demo"
    ),
    device: Device = "auto",
) -> None:
    """Run every operator on this machine, check it, and draw which ranks waited for which. Needs no
    GPU."""
    from tileweave.commands.demo import closing, table_of
    from tileweave.commands.demo import demo as run

    kind, size = place(device, world)
    need_kernels("tileweave demo", kind)
    folder_for(out)
    screen = console()
    screen.print(
        f"{size} ranks on {'GPUs' if kind == 'cuda' else 'the CPU'}: {', '.join(OPERATORS)}"
    )
    result = launch(run, world_size=size, device_type=kind, seconds=600)
    if result is None:
        return
    screen.print(table_of(result, screen.width))
    _write_traces(result.traces, out)
    screen.print(
        closing(result), markup=False, soft_wrap=True, style="" if result.right else "bold red"
    )
    if not result.right:
        raise typer.Exit(1)


def _write_traces(traces: list[Any], out: Path) -> None:
    """Write the traces, and a picture if there is matplotlib; print what was written."""
    from tileweave.commands.demo import write_picture, write_traces

    screen = console()
    for path in write_traces(traces, out):
        screen.print(f"wrote {path}", markup=False)
    try:
        screen.print(f"wrote {write_picture(traces, out)}", markup=False)
    except ModuleNotFoundError as error:
        screen.print(
            f"no picture, since {error.name} is missing: pip install matplotlib", markup=False
        )


def _refuse_without(option: str, given: bool, others: dict[str, object]) -> None:
    """Refuse options that have no effect without another one."""
    ignored = [name for name, value in others.items() if value is not None and not given]
    require(
        not ignored,
        f"{', '.join(ignored)} without {option}",
        "with it only",
        f"add {option}, or drop the rest",
    )


@app.command()
def check(
    world: Annotated[
        int | None, typer.Option("--world", help="Only this world size (default: 2, 3 and 4).")
    ] = None,
    calls: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Calls with late ranks (default: 500; 15 without GPUs); "
            "--stress: all calls (100000; 40).",
        ),
    ] = None,
    stress: Annotated[
        bool,
        typer.Option("--stress", help="Random calls instead: two groups and streams, graphs."),
    ] = False,
    soak: Annotated[
        bool, typer.Option("--soak", help="Random calls of random shapes, each checked in fp64.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, callback=finite, help="How long (--soak; default: 10)."),
    ] = None,
    faults: Annotated[
        str | None, typer.Option(help="stop, starve, kill: what is done to a rank (--soak).")
    ] = None,
    shapes: Annotated[
        int | None, typer.Option(min=1, help="How many shapes are drawn (--soak; default: 500).")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=MOST_SEED, help="Seed of random calls (--stress, --soak; default: 1)."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, callback=finite, help="Stop after this long (--stress; default: 900)."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the report here (--stress, --soak).")
    ] = None,
    device: Device = "auto",
) -> None:
    """Check the operators against fp32 on this machine: shapes, late ranks, two groups, CUDA
    graphs."""
    kind, size = place(device, world)
    need_kernels("tileweave check", kind)
    _refuse_without("--stress", stress, {"--seconds": seconds})
    _refuse_without("--soak", soak, {"--minutes": minutes, "--faults": faults, "--shapes": shapes})
    _refuse_without("--stress or --soak", stress or soak, {"--seed": seed, "--json": json})
    require(not (stress and soak), "--stress and --soak", "one of them", "drop one")
    number = 1 if seed is None else seed
    if soak:
        from tileweave.commands.soak import Wish, print_report
        from tileweave.commands.soak import soak as run_soak

        kinds = tuple(filter(None, (faults or "").split(",")))
        wish = Wish(calls or 0, 60.0 * (minutes or 10.0), number, shapes or 500, kinds)
        right = print_report(run_soak(kind, size, wish), console(), file_for(json))
    elif stress:
        from tileweave.commands.stress import run_and_print

        calls = calls or (100_000 if kind == "cuda" else 40)
        right = run_and_print(kind, size, calls, number, seconds or 900.0, file_for(json))
    else:
        one = world is not None or under_torchrun()
        sizes = [size] if one else [n for n in (2, 3, 4) if n <= size]
        right = _check_worlds(kind, sizes, calls or (500 if kind == "cuda" else 15))
    if not right:
        raise typer.Exit(1)


def _check_worlds(kind: DeviceType, sizes: list[int], calls: int) -> bool:
    """Check in worlds of these sizes, and print a table. Whether all was right."""
    from tileweave.commands.check import check as run
    from tileweave.commands.check import note_on, table_of

    screen, rows, failed = console(), [], False
    for size in sizes:
        try:
            rows += launch(run, calls, world_size=size, device_type=kind) or []
        except RankFailure as error:
            failed = True
            screen.print(f"world {size}: {error}", markup=False, style="red")
    if rows:
        screen.print(table_of(rows))
        for line in note_on(row.paths for row in rows):
            screen.print(line)
    right = not failed and all(row.right for row in rows)
    if not right:
        screen.print("[bold red]not right on this machine")
    return right


@app.command()
def bench(
    op: Annotated[
        str, typer.Argument(help="The operator; all: every one, in one world.")
    ] = "all_gather_matmul",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases.")] = False,
    cases: Annotated[
        str | None, typer.Option(help="Only cases whose name this regular expression finds.")
    ] = None,
    random: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_DRAWN, help="So many random cases instead, with a summary at the end."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the random cases.")] = 0,
    rivals: Annotated[
        str | None,
        typer.Option(help="Comma-separated; default: all, or with --random what is compared."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Timed repeats of each function (default: 7; 3 with --random)."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=1,
            callback=finite,
            help="Start no new case so many seconds per operator after kernels are compiled.",
        ),
    ] = 900.0,
    json: Annotated[
        Path | None,
        typer.Option(help="Write all raw numbers here; for all, NAME-OPERATOR.json for each."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) here.")] = None,
    world: World = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny cases, also without GPUs; times mean nothing.")
    ] = False,
) -> None:
    """Time an operator against its unfused path, its rivals and the co-run bound.

    Needs two GPUs or more.
    """
    from tileweave.bench.report import is_right, notes_of, why_nothing
    from tileweave.bench.run import Options, bench_several
    from tileweave.bench.samples import samples_of
    from tileweave.bench.summary import lines_of, worst_table

    kind = default_device_type()
    ops = OPERATORS if op == "all" else (_operator(op),)
    require(
        kind == "cuda" or smoke,
        "a benchmark",
        "on two GPUs or more, since interpreted kernels have no meaningful time",
        "run it there, or try the bench with --smoke",
    )
    require(
        not (smoke and (cases or quick)),
        "--smoke with --cases or --quick",
        "one of them",
        "drop the others",
    )
    require(
        not (random and (cases or quick)),
        "--random with --cases or --quick",
        "random cases or named ones",
        "drop one of them",
    )
    require(
        op != "all" or not (cases or rivals or plot),
        "all operators with --cases, --rivals or --plot",
        "these for one operator, since names differ",
        "name one",
    )
    need_kernels("tileweave bench", kind)
    if picture_for(plot) is not None:
        need("tileweave bench --plot", "matplotlib")
    named = tuple(name.strip() for name in rivals.split(",")) if rivals else None
    several = []
    for each in ops:
        benched = samples_of(each).bench
        require(
            set(named or ()) <= set(benched.rivals),
            f"rivals {rivals}",
            ", ".join(benched.rivals),
            "pass some of these",
        )
        path = file_for(json)
        if path is not None and len(ops) > 1:
            path = path.with_name(f"{path.stem}-{each}{path.suffix}")
        options = Options(
            each,
            cases,
            quick,
            named or (benched.random_rivals or None if random else None),
            repeats or (3 if random else 7),
            seconds,
            None if path is None else str(path),
            smoke,
            random,
            seed,
        )
        known = ", ".join(case.name for case in samples_of(each).cases)
        require(
            _found(options),
            f"{'--quick ' if quick else ''}cases {cases!r} of {each}",
            f"a regular expression that finds one of {known}",
            "pass such an expression",
        )
        several.append(options)
    size = default_world_size(kind, world, most=8 if kind == "cuda" else 4)
    limit = (2 * seconds + 300) * len(several)
    reports = launch(bench_several, several, world_size=size, device_type=kind, seconds=limit)
    if reports is None:
        return
    screen, failed = console(), False
    for report in reports:
        benched = samples_of(report["op"]).bench
        screen.print(*benched.tables_of(report, screen.width), sep="\n")
        for line in notes_of(report):
            screen.print(line, markup=False)
        if plot is not None:
            with writing(plot):
                benched.plot(report, plot)
            screen.print(f"picture: {plot}", markup=False)
        nothing = why_nothing(report)
        if nothing:
            screen.print(f"[bold red]{report['op']}: nothing was timed: {nothing}")
        failed |= bool(nothing) or not is_right(report)
    if random:
        for report in reports:
            screen.print(worst_table(report["op"], report["summary"]))
        for report in reports:
            for line in lines_of(report["op"], report["summary"]):
                screen.print(line, markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _found(options: Any) -> bool:
    """Whether there are such cases; False for an invalid regular expression."""
    import re

    try:
        return bool(options.cases())
    except re.error:
        return False


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help="A matmul operator; all: every one.")] = "all",
    shapes: Annotated[
        Path | None,
        typer.Option(help="A file: lines of M N K, or a JSON list of them, of the whole problem."),
    ] = None,
    random: Annotated[
        int, typer.Option(min=0, max=MOST_DRAWN, help="So many random shapes, as bench draws them.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the random shapes.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="The layers of a model, such as llama3-70b.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", help="Tensor parallelism: the same as --world.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="M, separated by commas, for --model or with --cols and --depth."),
    ] = None,
    cols: Annotated[
        int | None, typer.Option(min=1, max=MOST_SIZE, help="N of the whole problem.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, max=MOST_SIZE, help="K of the whole problem.")
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option()] = "bfloat16",
    scales: Annotated[
        str | None,
        typer.Option(help="FP8 operands: tensor, row, block, tensor+fast or row+fast."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats of each candidate.")] = 5,
    seconds: Annotated[
        float,
        typer.Option(min=1, callback=finite, help="Start no new shape after that many seconds."),
    ] = 1800.0,
    json: Annotated[Path | None, typer.Option(help="Write what was found here, too.")] = None,
    world: World = None,
    device: Device = "auto",
    show: Annotated[bool, typer.Option("--show", help="Show what was tuned; measure nothing.")] = (
        False
    ),
    clear: Annotated[bool, typer.Option("--clear", help="Forget what was tuned.")] = False,
) -> None:
    """Measure which plan is fastest for some shapes on this machine, and use it from now on.

    Results are kept in a cache of the user, which later calls plan by. Needs two GPUs or more.
    """
    from json import dumps

    from tileweave.commands import tune as tuning
    from tileweave.planning import cache
    from tileweave.tune.run import Options
    from tileweave.tune.run import tune as run

    screen = console()
    if clear:
        for path in cache.clear():
            screen.print(f"removed {path}", markup=False)
    if show:
        tables, lines = tuning.shown()
        screen.print(*tables, sep="\n")
        for line in lines or ([] if tables else [f"nothing in {cache.folder()}"]):
            screen.print(line, markup=False, soft_wrap=True)
    if clear or show:
        return
    ops = tuning.operators(op)
    asked = tuning.Asked(shapes, random, seed, model, rows, cols, depth, dtype, scales)
    cases = tuning.cases_for(ops, asked)
    require(
        tp is None or world in (None, tp),
        f"--tp {tp} with --world {world}",
        "the same number, since a rank is a part of the model",
        "leave out one of them",
    )
    require(
        default_device_type() == "cuda" or device != "auto",
        "to tune",
        "on two GPUs or more, since interpreted kernels have no meaningful time",
        "run it there, or try the command with --device cpu",
    )
    kind, size = place(device, world if tp is None else tp)
    need_kernels("tileweave tune", kind)
    file_for(json)
    outcome = launch(
        run,
        Options(tuple(cases), repeats, seconds),
        world_size=size,
        device_type=kind,
        seconds=2 * seconds + 300,
    )
    if outcome is None:
        return
    screen.print(tuning.table_of(outcome))
    for line in tuning.notes_on(outcome):
        screen.print(line, markup=False, soft_wrap=True)
    if json is not None:
        write_text(json, dumps(tuning.as_json(outcome), indent=1) + "\n")
    if not outcome.rows:
        screen.print("[bold red]nothing was tuned: no time for any shape")
        raise typer.Exit(1)


@app.command()
def trace(
    op: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(OPERATORS)}. Without GPUs: waits for signals, and what "
            f"{FIRST} pushes and computes."
        ),
    ] = FIRST,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_SIZE, help="M of the whole problem; tokens or samples per rank."
        ),
    ] = None,
    cols: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_SIZE, help="N of the whole problem; tables per rank."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_SIZE, help="K of the whole problem; columns of a table."),
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option()] = "float16",
    out: Annotated[
        Path, typer.Option(help="Folder for the trace (JSON for ui.perfetto.dev) and the picture.")
    ] = Path("tileweave-trace"),
    world: World = None,
    device: Device = "auto",
) -> None:
    """Record one call: its kernels and copies, which programs waited for which rank, on one clock.

    Written as a picture, as files for ui.perfetto.dev, and in words. Under torchrun set
    TILEWEAVE_STAMPS=1, or what programs do inside kernels is not seen.
    """
    from tileweave.bench.cases import Case
    from tileweave.bench.samples import samples_of
    from tileweave.commands.demo import trace_one
    from tileweave.profile.trace import in_words

    kind, size = place(device, world)
    usual = samples_of(_operator(op)).traced[kind == "cuda"]
    sizes = (rows or usual[0], cols or usual[1], depth or usual[2])
    few = [
        f"--{name} {value}"
        for name, value in zip(("rows", "cols", "depth"), sizes, strict=True)
        if name in samples_of(op).shared and value < size
    ]
    require(not few, ", ".join(few), f"{size} or more, one for each rank", "pass larger sizes")
    need_kernels("tileweave trace", kind)
    folder_for(out)
    screen, case = console(), Case(op, "trace", *sizes, False, "smoke", dtype)
    whole = case.whole(size)
    rounded = "" if whole == sizes else ", rounded to multiples of the world size"
    screen.print(
        f"{op}, M, N, K: {', '.join(map(str, whole))}, over {size} ranks{rounded}", markup=False
    )
    result = launch(
        trace_one, op, *case.shard(size), dtype, world_size=size, device_type=kind, extra=STAMPS
    )
    if result is None:
        return
    found, plan = result
    screen.print(f"{found.title}; {found.clock}", markup=False)
    for line in in_words(found):
        screen.print(line, markup=False, soft_wrap=True)
    if not found.events:
        screen.print(
            "this kernel waits for no signals (data announce themselves): without GPUs nothing is "
            "seen of it"
            if plan.path == "fused"
            else f"no fused kernel ran: nothing to see ({plan.path}: {plan.reason})"
        )
        raise typer.Exit(1)
    _write_traces([found], out)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def simulate(context: typer.Context) -> None:
    """Predict what fusion gains on a cluster: training, serving, experts, recommendation. Needs no
    GPU."""
    from tileweave.commands.simulate import app as simulator

    simulator(context.args, prog_name="tileweave simulate")


app.command()(fuzz)
app.command()(mutate)


app.command()(report)


def main() -> None:
    """Entry point."""
    end_with(app)
