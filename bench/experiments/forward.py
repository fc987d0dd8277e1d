"""The forward on a GPU against the plain GEMM h wᵀ, which writes all logits.

GEMM                    torch.mm(h, w.t())
cutefce                 torch.ops.cutefce.loss without gradients
cutefce, exps stored    the forward of a training step that stores every exponential

Few tokens do not fill a tile.  There the step is measured, too:

GEMMs                   the three GEMMs of a step
cutefce, step           forward and backward with workspace="max"
"""

import functools
from dataclasses import dataclass

import click
import torch

import cutefce
from bench.harness.cli import Output, gpu_only, per_shape, repeats_option
from bench.harness.problems import Shape, cutefce_loss, gradients, plain_gemms, random_inputs
from bench.harness.timing import Call, interleaved, peak_bytes, preceding_gemms

FEW = 383
"""Most tokens of which the step is measured."""
SHAPES = (
    *(Shape(n, 4096, 131072, "bfloat16") for n in (8192, FEW, 200, 100, 65, 1)),
    Shape(8192, 2304, 256000, "bfloat16"),
    Shape(16384, 7168, 129280, "bfloat16"),
)
MAX_STORED_BYTES = 8 << 30
"""Limit of the exponentials that the third implementation stores."""
GEMM, GEMMS, STEP = "GEMM", "GEMMs", "cutefce, step"


@dataclass(frozen=True)
class Row:
    """One implementation at one shape; times are medians of interleaved runs."""

    implementation: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_gemm: float
    """Of a step: over the three GEMMs."""
    tflops: float
    peak_mib: float
    """Peak memory in MiB beyond the inputs and stored exponentials; of a step, beyond inputs."""


@click.command("forward")
@repeats_option
@click.pass_obj
@gpu_only
def command(output: Output, /, repeats: int | None) -> None:
    """The forward on a GPU, and steps of few tokens, against the plain GEMMs."""
    output.require_kernels()
    output.record("forward", per_shape(SHAPES, functools.partial(run, repeats=repeats)))


def run(shape: Shape, repeats: int | None) -> list[Row]:
    """Measure every implementation at `shape` on random inputs."""
    calls = _calls(shape)
    times = interleaved(calls, "cuda", repeats, before=preceding_gemms("cuda"))
    rows = []
    for name, timing in times.items():
        is_step = name in (GEMMS, STEP)
        base = times[GEMMS if is_step else GEMM]
        rows.append(
            Row(
                implementation=name,
                median_ms=timing.median_ms,
                quartiles_ms=timing.quartiles_ms,
                ratio_to_gemm=timing.median_ms / base.median_ms,
                tflops=(3 if is_step else 1) * shape.gemm_flop / timing.median_ms / 1e9,
                peak_mib=peak_bytes(calls[name], "cuda") / 2**20,
            )
        )
    return rows


def _calls(shape: Shape) -> dict[str, Call]:
    h, w, y = random_inputs(shape, "cuda")
    z = h.new_empty(shape.tokens, shape.vocab)

    def loss() -> None:
        with torch.no_grad():
            torch.ops.cutefce.loss(h, w, y)

    leaves = h.detach().requires_grad_(), w.detach().requires_grad_()

    def with_exps_stored() -> None:
        cutefce.linear_cross_entropy(*leaves, y, workspace="max")

    calls: dict[str, Call] = {GEMM: lambda: torch.mm(h, w.t(), out=z), "cutefce": loss}
    if z.nbytes <= MAX_STORED_BYTES:
        calls["cutefce, exps stored"] = with_exps_stored
    if shape.tokens <= FEW:
        calls[GEMMS] = plain_gemms(h, w, y)
        calls[STEP] = functools.partial(gradients, cutefce_loss(workspace="max"), h, w, y)
    return calls
