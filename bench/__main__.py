"""Command line of the benchmarks."""

import dataclasses
import json
import platform
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import cutefce
from bench import forward as forward_bench
from bench import host as host_bench
from bench import paper as paper_bench
from bench import parallel as parallel_bench
from bench import step as step_bench
from bench.compare import regressions
from bench.head import Shape

RESULTS = Path(__file__).parent / "results"


SHARED_SHAPES = {
    "cpu": Shape(tokens=512, hidden=256, vocab=8192, dtype="float32"),
    "cuda": Shape(tokens=32768, hidden=4096, vocab=262144, dtype="bfloat16"),
}


@click.group()
@click.option("--output", type=Path, default=RESULTS, help="Folder of the data.")
@click.pass_context
def main(context: click.Context, output: Path) -> None:
    """Measure, print a table, and write the data."""
    context.obj = output


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
def step(output: Path, /, repeats: int, **sizes: Any) -> None:
    """Forward and backward, against the plain products and two stages."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes, name = step_bench.DEFAULT_SHAPES[device], "step"
    if any(sizes.values()):
        shapes = (_shape(shapes[0], sizes),)
        name = f"step_{_slug(shapes[0])}"
    _finish(output, name, [row for s in shapes for row in step_bench.run(s, device, repeats)])


@main.command()
@shape_options
@click.option("--repeats", type=int, default=20, help="Timed rounds.")
@click.option("--workspace", help='Bytes, "min" or "max".')
@click.pass_obj
def parallel(output: Path, /, repeats: int, workspace: str | None, **sizes: Any) -> None:
    """A step that ranks share, against one device; run by torchrun."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = _shape(SHARED_SHAPES[device], sizes)
    budget = int(workspace) if workspace and workspace.isdigit() else workspace
    with parallel_bench.joined(device) as (rank, ranks):
        rows = parallel_bench.run(shape, device, repeats, budget)
        if rank == 0:
            more = {"shape": dataclasses.asdict(shape), "workspace": budget}
            _finish(output, f"parallel_{ranks}_ranks_{_slug(shape)}", rows, **more)


@main.command()
@click.option("--repeats", type=int, default=30, help="Timed rounds.")
@click.pass_obj
def forward(output: Path, /, repeats: int) -> None:
    """Forward on a GPU, against one plain product."""
    rows = [row for shape in forward_bench.SHAPES for row in forward_bench.run(shape, repeats)]
    _finish(output, "forward", rows)


@main.command()
@click.pass_obj
def host(output: Path, /) -> None:
    """Host time of a call on a GPU."""
    _finish(output, "host", [host_bench.run()])


@main.command()
@click.option("--steps", type=int, help="Steps of each training; the demo's number if not given.")
@click.pass_obj
def equivalence(output: Path, /, steps: int | None) -> None:
    """Loss curves of the demo's training with every strategy."""
    from bench import equivalence as equivalence_bench  # its corpus needs packages of the demo

    _finish(output, "equivalence", equivalence_bench.run(steps))


@main.command()
@click.option("--repeats", type=int, default=9, help="Timed rounds.")
@click.pass_obj
def paper(output: Path, /, repeats: int) -> None:
    """The forward over the paper's grid, against all logits, beside the paper's numbers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [paper_bench.run(shape, device, repeats) for shape in paper_bench.SHAPES[device]]
    _finish(output, "paper", rows)


@main.command()
@click.pass_obj
def stability(output: Path, /) -> None:
    """Errors against float64 over vocabularies, scales of logits and placements of targets."""
    from bench import stability as stability_bench  # its references need packages of the tests

    device = "cuda" if torch.cuda.is_available() else "cpu"
    _finish(output, "stability", stability_bench.run(device))


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def plot(folder: Path) -> None:
    """Draw the data in FOLDER, such as bench/results/nvidia_h200."""
    from bench import plots  # needs matplotlib

    for path in plots.draw(folder):
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


def _shape(default: Shape, sizes: dict[str, Any]) -> Shape:
    given = {name: value for name, value in sizes.items() if value}
    return dataclasses.replace(default, **given)


def _slug(shape: Shape) -> str:
    return f"{shape.tokens}x{shape.hidden}x{shape.vocab}_{shape.dtype}"


def _finish(folder: Path, name: str, rows: Iterable[Any], **more: Any) -> None:
    """Print `rows`, which are dataclasses, and write them with what they were measured on."""
    records = [dataclasses.asdict(row) for row in rows]
    table = Table(*records[0])
    for record in records:
        table.add_row(*map(_cell, record.values()))
    console = Console(width=160)
    console.print(table)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    path = folder / re.sub(r"\W+", "_", device.lower()) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = {"cutefce": cutefce.__version__, "python": platform.python_version()}
    for package in ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        versions[package] = metadata.version(package)
    date = datetime.now(timezone.utc).date().isoformat()
    record = {"date": date, "device": device, "versions": versions, "rows": records}
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written: {path}")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        return " to ".join(map(_cell, (value[0], value[-1])))
    return str(value)


if __name__ == "__main__":
    main()
