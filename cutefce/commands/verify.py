"""`cutefce verify`: checks the kernels on this machine's GPU against the portable path."""

from pathlib import Path

import click
from rich.text import Text

from cutefce.autotune_cache import table_io
from cutefce.autotune_cache.table import Table
from cutefce.autotune_cache.tuning import runner
from cutefce.autotune_cache.tuning import verify as verification
from cutefce.commands.common import (
    TABLE_FILE,
    make_console,
    printable,
    read_table,
    require_passed,
    this_gpu,
)


@click.command(short_help="Check the kernels on this GPU.")
@click.option(
    "--table",
    "path",
    type=TABLE_FILE,
    help="Check every configuration of this tuned table and renew its entries.",
)
def verify(path: Path | None) -> None:
    """Check every kernel configuration on this GPU against the portable path.

    Without options, records the verdict for this user.  With --table, rewrites the table: entries
    that pass are marked as verified with the installed kernels and compiler, entries that fail
    become rejections.  Times stay those of the tuning run; `make autotune` measures them again.
    """
    gpu, device = this_gpu()
    on = runner.Runner(gpu, device)
    if path is not None:
        _verify_table(path, on)
        return
    for dtype in gpu.arch.dtypes:
        require_passed(verification.verify(on, dtype), gpu, dtype)
        click.echo(f"the {dtype} kernels passed on {gpu.name}")


def _verify_table(path: Path, on: runner.Runner) -> None:
    table, console = read_table(path), make_console()
    try:
        with console.status("compiling") as status:

            def advance(step: str) -> None:
                if console.is_terminal:
                    status.update(Text(step))
                else:
                    click.echo(step)

            renewed = verification.verify_table(table, on, advance)
        table_io.rewrite(path, lambda: _unless_changed(path, table, renewed))
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(f"{path} was not changed: {error}") from error
    removed = len(table.entries) - len(renewed.entries)
    click.echo(f"{path}: {len(renewed.entries)} entries passed, {removed} were rejected")
    for (kernel, dtype, config), reason in renewed.rejected.items():
        click.echo(f"rejected: {kernel}, {dtype}, {config}: {printable(reason)}")


def _unless_changed(path: Path, before: Table, renewed: Table) -> Table:
    """Return `renewed` if the file still holds `before`."""
    if read_table(path) != before:
        raise ValueError("another process rewrote it meanwhile; run the command again")
    return renewed
