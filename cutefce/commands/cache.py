"""`cutefce cache`: shows, validates, merges and removes tuned tables."""

from pathlib import Path

import click
from rich.table import Table

from cutefce.autotune_cache import lookup, table, table_io
from cutefce.commands.common import TABLE_FILE, describe, make_console, printable, read_table
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.jit import cache as jit_cache


@click.group()
def cache() -> None:
    """Manage tuned tables."""


@cache.command(short_help="Show winners and rejections.")
@click.argument("files", nargs=-1, type=TABLE_FILE)
def show(files: tuple[Path, ...]) -> None:
    """Show winners and rejections of FILES, by default of the user's tables.

    Entries of other kernel sources are verified again before their first use; the column "verified"
    marks them.
    """
    paths = files or _user_files()
    if not paths:
        click.echo(f"no tables in {lookup.user_folder()}")
        return
    columns = "device", "kernel", "dtype"
    timed = "NxDxV", "config", "ms", "default ms", "verified"
    winners = Table(*columns, *timed, title="winners")
    rejected = Table(*columns, "config", "reason", title="rejected")
    unusable = []
    for path in paths:
        try:
            tuned = read_table(path)
        except click.ClickException as error:
            unusable.append(error.message)
            continue
        for key, entry in tuned.entries.items():
            winners.add_row(
                printable(tuned.gpu.name),
                key.kernel,
                key.dtype,
                f"{key.tokens}x{key.hidden}x{key.vocab}",
                describe(entry.config),
                f"{entry.ms:.3f}",
                f"{entry.default_ms:.3f}",
                _verified(entry),
            )
        for (kernel, dtype, config), reason in tuned.rejected.items():
            name = printable(tuned.gpu.name)
            rejected.add_row(name, kernel, dtype, describe(config), printable(reason))
    console = make_console()
    console.print(winners)
    if rejected.rows:
        console.print(rejected)
    if unusable:
        raise click.ClickException("\n".join(unusable))


def _user_files() -> list[Path]:
    """Return what may be a table of the user."""
    return sorted(lookup.user_folder().glob("*.json"))


def _verified(entry: table.Entry) -> str:
    """Return whether an entry was verified, and if with other kernels than the installed ones."""
    if not entry.verified:
        return "no"
    return "yes" if entry.kernels == jit_cache.source_fingerprint() else "other kernels"


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
    """Merge FILES of one kind of GPU, kernel sources and compiler, in any order.

    All rejections are kept, and no entry of a configuration that one of FILES rejects. Of two
    entries for a problem, the one of the current kernel sources wins, then the verified one, then
    the faster one. What FILE of --into holds is replaced, unless it is one of FILES too.
    """

    def merged() -> table.Table:
        return table.merge({str(path): read_table(path) for path in files})

    try:
        table_io.rewrite(into, merged)
    except ValueError as error:
        raise click.ClickException(printable(str(error))) from error
    click.echo(f"{into}: {len(table_io.read(into).entries)} entries")


@cache.command()
def clear() -> None:
    """Remove the user's tuned tables; shipped ones stay."""
    left = []
    for path in _user_files():
        try:
            cache_files.remove(path)
        except OSError as error:
            left.append(str(error))
        else:
            click.echo(f"removed {path}")
    if left:
        raise click.ClickException("\n".join(left))
