"""Command line of the benchmarks."""

import dataclasses
import json
import platform
import re
from collections.abc import Iterable
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
from bench import step as step_bench
from bench.compare import regressions

RESULTS = Path(__file__).parent / "results"
DEFAULT_SHAPES = {
    "cpu": step_bench.Shape(tokens=2048, hidden=1024, vocab=50257, dtype="float32"),
    "cuda": step_bench.Shape(tokens=8192, hidden=4096, vocab=131072, dtype="bfloat16"),
}


@click.group()
@click.option("--output", type=Path, default=RESULTS, help="Folder of the data.")
@click.pass_context
def main(context: click.Context, output: Path) -> None:
    """Measure, print a table, and write the data."""
    context.obj = output


@main.command()
@click.option("--tokens", type=int, help="N")
@click.option("--hidden", type=int, help="D")
@click.option("--vocab", type=int, help="V")
@click.option("--dtype", help="bfloat16, float16, float32 or float64")
@click.option("--repeats", type=int, default=7, help="Timed rounds.")
@click.pass_obj
def step(output: Path, /, repeats: int, **sizes: Any) -> None:
    """Forward and backward, against the plain products and two stages."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {name: value for name, value in sizes.items() if value}
    shape = dataclasses.replace(DEFAULT_SHAPES[device], **given)
    name = f"step_{shape.tokens}x{shape.hidden}x{shape.vocab}_{shape.dtype}"
    _finish(output, name, step_bench.run(shape, device, repeats), shape=dataclasses.asdict(shape))


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
    record = {"date": date, "device": device, "versions": versions, **more, "rows": records}
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written: {path}")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        return " to ".join(map(_cell, value))
    return str(value)


if __name__ == "__main__":
    main()
