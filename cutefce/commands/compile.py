"""`cutefce compile`: compiles the kernels ahead of their first use."""

import importlib

import click

from cutefce.autotune_cache.tuning.runner import built_ahead
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch import ARCHS, arch_named
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit import cache as jit_cache


@click.command("compile", short_help="Compile all kernels into the cache folder.")
@click.option(
    "--arch",
    "names",
    default=",".join(arch.name for arch in ARCHS),
    show_default=True,
    help="Architectures, separated by commas.",
)
def compile_kernels(names: str) -> None:
    """Compile every kernel that a call may choose into the cache folder; needs no GPU.

    Fails if a kernel spills registers or its WGMMA instructions are serialized.
    """
    try:
        archs = [arch_named(name) for name in names.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error
    folder = jit_cache.cache_folder()
    cache_files.make_folder(folder)
    try:
        importlib.import_module("cutlass.cute")
    except ImportError as error:
        needed = "pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
        raise click.ClickException(f"{error}; the compiler is needed: {needed}") from error
    for arch in archs:
        kernels = built_ahead(arch)
        missing = build.missing(kernels)
        failed = build.build(missing, build.store_clean)
        if failed:
            raise click.ClickException("\n".join(failed.values()))
        click.echo(f"{arch.name}: compiled {len(missing)} of {len(kernels)} kernels into {folder}")
