"""`cutefce cache`: shows, validates, merges and removes tuned tables."""

from pathlib import Path

import click

from cutefce.autotune_cache import lookup, tables
from cutefce.commands.common import (
    TABLE_FILE,
    contents,
    make_console,
    printable,
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
            tuned = tables.read(path)
        except OSError as error:
            unusable.append(printable(str(error)))
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
        click.echo(f"{path}: {contents(tables.read(path))}")


@cache.command(short_help="Merge FILES of one GPU model.")
@click.argument("files", nargs=-1, type=TABLE_FILE, required=True)
@click.option("--into", type=click.Path(path_type=Path), required=True, help="File to write.")
def merge(files: tuple[Path, ...], into: Path) -> None:
    """Merge FILES of one GPU model, in any order.

    Of two entries for a problem the faster one wins. What FILE of --into holds is replaced, unless
    it is one of FILES too.
    """

    def merged() -> tables.Table:
        gpu = tables.read(files[0]).gpu
        return tables.merge([tables.read(path, gpu) for path in files])

    tables.rewrite(into, merged)
    click.echo(f"{into}: {contents(tables.read(into))}")


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
