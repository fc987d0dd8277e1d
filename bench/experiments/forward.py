"""The forward on a GPU against the plain GEMM h wᵀ, which writes all logits.

GEMM                    torch.mm(h, w.t())
cutefce                 torch.ops.cutefce.loss without gradients
cutefce, exps stored    the forward of a training step that stores every exponential
"""

import functools
from dataclasses import dataclass

import click
import torch

import cutefce
from bench.harness.cli import Output, gpu_only, per_shape, repeats_option
from bench.harness.problems import Shape, random_inputs
from bench.harness.timing import Call, interleaved, peak_bytes, preceding_gemms

SHAPES = tuple(
    Shape(tokens, hidden, vocab, "bfloat16")
    for tokens, hidden, vocab in (
        (8192, 4096, 131072),
        (8192, 2304, 256000),
        (1024, 4096, 262144),
        (16384, 7168, 129280),
        (4096, 4096, 128256),
        (32768, 4096, 262144),
        (384, 4096, 131072),
        (256, 4096, 131072),
        (64, 4096, 131072),
        (8, 4096, 131072),
        (1, 4096, 131072),
    )
)
MAX_STORED_BYTES = 8 << 30
"""Limit of the exponentials that the third implementation stores."""


@dataclass(frozen=True)
class Row:
    """One implementation at one shape; times are medians of interleaved runs."""

    tokens: int
    hidden: int
    vocab: int
    implementation: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_gemm: float
    tflops: float
    peak_mib: float
    """Peak memory in MiB beyond the inputs and any stored exponentials."""


@click.command("forward")
@repeats_option(30)
@click.pass_obj
@gpu_only
def command(output: Output, /, repeats: int) -> None:
    """The forward on a GPU, against the plain GEMM."""
    output.record("forward", per_shape(SHAPES, functools.partial(run, repeats=repeats)))


def run(shape: Shape, repeats: int) -> list[Row]:
    """Measure every implementation at `shape` on random inputs."""
    calls = _calls(shape)
    times = interleaved(calls, "cuda", repeats, before=preceding_gemms("cuda"))
    return [
        Row(
            tokens=shape.tokens,
            hidden=shape.hidden,
            vocab=shape.vocab,
            implementation=name,
            median_ms=timing.median_ms,
            quartiles_ms=timing.quartiles_ms,
            ratio_to_gemm=timing.median_ms / times["GEMM"].median_ms,
            tflops=shape.gemm_flop / timing.median_ms / 1e9,
            peak_mib=peak_bytes(calls[name], "cuda") / 2**20,
        )
        for name, timing in times.items()
    ]


def _calls(shape: Shape) -> dict[str, Call]:
    h, w, y = random_inputs(shape, "cuda")
    z = h.new_empty(shape.tokens, shape.vocab)
    cutefce.set_strict(True)

    def loss() -> None:
        with torch.no_grad():
            torch.ops.cutefce.loss(h, w, y)

    def with_exps_stored() -> None:
        cutefce.linear_cross_entropy(h.requires_grad_(), w.requires_grad_(), y, workspace="max")

    calls: dict[str, Call] = {"GEMM": lambda: torch.mm(h, w.t(), out=z), "cutefce": loss}
    if z.nbytes <= MAX_STORED_BYTES:
        calls["cutefce, exps stored"] = with_exps_stored
    return calls
