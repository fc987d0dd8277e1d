"""Helpers of several subcommands: consoles, table files, this machine's GPU."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
import rich.table
import torch
from rich.console import Console

from cutefce.autotune_cache import lookup, verdicts
from cutefce.autotune_cache.tables import Candidate, Entry, Key, Table
from cutefce.autotune_cache.tuning.shapes import NAMED, Sizes, parse
from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.arch.base import Gpu
from cutefce.ops.primitives.dispatch import gpu_arch, gpu_of

F = TypeVar("F", bound=Callable[..., Any])

TABLE_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
"""Type of an argument that names an existing table."""


def make_console() -> Console:
    """Return a console that is wide enough for tables when its output is redirected.

    It prints text as it is: brackets are no markup.
    """
    return Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)


def printable(text: str) -> str:
    """Return text of a file without what a terminal would obey: other characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _parse_shapes(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[Sizes, ...]:
    """Return the sizes of all given sets, each once."""
    try:
        return tuple(dict.fromkeys(sizes for text in given for sizes in parse(text)))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def shapes_option(what: str, **more: Any) -> Callable[[F], F]:
    """Return the option for sizes of `what`, with `more` arguments of click's."""
    names = ", ".join(NAMED)
    return click.option(
        "--shapes",
        multiple=True,
        metavar="SET|NxDxV",
        callback=_parse_shapes,
        help=f"{what}: {names}, or tokens x hidden x vocab; repeatable.",
        **more,
    )


dtype_option = click.option(
    "--dtype",
    type=click.Choice(sorted({dtype for arch in ARCHS for dtype in arch.dtypes})),
    default="bfloat16",
    show_default=True,
    help="Dtype of hidden states and weight.",
)


def has_gpu() -> bool:
    """Whether the current GPU has kernels."""
    return torch.cuda.is_available() and gpu_arch(_current()) is not None


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def this_gpu() -> tuple[Gpu, str]:
    """Return the model of the current GPU and the name by which torch addresses it.

    Raises:
        ClickException: if there is no GPU, or none that has kernels.
    """
    if has_gpu():
        return gpu_of(_current()), str(_current())
    expected = ", ".join(f"{major}.{minor}" for major, minor in (a.capability for a in ARCHS))
    got = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    raise click.ClickException(f"GPU: got {got}, expected compute capability {expected}")


def require_passed(verdict: verdicts.Verdict, gpu: Gpu, dtype: str) -> None:
    """Raise ClickException unless the kernels passed verification."""
    if not verdict.passed:
        reason = f"the {dtype} kernels failed on {gpu.name}: {verdict.reason}"
        raise click.ClickException(reason)


def describe(candidate: Candidate) -> str:
    """Return a short description of a candidate for the columns of a table."""
    return str(candidate or "cuBLAS")


def winners(found: Iterable[tuple[Gpu, Key, Entry]]) -> rich.table.Table:
    """Return a table of winners to print."""
    columns = "device", "kernel", "dtype", "NxDxV", "config", "ms", "default ms", "gain"
    shown = rich.table.Table(*columns)
    for gpu, key, entry in found:
        shown.add_row(
            printable(gpu.name),
            key.kernel,
            key.dtype,
            f"{key.tokens}x{key.hidden}x{key.vocab}",
            describe(entry.config),
            f"{entry.ms:.3f}",
            f"{entry.default_ms:.3f}",
            f"{entry.default_ms / entry.ms - 1:.1%}",
        )
    return shown


def whose_kernels(table: Table) -> str:
    """Return whether a table is proof of the installed kernels, and compiler."""
    if None in table.build.values():
        return "of kernels that it does not name; first renew it, with: cutefce verify --table"
    return f"of {'these' if table.build == lookup.current_build() else 'other'} kernels"


def contents(table: Table) -> str:
    """Return what a file has that can be used, and what it has not."""
    text = f"{len(table.entries)} entries for {printable(table.gpu.name)}, {whose_kernels(table)}"
    if table.left_out:
        text += f"; left out {table.left_out}, whose configuration is not listed for the GPU"
    return text
