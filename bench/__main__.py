"""Command line of the benchmarks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from bench.experiments import breakdown as breakdown_bench
from bench.experiments import cpu_overhead as host_bench
from bench.experiments import forward as forward_bench
from bench.experiments import max_tokens as ceiling_bench
from bench.experiments import paper_grid as paper_bench
from bench.experiments import parallel as parallel_bench
from bench.experiments import peers as peers_bench
from bench.experiments import steady_state as sustained_bench
from bench.experiments import step as step_bench
from bench.experiments import tuned as tuned_bench
from bench.harness.problems import HEADS, SMALL, Shape
from bench.harness.records import Piece, collect, folder_name
from bench.report.compare import regressions
from cutefce.autotune_cache.tuning.subprocess_worker import Child

RESULTS = Path(__file__).parent / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED_SHAPES = {"cpu": SMALL, "cuda": Shape(32768, 4096, 262144, "bfloat16")}


@dataclass(frozen=True)
class Data:
    """Where the data goes, and whether what is there already is kept."""

    output: Path
    resume: bool

    @property
    def folder(self) -> Path:
        """That of this machine's GPU model."""
        return self.output / folder_name()

    def measure(self, name: str, pieces: Sequence[Piece], **more: Any) -> None:
        """Measure the pieces, write them under `name`, and print them."""
        path = self.folder / f"{name}.jsonl"
        rows = collect(path, pieces, self.resume, **more)
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*map(_cell, row.values()))
        console = Console(width=200)
        console.print(table)
        console.print(f"written: {path}")


@click.group()
@click.option("--output", type=Path, default=RESULTS, help="Folder of the data.")
@click.option("--resume", is_flag=True, help="Measure only what the data of this version lacks.")
@click.pass_context
def main(context: click.Context, output: Path, resume: bool) -> None:
    """Measure, print a table, and write the data."""
    context.obj = Data(output, resume)


def shape_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that a `Shape` is made of."""
    for name, kind, text in (
        ("--dtype", str, "bfloat16, float16, float32 or float64"),
        ("--vocab", int, "V"),
        ("--hidden", int, "D"),
        ("--tokens", int, "N"),
    ):
        command = click.option(name, type=kind, help=text)(command)
    return command


@main.command()
@shape_options
@click.option("--repeats", type=int, default=7, help="Timed rounds.")
@click.pass_obj
def step(data: Data, /, repeats: int, **sizes: Any) -> None:
    """Forward and backward over heads and the paper's grid, at three budgets.

    Of a shape given by hand, at every budget.
    """
    shapes, name = _shapes("step", step_bench.SHAPES[DEVICE], sizes)
    budgets = tuple(step_bench.WORKSPACES) if any(sizes.values()) else step_bench.FEW
    run = functools.partial(step_bench.run, device=DEVICE, repeats=repeats, workspaces=budgets)
    data.measure(name, _pieces(shapes, run))


@main.command()
@shape_options
@click.option("--repeats", type=int, default=7, help="Timed rounds.")
@click.pass_obj
def peers(data: Data, /, repeats: int, **sizes: Any) -> None:
    """Forward and backward of heads at every budget, in turns with other projects'."""
    shapes, name = _shapes("peers", tuple(HEADS) if DEVICE == "cuda" else (SMALL,), sizes)
    budgets = tuple(step_bench.WORKSPACES)
    with Child() as child:

        def run(shape: Shape) -> list[step_bench.Row]:
            others = peers_bench.usable(child, shape, DEVICE)
            return step_bench.run(shape, DEVICE, repeats, budgets, others)

        data.measure(name, _pieces(shapes, run))


@main.command()
@click.option("--repeats", type=int, default=9, help="Timed rounds.")
@click.pass_obj
def paper(data: Data, /, repeats: int) -> None:
    """The forward over the paper's grid, against all logits, beside the paper's numbers."""
    run = functools.partial(paper_bench.run, device=DEVICE, repeats=repeats)
    data.measure("paper", _pieces(paper_bench.SHAPES[DEVICE], run))


@main.command()
@click.option(
    "--seconds", type=float, default=0.25, help="Of a form's stretch, and to repair_stored_exps."
)
@click.pass_obj
def sustained(data: Data, /, seconds: float) -> None:
    """Forward and backward of heads, each form for long by itself."""
    run = functools.partial(sustained_bench.run, device=DEVICE, seconds=seconds)
    data.measure("sustained", _pieces(sustained_bench.SHAPES[DEVICE], run))


@main.command()
@click.pass_obj
def ceiling(data: Data, /) -> None:
    """The most tokens of a step before memory runs out."""
    data.measure(
        "ceiling",
        [
            ({"form": form}, functools.partial(ceiling_bench.run, form, DEVICE))
            for form in ceiling_bench.LOSSES
        ],
    )


@main.command()
@click.option("--repeats", type=int, default=9, help="Timed rounds.")
@click.pass_obj
def breakdown(data: Data, /, repeats: int) -> None:
    """Where the time of a step goes."""
    run = functools.partial(breakdown_bench.run, device=DEVICE, repeats=repeats)
    data.measure("breakdown", _pieces(breakdown_bench.SHAPES[DEVICE], run))


@main.command()
@click.pass_obj
def stability(data: Data, /) -> None:
    """Errors against float64 over vocabularies, scales of logits and placements of targets."""
    from bench.experiments import (
        stability as stability_bench,  # its references need packages of the tests
    )

    data.measure(
        "stability",
        [
            ({"vocab": vocab}, functools.partial(stability_bench.run, vocab, DEVICE))
            for vocab in stability_bench.VOCABS[DEVICE]
        ],
    )


@main.command()
@click.option("--steps", type=int, help="Steps of each training; the demo's number if not given.")
@click.pass_obj
def equivalence(data: Data, /, steps: int | None) -> None:
    """Loss curves of the demo's training with every strategy."""
    from bench.experiments import (
        loss_curves as equivalence_bench,  # its corpus needs packages of the demo
    )

    data.measure("equivalence", [({}, functools.partial(equivalence_bench.run, steps))])


@main.command()
@click.option("--repeats", type=int, default=30, help="Timed rounds.")
@click.pass_obj
def forward(data: Data, /, repeats: int) -> None:
    """Forward on a GPU, against one plain product."""
    run = functools.partial(forward_bench.run, repeats=repeats)
    data.measure("forward", _pieces(forward_bench.SHAPES, run))


@main.command()
@click.option("--repeats", type=int, default=15, help="Timed rounds.")
@click.pass_obj
def tuned(data: Data, /, repeats: int) -> None:
    """The tuned table's configurations on a GPU, against the defaults."""
    run = functools.partial(tuned_bench.run, repeats=repeats)
    data.measure("tuned", _pieces(tuned_bench.SHAPES, run))


@main.command()
@click.pass_obj
def host(data: Data, /) -> None:
    """Host time of a call on a GPU."""
    data.measure("host", [({}, lambda: [host_bench.run()])])


@main.command()
@shape_options
@click.option("--repeats", type=int, default=20, help="Timed rounds.")
@click.option("--workspace", help='Bytes, "min" or "max".')
@click.pass_obj
def parallel(data: Data, /, repeats: int, workspace: str | None, **sizes: Any) -> None:
    """A step that ranks share, against one device; run by torchrun."""
    shape = _shape(SHARED_SHAPES[DEVICE], sizes)
    budget = int(workspace) if workspace and workspace.isdigit() else workspace
    with parallel_bench.joined(DEVICE) as (rank, ranks):
        rows = parallel_bench.run(shape, DEVICE, repeats, budget)
        if rank == 0:
            more = {"shape": dataclasses.asdict(shape), "workspace": budget}
            data.measure(f"parallel_{ranks}_ranks_{_slug(shape)}", [({}, lambda: rows)], **more)


@main.command()
@click.argument(
    "folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.pass_obj
def report(data: Data, /, folder: Path | None) -> None:
    """Draw the data and write report.md, in FOLDER such as bench/results/nvidia_h200."""
    from bench.report import markdown as report_bench
    from bench.report import plots  # needs matplotlib

    folder = folder or data.folder
    pictures = plots.draw(folder)
    for path in (*pictures, report_bench.write(folder, pictures)):
        click.echo(f"written: {path}")


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def compare(folder: Path) -> None:
    """Compare results in FOLDER with the committed ones; fail if a ratio or memory grew."""
    found = []
    for new in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not (RESULTS / new.name).exists():
            click.echo(f"nothing is committed for {new.name}: commit these results")
            continue
        found += [f"{new.name}/{text}" for text in regressions(new, RESULTS / new.name)]
    if found:
        raise click.ClickException("worse than committed:\n" + "\n".join(found))


def _shapes(
    name: str, default: tuple[Shape, ...], sizes: dict[str, Any]
) -> tuple[tuple[Shape, ...], str]:
    """Return the shapes to measure and the name of their data: other sizes have their own."""
    if not any(sizes.values()):
        return default, name
    shape = _shape(default[0], sizes)
    return (shape,), f"{name}_{_slug(shape)}"


def _pieces(shapes: Sequence[Shape], run: Callable[[Shape], Sequence[Any]]) -> list[Piece]:
    return [
        (
            {"tokens": shape.tokens, "hidden": shape.hidden, "vocab": shape.vocab},
            functools.partial(run, shape),
        )
        for shape in shapes
    ]


def _shape(default: Shape, sizes: dict[str, Any]) -> Shape:
    given = {name: value for name, value in sizes.items() if value}
    return dataclasses.replace(default, **given)


def _slug(shape: Shape) -> str:
    return f"{shape.tokens}x{shape.hidden}x{shape.vocab}_{shape.dtype}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        return " to ".join(map(_cell, (value[0], value[-1])))
    return str(value)


if __name__ == "__main__":
    main()
