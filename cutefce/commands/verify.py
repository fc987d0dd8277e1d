"""`cutefce verify`: checks the kernels on this machine's GPU against the portable path."""

import dataclasses
from pathlib import Path

import click
from rich.text import Text

from cutefce.autotune_cache import lookup, tables
from cutefce.autotune_cache.tables import Table
from cutefce.autotune_cache.tuning import runner
from cutefce.autotune_cache.tuning import verify as verification
from cutefce.commands.common import (
    TABLE_FILE,
    make_console,
    require_passed,
    this_gpu,
)


@click.command(short_help="Check the kernels on this GPU.")
@click.option(
    "--table",
    "path",
    type=TABLE_FILE,
    help="If all pass, renew this tuned table of the GPU's architecture.",
)
def verify(path: Path | None) -> None:
    """Check every kernel configuration on this GPU against the portable path.

    Records the verdict for this user. With --table, the table then names the installed kernels and
    compiler as those that it was verified with. Its times stay those of the tuning run;
    `make autotune` measures them again.
    """
    gpu, device = this_gpu()

    def renewed(file: Path) -> Table:
        table = tables.read(file)
        if table.gpu.arch != gpu.arch:
            arch, expected = table.gpu.arch.name, gpu.arch.name
            raise tables.TableError(f"{file}: arch: got {arch!r}, expected {expected!r}")
        return dataclasses.replace(table, versions={**table.versions, **lookup.current_build()})

    if path is not None:
        renewed(path)  # before the checks take their time
    with make_console().status("compiling") as status:
        for dtype in gpu.arch.dtypes:
            verdict = verification.verify(
                runner.Runner(gpu, device),
                dtype,
                advance=lambda step: status.update(Text(step)),
            )
            require_passed(verdict, gpu, dtype)
            click.echo(f"the {dtype} kernels passed on {gpu.name}")
    if path is not None:
        tables.rewrite(path, lambda: renewed(path))
        click.echo(f"{path} names these kernels")
