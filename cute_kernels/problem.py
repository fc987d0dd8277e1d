"""The problem that a call poses: sizes, dtype, device and requested gradients."""

from dataclasses import dataclass

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes per element of each supported dtype."""

SLACK = 32.0
"""Nats that a logit may exceed the reference by before the reference is raised.  Sums stay below
V·e³², so that they and 1/T are in the range of bfloat16 and float32."""


def can_keep(dtype: str) -> bool:
    """Return whether `dtype` can store exponentials before T is known: float16 lacks the range."""
    return dtype != "float16"


@dataclass(frozen=True)
class Problem:
    """One linear cross entropy: `tokens` rows of `hidden` features against `vocab` classes."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str
    """Dtype of hidden states and weight, as torch prints it without the `torch.` prefix."""
    device: str
    """Device type, as torch names it: "cpu" or "cuda"."""
    grad_hidden: bool = True
    grad_weight: bool = True
    arch: str | None = None
    """Architecture of the kernels; None for the portable path."""
    ranks: int = 1
    """Ranks that split the vocabulary; `vocab` is the size of one shard."""
    sequence_parallel: bool = False
    """Whether each rank is given the hidden states of `tokens` / `ranks` rows."""

    @property
    def item_bytes(self) -> int:
        """Bytes per element of the hidden states, the weight and the stored exponentials."""
        return ITEM_BYTES[self.dtype]

    @property
    def accumulator_bytes(self) -> int:
        """Bytes per element of logits and sums: 4, or 8 for float64."""
        return max(4, self.item_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the requested gradients."""
        tokens = self.tokens // self.ranks if self.sequence_parallel else self.tokens
        rows = (tokens if self.grad_hidden else 0) + (self.vocab if self.grad_weight else 0)
        return rows * self.hidden * self.item_bytes
