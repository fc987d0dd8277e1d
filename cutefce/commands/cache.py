"""`cutefce cache`: shows, validates, merges and removes tuned tables."""

from pathlib import Path

import click

from cutefce.autotune_cache import lookup, table, table_io
from cutefce.commands.common import (
    TABLE_FILE,
    contents,
    make_console,
    printable,
    read_table,
    winners,
)
from cutefce.cute_kernels import cache_files


@click.group()
def cache() -> None:
    """Manage tuned tables."""


@cache.command(short_help="Show winners.")
@click.argument("files", nargs=-1, type=TABLE_FILE)
def show(files: tuple[Path, ...]) -> None:
    """Show the winners of FILES, by default of the user's tables."""
    paths = files or _user_files()
    if not paths:
        click.echo(f"no tables in {lookup.user_folder()}")
        return
    found, unusable = [], []
    for path in paths:
        try:
            tuned = read_table(path)
        except click.ClickException as error:
            unusable.append(error.message)
        else:
            found += [(tuned.gpu, *item) for item in tuned.entries.items()]
    if found:
        make_console().print(winners(found))
    if unusable:
        raise click.ClickException("\n".join(unusable))


def _user_files() -> list[Path]:
    """Return what may be a table of the user."""
    return sorted(lookup.user_folder().glob("*.json"))


@cache.command()
@click.argument("files", nargs=-1, type=TABLE_FILE, required=True)
def validate(files: tuple[Path, ...]) -> None:
    """Check FILES; fail at the first unusable one."""
    for path in files:
        tuned = read_table(path)
        click.echo(f"{path}: {contents(tuned)}")


@cache.command(short_help="Merge FILES of one GPU model.")
@click.argument("files", nargs=-1, type=TABLE_FILE, required=True)
@click.option("--into", type=click.Path(path_type=Path), required=True, help="File to write.")
def merge(files: tuple[Path, ...], into: Path) -> None:
    """Merge FILES of one GPU model, in any order.

    Of two entries for a problem the faster one wins. What FILE of --into holds is replaced, unless
    it is one of FILES too.
    """

    def merged() -> table.Table:
        return table.merge({str(path): read_table(path) for path in files})

    try:
        table_io.rewrite(into, merged)
    except ValueError as error:
        raise click.ClickException(printable(str(error))) from error
    tuned = table_io.read(into)
    click.echo(f"{into}: {contents(tuned)}")


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
