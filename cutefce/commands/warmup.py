"""`cutefce warmup`: runs training steps once, so that later processes find their kernels."""

import time

import click
import torch

import cutefce
from cutefce.autotune_cache.tuning.shapes import Sizes
from cutefce.commands.common import dtype_option, make_console, shapes_option, this_gpu
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.ops.primitives.dispatch import Backend


@click.command(short_help="Run training steps once, so that later processes find their kernels.")
@shapes_option("Heads", required=True)
@dtype_option
def warmup(shapes: tuple[Sizes, ...], dtype: str) -> None:
    """Run a training step of each head on this GPU, with the default workspace.

    Kernels that are missing are compiled into the cache folder, and those that nothing proves are
    verified.  Without a GPU, as in the build of an image, `cutefce compile` makes all kernels.
    """
    gpu, device = this_gpu()
    console = make_console()
    for sizes in shapes:
        begin = time.perf_counter()
        backend = step(sizes, getattr(torch, dtype), device)
        seconds = time.perf_counter() - begin
        name = "x".join(map(str, sizes))
        if backend.name != "cute":
            raise click.ClickException(f"{name}: the kernels do not serve it: {backend.reason}")
        console.print(f"{name}: {seconds:.1f} s")
    console.print(f"kernels for {gpu.name}: {jit_cache.cache_folder()}")


def step(sizes: Sizes, dtype: torch.dtype, device: str) -> Backend:
    """Run forward and backward of a random head of (tokens, hidden, vocab); return what served."""
    tokens, hidden, vocab = sizes
    h = torch.randn(tokens, hidden, dtype=dtype, device=device).requires_grad_()
    w = torch.randn(vocab, hidden, dtype=dtype, device=device).mul_(hidden**-0.5).requires_grad_()
    y = torch.randint(vocab, (tokens,), device=device)
    cutefce.linear_cross_entropy(h, w, y).backward()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return cutefce.backend_for(h, w)
