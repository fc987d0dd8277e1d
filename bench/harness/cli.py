"""What the commands share: options for sizes, and writing and printing of results."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import cutefce
from bench.harness.problems import Shape, sizes_of
from bench.harness.records import Measurement, collect, folder_name
from bench.harness.timing import MAX_ROUNDS, MIN_ROUNDS, SECONDS
from cutefce.cute_kernels.problem import ITEM_BYTES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Output:
    """Folder of the results, and whether recorded measurements are kept."""

    root: Path
    resume: bool
    end: float
    """When `time.monotonic` says so, no further measurement begins."""
    without_kernels: bool = False
    """Whether ours are switched off; results have a folder of their own."""

    @property
    def folder(self) -> Path:
        """The folder of this machine's GPU model."""
        return self.root / f"{folder_name()}{'_without_kernels' if self.without_kernels else ''}"

    def require_kernels(self) -> None:
        """Make a GPU's portable path an error, which would measure something else.

        It is none where kernels are switched off.
        """
        cutefce.set_strict(DEVICE == "cuda" and not self.without_kernels)

    def record(self, name: str, measurements: Sequence[Measurement], **more: Any) -> None:
        """Run the measurements, write their rows to `name`.jsonl, and print them."""
        path = self.folder / f"{name}.jsonl"
        rows = collect(path, measurements, self.resume, self.end, **more)
        if not rows:
            return
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*map(_cell, row.values()))
        console = Console(width=200, markup=False)
        console.print(table)
        console.print(f"written: {path}")


def gpu_only(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that measures a GPU: without one it raises ClickException."""

    @functools.wraps(command)
    def checked(*arguments: Any, **options: Any) -> None:
        if not torch.cuda.is_available():
            raise click.ClickException("GPU: got no CUDA device, expected one")
        command(*arguments, **options)

    return checked


def repeats_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--repeats`, None if it is not given."""
    text = f"Timed rounds; by default as many as take {SECONDS:g} s, {MIN_ROUNDS} to {MAX_ROUNDS}."
    return click.option("--repeats", type=click.IntRange(min=1), help=text)(command)


def shape_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add one option for each field of a `Shape`."""
    size = click.IntRange(min=1)
    for name, kind, text in (
        ("--dtype", click.Choice(tuple(ITEM_BYTES)), "Dtype of the inputs."),
        ("--vocab", size, "V"),
        ("--hidden", size, "D"),
        ("--tokens", size, "N"),
    ):
        command = click.option(name, type=kind, help=text)(command)
    return command


def chosen_shape(default: Shape, sizes: dict[str, Any]) -> Shape:
    """Return `default` with the sizes that were given on the command line."""
    return dataclasses.replace(default, **{name: size for name, size in sizes.items() if size})


def chosen_shapes(
    name: str, defaults: Sequence[Shape], sizes: dict[str, Any]
) -> tuple[str, Sequence[Shape]]:
    """Return the name of the result file and the shapes: other sizes get a separate file."""
    if not any(sizes.values()):
        return name, defaults
    shape = chosen_shape(defaults[0], sizes)
    return f"{name}_{slug(shape)}", (shape,)


def per_shape(shapes: Sequence[Shape], run: Callable[[Shape], Iterable[Any]]) -> list[Measurement]:
    """Return one measurement for each shape."""
    return [Measurement(sizes_of(shape), functools.partial(run, shape)) for shape in shapes]


def slug(shape: Shape) -> str:
    """Return the shape as a part of a file name."""
    return f"{shape.tokens}x{shape.hidden}x{shape.vocab}_{shape.dtype}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        return " to ".join(map(_cell, (value[0], value[-1])))
    return str(value)
