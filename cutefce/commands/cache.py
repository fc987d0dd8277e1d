"""`cutefce cache`: shows, validates, merges and removes tuned tables."""

from pathlib import Path

import click
from rich.table import Table

from cutefce.autotune_cache import lookup, table, table_io
from cutefce.commands.common import TABLE_FILE, describe, make_console, read_table
from cutefce.cute_kernels.jit import cache as jit_cache


@click.group()
def cache() -> None:
    """Manage tuned tables."""


@cache.command(short_help="Show winners and rejections.")
@click.argument("files", nargs=-1, type=TABLE_FILE)
def show(files: tuple[Path, ...]) -> None:
    """Show winners and rejections of FILES, by default of the user's tables.

    Entries of other kernel sources are not used; the column "verified" marks them.
    """
    paths = files or sorted(lookup.user_folder().glob("*.json"))
    if not paths:
        click.echo(f"no tables in {lookup.user_folder()}")
        return
    columns = "device", "kernel", "dtype", "N × D × V"
    winners = Table(*columns, "config", "ms", "default ms", "verified", title="winners")
    rejected = Table(*columns, "config", "reason", title="rejected")
    for path in paths:
        tuned = read_table(path)
        for key, entry in tuned.entries.items():
            winners.add_row(
                *_problem_cells(tuned, key),
                describe(entry.config),
                f"{entry.ms:.3f}",
                f"{entry.default_ms:.3f}",
                _verified(entry),
            )
        for (key, config), rejection in tuned.rejected.items():
            rejected.add_row(*_problem_cells(tuned, key), describe(config), rejection.reason)
    console = make_console()
    console.print(winners)
    if rejected.rows:
        console.print(rejected)


def _verified(entry: table.Entry) -> str:
    """Return whether an entry was verified, if with the installed kernels."""
    if entry.kernels != jit_cache.source_fingerprint():
        return "other kernels"
    return "yes" if entry.verified else "no"


def _problem_cells(tuned: table.Table, key: table.Key) -> tuple[str, ...]:
    sizes = f"{key.tokens} × {key.hidden} × {key.vocab}"
    return tuned.gpu.name, key.kernel, key.dtype, sizes


@cache.command()
@click.argument("files", nargs=-1, type=TABLE_FILE, required=True)
def validate(files: tuple[Path, ...]) -> None:
    """Check FILES; fail at the first unusable one."""
    for path in files:
        tuned = read_table(path)
        current = tuned.of_kernels(jit_cache.source_fingerprint())
        counts = f"{len(tuned.entries)} entries, {len(current.entries)} of these kernel sources"
        click.echo(f"{path}: {counts}")


@cache.command(short_help="Merge FILES of one kind of GPU.")
@click.argument("files", nargs=-1, type=TABLE_FILE, required=True)
@click.option("--into", type=click.Path(path_type=Path), required=True, help="File to write.")
def merge(files: tuple[Path, ...], into: Path) -> None:
    """Merge FILES of one kind of GPU.

    Of two entries for a problem, the one of the current kernel sources wins, then the verified one,
    then the faster one.
    """
    try:
        merged = table.merge(map(read_table, files), jit_cache.source_fingerprint())
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    table_io.write(into, merged)
    click.echo(f"{into}: {len(merged.entries)} entries")


@cache.command()
def clear() -> None:
    """Remove the user's tuned tables; shipped ones stay."""
    for path in sorted(lookup.user_folder().glob("*.json")):
        path.unlink()
        click.echo(f"removed {path}")
