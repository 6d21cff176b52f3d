"""The command ``tileweave simulate``: parses, shows progress and tables, delegates to ``sim``."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tileweave.bench.console import console
from tileweave.bench.prerequisites import file_for, folder_for, need
from tileweave.errors import InputError, require
from tileweave.files import write_text

try:
    from tileweave.commands.public_audit import audit
    from tileweave.commands.simulate_show import progress_on, show
    from tileweave.planning.costs import REFERENCE, Calibration, Costs, load_calibration
    from tileweave.sim import (
        astra,
        dlrm,
        fit,
        flux,
        moe,
        perfetto,
        report,
        serving,
        training,
        trust,
    )
    from tileweave.sim import replay as replaying
    from tileweave.sim.cells import RULE, Cell, holds_cells, read_cells
    from tileweave.sim.crosscheck import compare
    from tileweave.sim.document import located, open_document
    from tileweave.sim.machine import Cluster, make_cluster, presets, published_curves, with_gpus
    from tileweave.sim.measurements import UNSTEADY, merge_runs
    from tileweave.sim.packaged import packaged_cells
    from tileweave.sim.transformer import catalogue
    from tileweave.sim.workload import Scenario, cluster_notes, scenario_of
except ModuleNotFoundError as error:
    if error.name not in ("simpy", "yaml", "google", "google.protobuf"):
        raise
    raise SystemExit(
        "tileweave simulate needs simpy, pyyaml and protobuf: pip install simpy pyyaml protobuf"
    ) from None

app = typer.Typer(
    help="Predict what fusion gains on a cluster, from measured calibration; needs no GPU.",
    no_args_is_help=True,
    add_completion=False,
)

Device = Annotated[
    str, typer.Option(help="a100-pcie, a100, h800, h100, h200, b200, mi210 or mi300x.")
]
Net = Annotated[
    str,
    typer.Option(
        help="Network between nodes: ib-100 to ib-800, rail-400, rail-800, torus-200, torus-400."
    ),
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs in all.")]
PerNode = Annotated[
    int | None,
    typer.Option(min=1, help="GPUs per node (default: the usual number for the device)."),
]
Tp = Annotated[int, typer.Option(help="Tensor-parallel degree.")]
Imbalance = Annotated[
    float,
    typer.Option(help="Load of the busiest GPU above the average; 0: balanced, 0.3: 30 % more."),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for plots, a Perfetto trace and the numbers as JSON.")
]
Advise = Annotated[
    bool,
    typer.Option(
        "--advise", help="Try every degree; show which is best, and which operators to fuse."
    ),
]
Sense = Annotated[
    bool, typer.Option("--sensitivity/--no-sensitivity", help="What moves the result.")
]
Export = Annotated[
    Path | None,
    typer.Option(help="Folder for Chakra traces (.et) and ASTRA-sim's network and system files."),
]
Detail = Annotated[Literal["operators", "tasks"], typer.Option(help="How finely --export writes.")]
Calib = Annotated[
    Path | None, typer.Option(help="A calibration file (default: the one measured on H200).")
]
Cells = Annotated[
    list[Path] | None,
    typer.Option(help="Results of measurements, files or folders (default: the packaged ones)."),
]


def _calibration(path: Path | None) -> Calibration:
    return load_calibration(str(path) if path else None)


def _cluster(
    device: str, network: str, nodes: int | None, gpus: int | None, per_node: int | None
) -> Cluster:
    made = make_cluster(device, network, nodes or 1, per_node)
    if gpus is not None:
        require(
            nodes is None or nodes * made.gpus_per_node == gpus,
            f"{gpus} GPUs on {nodes} nodes of {made.gpus_per_node}",
            "one of both",
            "drop one",
        )
        made = with_gpus(made, gpus)
    return made


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="A workload in YAML, see docs/simulator.md.")],
    out: Out = None,
    advise: Advise = False,
    sense: Sense = True,
    export: Export = None,
    detail: Detail = "operators",
    calibration: Calib = None,
) -> None:
    """Simulate what a YAML file describes."""
    spot = open_document(file)
    scenario = scenario_of(spot)
    try:
        show(scenario, _calibration(calibration), sense, advise, out, export, detail)
    except InputError as error:  # of fields that are valid alone but not together
        raise located(spot, error) from None


@app.command()
def train(
    model: Annotated[
        str, typer.Argument(help="gpt3-175b, llama2-70b, llama3-70b or llama3-405b.")
    ] = "gpt3-175b",
    tp: Tp = 8,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[
        int, typer.Option(help="Data-parallel degree; 0: all GPUs that tp and pp leave.")
    ] = 0,
    global_batch: Annotated[
        int, typer.Option(help="Samples per step; 0: 8 micro-batches per stage.")
    ] = 0,
    micro_batch: Annotated[int, typer.Option(help="Samples per micro-batch.")] = 1,
    seq: Annotated[int, typer.Option(help="Tokens per sample; 0: as the model was trained.")] = 0,
    recompute: Annotated[
        Literal["none", "selective", "full"],
        typer.Option(help="full: a second forward before each backward."),
    ] = "none",
    virtual_pipeline: Annotated[
        int, typer.Option(help="Parts of the model on each stage (interleaved 1F1B).")
    ] = 1,
    context_parallel: Annotated[int, typer.Option(help="Ranks that share a sequence.")] = 1,
    schedule: Annotated[
        Literal["1f1b", "zero_bubble"], typer.Option(help="Order of the pipeline.")
    ] = "1f1b",
    gradients: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="How gradients are kept and reduced.")
    ] = "fp32",
    sharding: Annotated[
        Literal["none", "optimizer", "gradients", "parameters"],
        typer.Option(help="What data parallel ranks share out: ZeRO 0 to 3, the last is FSDP."),
    ] = "optimizer",
    device: Device = "h200",
    network: Net = "ib-400",
    nodes: Nodes = None,
    gpus: Gpus = None,
    gpus_per_node: PerNode = None,
    out: Out = None,
    advise: Advise = False,
    sense: Sense = True,
    export: Export = None,
    detail: Detail = "operators",
    calibration: Calib = None,
) -> None:
    """One step of Megatron-style training: data, pipeline, context and tensor parallel."""
    work = training.by_name(
        _known(model, "transformers"),
        tp=tp,
        pp=pp,
        dp=dp,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seq=seq,
        recompute=recompute,
        virtual_pipeline=virtual_pipeline,
        context_parallel=context_parallel,
        schedule=schedule,
        gradients=gradients,
        sharding=sharding,
    )
    scenario = Scenario("train", work, _cluster(device, network, nodes, gpus, gpus_per_node))
    show(scenario, _calibration(calibration), sense, advise, out, export, detail)


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="llama3-70b, llama2-70b, llama3-405b or gpt3-175b.")
    ] = "llama3-70b",
    tp: Tp = 4,
    phase: Annotated[
        Literal["prefill", "decode", "generate"],
        typer.Option(help="Whole prompts, one token of each, or prompts and all --output tokens."),
    ] = "prefill",
    batch: Annotated[int, typer.Option(help="Prompts at once.")] = 8,
    seq: Annotated[
        int, typer.Option(help="Tokens of a prompt; in decode: those in the cache.")
    ] = 2048,
    pp: Annotated[int, typer.Option(help="Pipeline stages, over nodes.")] = 1,
    output: Annotated[int, typer.Option(help="Tokens that generate makes of each prompt.")] = 0,
    all_reduce: Annotated[
        Literal["engine", "nccl"],
        typer.Option(help="Of the baseline: an engine's own where NCCL is slower, or NCCL."),
    ] = "engine",
    device: Device = "h200",
    network: Net = "ib-400",
    nodes: Nodes = None,
    gpus_per_node: PerNode = None,
    out: Out = None,
    advise: Advise = False,
    sense: Sense = True,
    export: Export = None,
    detail: Detail = "operators",
    calibration: Calib = None,
) -> None:
    """A prefill, a decoding step or whole requests, tensor and pipeline parallel."""
    cluster = _cluster(device, network, nodes, None, gpus_per_node)
    work = serving.by_name(
        _known(model, "transformers"),
        tp=tp,
        phase=phase,
        batch=batch,
        seq=seq,
        pp=pp,
        output=output,
        all_reduce=all_reduce,
    )
    scenario = Scenario("serve", work, cluster)
    show(scenario, _calibration(calibration), sense, advise, out, export, detail)


@app.command(name="moe")
def moe_command(
    model: Annotated[
        str, typer.Argument(help="qwen3-235b, deepseek-v3 or mixtral-8x7b.")
    ] = "qwen3-235b",
    ep: Annotated[
        int,
        typer.Option(
            help="Expert-parallel degree, the GPUs that share the experts of a layer; 0: all."
        ),
    ] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens per GPU.")] = 4096,
    seq: Annotated[int, typer.Option(help="Tokens per sample, for attention.")] = 4096,
    imbalance: Imbalance = 0.0,
    phase: Annotated[
        Literal["forward", "prefill", "decode"],
        typer.Option(help="The layers alone, or a step of an engine with its host."),
    ] = "forward",
    exchange: Annotated[
        Literal["nccl", "normal", "low_latency"],
        typer.Option(help="Of the baseline: NCCL, or DeepEP's kernels for many or few tokens."),
    ] = "nccl",
    fp8: Annotated[bool, typer.Option("--fp8", help="Matmuls and dispatch in FP8.")] = False,
    two_batch: Annotated[
        bool, typer.Option("--two-batch", help="Two halves overlap each other's communication.")
    ] = False,
    redundant: Annotated[int, typer.Option(help="Copies of experts.")] = 0,
    device: Device = "h200",
    network: Net = "ib-400",
    nodes: Nodes = None,
    gpus: Gpus = None,
    gpus_per_node: PerNode = None,
    out: Out = None,
    advise: Advise = False,
    sense: Sense = True,
    export: Export = None,
    detail: Detail = "operators",
    calibration: Calib = None,
) -> None:
    """The layers of a mixture-of-experts model, forward, with experts sharded over ranks."""
    work = moe.by_name(
        _known(model, "moe"),
        ep=ep,
        tokens=tokens,
        seq=seq,
        imbalance=imbalance,
        phase=phase,
        exchange=exchange,
        fp8=fp8,
        two_batch=two_batch,
        redundant=redundant,
    )
    scenario = Scenario("moe", work, _cluster(device, network, nodes, gpus, gpus_per_node))
    show(scenario, _calibration(calibration), sense, advise, out, export, detail)


@app.command(name="dlrm")
def dlrm_command(
    model: Annotated[str, typer.Argument(help="dlrm-ours, dlrm-v2 or dlrm-sc24.")] = "dlrm-ours",
    imbalance: Imbalance = 0.0,
    slices: Annotated[
        int,
        typer.Option(help="Messages per result of the fused operator, between nodes."),
    ] = 8,
    prefetch: Annotated[
        bool, typer.Option("--prefetch", help="Send indices during the step before.")
    ] = False,
    update: Annotated[
        Literal["tileweave", "torch"], typer.Option(help="Whose update of tables, in all modes.")
    ] = "tileweave",
    device: Device = "h200",
    network: Net = "ib-400",
    nodes: Nodes = None,
    gpus: Gpus = None,
    gpus_per_node: PerNode = None,
    out: Out = None,
    advise: Advise = False,
    sense: Sense = True,
    export: Export = None,
    detail: Detail = "operators",
    calibration: Calib = None,
) -> None:
    """One training step of a recommendation model, with tables sharded over ranks."""
    work = dlrm.by_name(
        _known(model, "dlrm"),
        imbalance=imbalance,
        slices=slices,
        prefetch=prefetch,
        update=update,
    )
    scenario = Scenario("dlrm", work, _cluster(device, network, nodes, gpus, gpus_per_node))
    show(scenario, _calibration(calibration), sense, advise, out, export, detail)


@app.command()
def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Chakra traces (.et), one per rank, of this tool or of another."),
    ],
    network_file: Annotated[
        Path | None, typer.Option(help="ASTRA-sim's network YAML (else --device and --network).")
    ] = None,
    device: Device = "h200",
    network: Net = "ib-400",
    gpus_per_node: PerNode = None,
    out: Out = None,
) -> None:
    """Simulate Chakra traces: computation as recorded, collectives and messages by this model."""
    for path in traces:
        require(
            os.path.isfile(path),
            f"trace {path}",
            "files that exist, one per rank",
            "name .et files, such as DIR/*.et",
        )
    folder_for(out)
    screen, traces = console(), sorted(traces)
    cluster = replaying.cluster_for(traces, device, network, gpus_per_node)
    coefficients = load_calibration().coefficients
    if network_file is not None:
        require(
            gpus_per_node is None,
            "--gpus-per-node with --network-file",
            "one of both",
            "drop one: the file has it",
        )
        cluster = astra.read_network(
            network_file, cluster.device, Costs(cluster.device, coefficients)
        )
        ranks = replaying.world_of(traces)
        asked = f"traces of {ranks} ranks on the {cluster.world_size} NPUs of {network_file}"
        require(
            cluster.world_size == ranks,
            asked,
            "an NPU for each rank",
            "change npus_count, or take the traces' own file",
        )
        screen.print(
            "note: the latency inside a node is the calibration's, not the file's",
            markup=False,
            style="dim",
        )
    for line in replaying.doubts(traces):
        screen.print(f"note: {line}", markup=False, style="yellow")
    with progress_on(screen) as say:
        timeline = replaying.replay(traces, cluster, coefficients, progress=say)
    screen.print(
        f"{len(traces)} rank{'s' * (len(traces) != 1)}: {report.time_text(timeline.seconds)}; "
        f"{len(timeline.tasks)} nodes"
    )
    for phase, time in timeline.phases().items():
        screen.print(f"  {phase}: {report.time_text(time)}")
    for note in (*timeline.notes, *cluster_notes(cluster)):
        screen.print(f"note: {note}", markup=False, style="dim")
    if out is not None:
        screen.print(
            "wrote "
            f"{perfetto.write(perfetto.timeline_events(timeline), out / 'replay.trace.json')}",
            markup=False,
        )


@app.command(name="trust")
def trust_command(
    cells: Cells = None,
    calibration: Calib = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for a picture and all tables in Markdown.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Show every cell, not only groups.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="What the cells were measured on; the calibration is of H200.")
    ] = REFERENCE,
    public: Annotated[
        bool,
        typer.Option("--public", help="Errors against figures that others published, instead."),
    ] = False,
) -> None:
    """Errors against measured cells, fitted and held out separately; published tables and the
    model."""
    screen, used = console(), _calibration(calibration)
    if folder_for(out) is not None:
        need("tileweave simulate trust --out", "matplotlib")
    if public:
        require(
            not cells, "--cells with --public", "one of both", "leave --cells out: the table is own"
        )
        with progress_on(screen) as say:
            audit(screen, used, every, out, say)
        return
    measured = _measured(cells, device)
    merged, unsteady = merge_runs(measured)
    with progress_on(screen) as say:
        say(f"predicts {len(merged)} cells")
        judged, unknown = trust.judge(merged, used, device)
        say("published tables")
        published = trust.published(used)
        models = flux.model_table(used, say)
    screen.print(f"rule: {RULE}", markup=False)
    for side in ("fit", "held out", "input", "outside"):
        rows = trust.summarise(judged, side)
        if rows:
            screen.print(report.summary_table(side, rows))
    if cells:
        every_side = trust.summarise(judged, None)
        screen.print(report.summary_table("both sides, as a blind test", every_side))
    pairs, mean, worst = trust.repeatability(measured)
    if pairs:
        apart = f"{mean:.1%} apart (geometric mean), worst {worst:.1%}"
        screen.print(f"the same quantity measured in two runs: {pairs} pairs, {apart}")
    screen.print(
        f"{len(measured)} times, {len(unsteady)} {UNSTEADY}; "
        f"the others are {len(merged)} quantities",
        markup=False,
    )
    if every:
        screen.print(report.cell_table(judged))
    for cell in unknown:
        screen.print(f"no model: {cell}", markup=False, style="dim")
    screen.print(report.published_table(published), report.flux_table(models), sep="\n")
    if out is not None:
        from tileweave.sim import plots

        tables = [
            *(
                report.summary_table(f"## {side}", trust.summarise(judged, side), True)
                for side in ("fit", "held out")
            ),
            report.published_table(published, True),
            report.flux_table(models, True),
            report.unsteady_table(unsteady),
            report.cell_table(judged, True),
        ]
        write_text(out / "simulator-trust.md", _markdown([f"Rule: {RULE}.", *tables]))
        picture = plots.plot_trust(judged, out / "simulator-trust.png")
        screen.print(f"wrote {picture} and simulator-trust.md", markup=False)


def _markdown(parts: list[Any]) -> str:
    """Texts and tables, one after the other, as Markdown."""
    text = StringIO()
    Console(file=text, width=260, highlight=False).print(*parts, sep="\n")
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


@app.command()
def calibrate(
    to: Annotated[Path, typer.Argument(help="Where to write the calibration.")],
    cells: Cells = None,
) -> None:
    """Fit coefficients to measured cells, without those that are held out. Takes minutes."""
    file_for(to)
    screen = console()
    used = fit.fit(
        merge_runs(_measured(cells, REFERENCE))[0],
        progress=lambda text: screen.print(text, markup=False),
    )
    write_text(to, json.dumps(used.as_dict(), indent=1) + "\n")
    screen.print(f"wrote {to}", markup=False)


@app.command()
def crosscheck(
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of one GPU each.")] = 128,
) -> None:
    """Compare the network model with SimGrid, if it is installed."""
    screen = console()
    with progress_on(screen) as say:
        found = compare(nodes, say)
    screen.print(report.crosscheck_table(found))


@app.command()
def machines() -> None:
    """List devices, networks and models, with their sources."""
    screen = console()
    table = Table("device", "bf16 TFLOP/s", "memory TB/s", "link GB/s", "inside", "source")
    for device in presets()["devices"].values():
        rates = (
            f"{device.flops / 1e12:g}",
            f"{device.memory_rate / 1e12:g}",
            f"{device.link_rate / 1e9:g}",
        )
        table.add_row(device.name, *rates, device.inside, device.source)
    screen.print(table)
    table = Table("network", "NIC GB/s", "fraction", "latency us", "topology")
    for net in presets()["networks"].values():
        table.add_row(
            net.name,
            f"{net.nic_rate / 1e9:g}",
            f"{net.fraction:g}",
            f"{net.latency * 1e6:g}",
            net.topology,
        )
    screen.print(table)
    table = Table(
        "NCCL in a node, published", "ranks", "link GB/s", "large: of the links", "source"
    )
    for one in published_curves():
        words = (str(one.curve.world), f"{one.link_rate / 1e9:g}", f"{one.curve.fractions[-1]:.0%}")
        table.add_row(one.curve.kind, *words, one.source)
    screen.print(table)
    for kind in ("transformers", "moe", "dlrm"):
        screen.print(f"{kind}: {', '.join(catalogue(kind))}")


def _measured(cells: list[Path] | None, device: str) -> list[Cell]:
    """Cells of the files and folders that are named, or the packaged cells of ``device``."""
    if not cells:
        return packaged_cells(device)
    folders = [
        path
        for folder in cells
        if os.path.isdir(folder)
        for path in sorted(folder.glob("*.json"))
        if holds_cells(path)
    ]
    found = [path for path in cells if not os.path.isdir(path)] + folders
    require(
        bool(found),
        f"--cells {', '.join(map(str, cells))}, without results",
        "results files, and folders that have some",
        "pass --cells FILE, or leave it out",
    )
    return read_cells(found)


def _known(name: str, kind: str) -> str:
    known = catalogue(kind)
    require(name in known, f"model {name!r}", ", ".join(known), "one of these, or a YAML file")
    return name
