"""The forward over the grid of tokens and vocabulary of the paper's Table 2.

unfused     F.cross_entropy(F.linear(h, w).float(), y), which the paper calls canonical
cutefce     cutefce.linear_cross_entropy without gradients
GEMM        h wᵀ alone

The paper is "From Projection to Prediction: Beyond Logits for Scalable Language Models" (arXiv
2511.17599); its numbers were measured on an NVIDIA GB200 with hidden size 4096 in bfloat16.
"""

import functools
from dataclasses import dataclass

import click
import torch

from bench.harness.cli import DEVICE, Output, per_shape, repeats_option
from bench.harness.problems import Loss, Shape, cutefce_loss, random_inputs
from bench.harness.reference import unfused
from bench.harness.timing import Call, interleaved, peak_bytes, preceding_gemms

HIDDEN = 4096
PUBLISHED: dict[tuple[int, int], tuple[float, float, int, int]] = {
    (1024, 32768): (0.73, 0.69, 1064, 280),
    (1024, 65536): (1.40, 0.97, 2088, 536),
    (1024, 131072): (2.76, 1.27, 4136, 1048),
    (1024, 262144): (5.46, 1.83, 8232, 2072),
    (4096, 32768): (1.66, 1.16, 1904, 304),
    (4096, 65536): (3.34, 1.69, 3696, 561),
    (4096, 131072): (6.78, 2.86, 7280, 1073),
    (4096, 262144): (13.70, 5.22, 14448, 2099),
    (8192, 32768): (2.93, 1.70, 3024, 337),
    (8192, 65536): (6.08, 2.90, 5840, 593),
    (8192, 131072): (13.25, 5.58, 11472, 1107),
    (8192, 262144): (27.77, 10.79, 22736, 2133),
    (16384, 32768): (5.62, 3.43, 5264, 401),
    (16384, 65536): (12.41, 6.61, 10128, 659),
    (16384, 131072): (26.67, 13.20, 19856, 1173),
    (16384, 262144): (50.15, 25.43, 39312, 2203),
    (32768, 32768): (11.42, 7.00, 9744, 531),
    (32768, 65536): (25.64, 13.80, 18704, 790),
    (32768, 131072): (50.24, 27.06, 36624, 1307),
    (32768, 262144): (96.52, 53.61, 72464, 2342),
}
"""(tokens, vocab) → milliseconds canonical and proposed, megabytes canonical and proposed."""
SHAPES = {
    "cpu": tuple(
        Shape(tokens, 128, vocab, "float32") for tokens in (128, 512) for vocab in (2048, 8192)
    ),
    "cuda": tuple(Shape(tokens, HIDDEN, vocab, "bfloat16") for tokens, vocab in PUBLISHED),
}


@dataclass(frozen=True)
class Row:
    """One cell; times are medians of interleaved runs, memory includes the inputs."""

    tokens: int
    hidden: int
    vocab: int
    unfused_ms: float
    cutefce_ms: float
    ratio: float
    """cutefce over unfused."""
    published_ratio: float | None
    """The paper's proposed over canonical."""
    cublas_tflops: float
    """Rate of the plain GEMM in the same run."""
    unfused_mib: float
    cutefce_mib: float
    memory_ratio: float
    published_memory_ratio: float | None


@click.command("paper")
@repeats_option(9)
@click.pass_obj
def command(output: Output, /, repeats: int) -> None:
    """The forward over the paper's grid, unfused and fused, beside the paper's numbers."""
    measure = functools.partial(run, device=DEVICE, repeats=repeats)
    output.record("paper", per_shape(SHAPES[DEVICE], measure))


def run(shape: Shape, device: str, repeats: int) -> list[Row]:
    """Measure both implementations at `shape` on random inputs."""
    h, w, y = random_inputs(shape, device)

    def forward(loss: Loss) -> None:
        with torch.no_grad():
            loss(h, w, y)

    losses: dict[str, Loss] = {"unfused": unfused, "cutefce": cutefce_loss(None)}
    forwards: dict[str, Call] = {
        name: functools.partial(forward, loss) for name, loss in losses.items()
    }
    calls = {**forwards, "GEMM": lambda: torch.mm(h, w.t())}
    times = interleaved(calls, device, repeats, before=preceding_gemms(device))
    unfused_ms, cutefce_ms, gemm_ms = (timing.median_ms for timing in times.values())
    inputs = sum(x.nbytes for x in (h, w, y))
    unfused_mib, cutefce_mib = (
        (inputs + peak_bytes(call, device)) / 2**20 for call in forwards.values()
    )
    published = PUBLISHED.get((shape.tokens, shape.vocab)) if shape.hidden == HIDDEN else None
    row = Row(
        tokens=shape.tokens,
        hidden=shape.hidden,
        vocab=shape.vocab,
        unfused_ms=unfused_ms,
        cutefce_ms=cutefce_ms,
        ratio=cutefce_ms / unfused_ms,
        published_ratio=published and published[1] / published[0],
        cublas_tflops=shape.gemm_flop / gemm_ms / 1e9,
        unfused_mib=unfused_mib,
        cutefce_mib=cutefce_mib,
        memory_ratio=cutefce_mib / unfused_mib,
        published_memory_ratio=published and published[3] / published[2],
    )
    return [row]
