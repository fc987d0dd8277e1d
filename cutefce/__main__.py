"""`python -m cutefce`: compile the kernels ahead, and show what serves this machine."""

import dataclasses
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from cutefce.autotune_cache import lookup, table, table_io
from cutefce.commands.tune import tune, verify
from cutefce.cute_kernels.arch import ARCHS, arch_named
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.jit.compiler import Report
from cutefce.cute_kernels.spec import ProjectExpSpec

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
PACKAGES = ("cutefce", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")


@click.group()
def main() -> None:
    """Exact fused linear cross entropy."""


main.add_command(tune)
main.add_command(verify)


@main.command("compile")
@click.option(
    "--arch",
    "names",
    default=",".join(arch.name for arch in ARCHS),
    show_default=True,
    help="Architectures, separated by commas.",
)
def compile_all(names: str) -> None:
    """Compile every kernel that can be chosen into the cache folder; needs no GPU.

    Fails if one spills registers, or if its products wait for each other.
    """
    try:
        archs = [arch_named(name) for name in names.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error
    kernels = [kernel for arch in archs for kernel in lookup.shipped_kernels(arch)]
    table = Table("arch", "kernel", "", "registers", "spilled B", "shared B", "seconds", "warnings")
    clean = True
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=processes) as pool:
        for result in pool.map(jit_cache.compile_ahead, kernels):
            table.add_row(*_cells(result))
            clean &= result.is_clean
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(f"{len(kernels)} kernels in {jit_cache.cache_folder()}", soft_wrap=True)
    if not clean:
        raise click.ClickException("a kernel spills registers or its products wait")


def _cells(result: Report) -> list[str]:
    kernel, shared = result.kernel, ""
    details = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel)}
    if isinstance(kernel, ProjectExpSpec):
        shared = str(arch_named(kernel.arch).used_smem_bytes(kernel.config))
    details = {name: value for name, value in details.items() if value and name != "arch"}
    return [
        kernel.arch,
        type(kernel).__name__,
        ", ".join(name if value is True else str(value) for name, value in details.items()),
        str(result.registers),
        str(result.spill_bytes),
        shared,
        f"{result.seconds:.1f}",
        " ".join(result.warnings),
    ]


@main.command()
def info() -> None:
    """Show versions, the GPU, what serves which dtype and why, and the kernels that are there."""
    import torch

    from cutefce.cute_kernels.problem import ITEM_BYTES
    from cutefce.ops.primitives.dispatch import device_unsupported_reason

    table = Table("", Column(overflow="fold"), show_header=False, box=None)
    for name in PACKAGES:
        try:
            table.add_row(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            table.add_row(name, "not installed")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    table.add_row("device", torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    for name in ITEM_BYTES:
        reason = device_unsupported_reason(device, getattr(torch, name))
        table.add_row(name, "kernels" if reason is None else f"portable path: {reason}")
    table.add_row("cache", _libraries(jit_cache.cache_folder()))
    table.add_row("prebuilt", _libraries(jit_cache.prebuilt_folder()))
    for folder in sorted(jit_cache.PREBUILT_FOLDER.glob("*")):
        if folder != jit_cache.prebuilt_folder():
            table.add_row("", f"{_libraries(folder)}: of other versions, not used")
    Console(soft_wrap=True).print(table)


def _libraries(folder: Path) -> str:
    sizes = [path.stat().st_size for path in folder.glob("*.so")]
    return f"{folder} ({len(sizes)} kernels, {sum(sizes) / 2**20:.1f} MiB)"


@main.group()
def cache() -> None:
    """Look after the tuned tables."""


@cache.command()
@click.argument("files", nargs=-1, type=FILE)
def show(files: tuple[Path, ...]) -> None:
    """Show what won: in FILES, or else in every table of the user's folder."""
    table = Table(
        *("device", "kernel", "dtype", "N × D × V", "config", "ms", "default ms", "verified"),
        title="what won",
    )
    rejected = Table("device", "kernel", "dtype", "N × D × V", "config", "reason", title="rejected")
    for path in files or sorted(lookup.user_folder().glob("*.json")):
        tuned = _read(path)
        for key, entry in tuned.entries.items():
            table.add_row(
                *_problem_cells(tuned, key),
                str(entry.config or "product"),
                f"{entry.milliseconds:.3f}",
                f"{entry.baseline_milliseconds:.3f}",
                "yes" if entry.verified else "no",
            )
        for (key, config), rejection in tuned.rejected.items():
            rejected.add_row(
                *_problem_cells(tuned, key), str(config or "product"), rejection.reason
            )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if rejected.rows:
        console.print(rejected)


def _problem_cells(table: table.Table, key: table.Key) -> tuple[str, ...]:
    sizes = f"{key.tokens} × {key.hidden} × {key.vocab}"
    return table.device, key.kernel, key.dtype, sizes


@cache.command()
@click.argument("files", nargs=-1, type=FILE, required=True)
def validate(files: tuple[Path, ...]) -> None:
    """Check FILES; fail at the first that cannot be used."""
    for path in files:
        click.echo(f"{path}: {len(_read(path).entries)} entries")


@cache.command()
@click.argument("files", nargs=-1, type=FILE, required=True)
@click.option("--into", type=click.Path(path_type=Path), required=True, help="File to write.")
def merge(files: tuple[Path, ...], into: Path) -> None:
    """Join FILES of one kind of GPU; of two entries for a problem the better one wins."""
    try:
        joined = table.merge([_read(path) for path in files])
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    table_io.write(into, joined)
    click.echo(f"{into}: {len(joined.entries)} entries")


@cache.command()
def clear() -> None:
    """Remove the user's tuned tables; shipped ones stay."""
    for path in sorted(lookup.user_folder().glob("*.json")):
        path.unlink()
        click.echo(f"removed {path}")


def _read(path: Path) -> table.Table:
    try:
        return table_io.read(path)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path}: {error}") from error


if __name__ == "__main__":
    main()
