"""The `cutefce` console command, also `python -m cutefce`."""

import click

from cutefce.commands.cache import cache
from cutefce.commands.compile import compile_kernels
from cutefce.commands.info import info
from cutefce.commands.tune import tune
from cutefce.commands.verify import verify
from cutefce.version import __version__


@click.group()
@click.version_option(__version__, prog_name="cutefce")
def main() -> None:
    """Exact fused linear cross entropy."""


for command in (compile_kernels, info, cache, tune, verify):
    main.add_command(command)


if __name__ == "__main__":
    main()
