"""The paper's Table 2 here: the forward, canonical and ours, over tokens and vocabulary.

canonical   F.cross_entropy(F.linear(h, w).float(), y), which holds all logits
ours        torch.ops.cutefce.loss without gradients

The paper is "From Projection to Prediction: Beyond Logits for Scalable Language Models" (arXiv
2511.17599); its numbers are those of an NVIDIA GB200 with hidden size 4096 in bfloat16.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import cutefce
from bench.head import Shape, random_head
from bench.measure import Call, interleaved, peak_bytes

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
    canonical_ms: float
    ours_ms: float
    ratio: float
    """Ours over canonical."""
    published_ratio: float | None
    """The paper's proposed over canonical."""
    canonical_mib: float
    ours_mib: float
    published_memory_ratio: float | None
    memory_ratio: float


def run(shape: Shape, device: str, repeats: int) -> Row:
    """Measure both forms at `shape` on fresh random data."""
    forms, inputs = _forms(shape, device)
    times = interleaved(forms, device, repeats)
    canonical, ours = (times[name].median_ms for name in forms)
    memory = [(inputs + peak_bytes(form, device)) / 2**20 for form in forms.values()]
    published = PUBLISHED.get((shape.tokens, shape.vocab)) if shape.hidden == HIDDEN else None
    return Row(
        tokens=shape.tokens,
        hidden=shape.hidden,
        vocab=shape.vocab,
        canonical_ms=canonical,
        ours_ms=ours,
        ratio=ours / canonical,
        published_ratio=published and published[1] / published[0],
        canonical_mib=memory[0],
        ours_mib=memory[1],
        memory_ratio=memory[1] / memory[0],
        published_memory_ratio=published and published[3] / published[2],
    )


def _forms(shape: Shape, device: str) -> tuple[dict[str, Call], int]:
    """Return both forms, and the bytes of what they are given."""
    h, w, y = random_head(shape, device)

    def canonical() -> None:
        with torch.no_grad():
            F.cross_entropy(F.linear(h, w).float(), y)

    def ours() -> None:
        with torch.no_grad():
            cutefce.linear_cross_entropy(h, w, y)

    size = sum(x.numel() * x.element_size() for x in (h, w, y))
    return {"canonical": canonical, "ours": ours}, size
