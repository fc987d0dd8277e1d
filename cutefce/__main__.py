"""The `cutefce` console command, also `python -m cutefce`."""

import io
import sys
from typing import Any

import click

from cutefce.commands.cache import cache
from cutefce.commands.common import printable
from cutefce.commands.compile import compile_kernels
from cutefce.commands.info import info
from cutefce.commands.tune import tune
from cutefce.commands.verify import verify
from cutefce.commands.warmup import warmup
from cutefce.version import __version__


class Commands(click.Group):
    """Reports files that cannot be read or written in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise click.ClickException(printable(str(error))) from error


@click.group(cls=Commands)
@click.version_option(__version__, prog_name="cutefce")
def main() -> None:
    """Exact fused linear cross entropy."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names and reasons hold any character


for command in (compile_kernels, warmup, info, cache, tune, verify):
    main.add_command(command)


if __name__ == "__main__":
    main()
