"""What a call asks for: sizes, dtype, device and the gradients it wants."""

from dataclasses import dataclass

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of one element of each dtype that cutefce computes with."""


SLACK = 32.0
"""Nats that a logit may lie above the reference before another reference is taken.  Sums stay below
V·e³², so that neither they nor 1/T leave the range of bfloat16 and float32."""


def can_keep(dtype: str) -> bool:
    """Whether exponentials can be stored before T is known: float16 lacks the range."""
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
    """Architecture whose kernels compute it; None for the portable path."""
    ranks: int = 1
    """Ranks that hold a part of the vocabulary each, of which `vocab` is this one's."""
    sequence_parallel: bool = False
    """Whether a rank is given the hidden states of `tokens` / `ranks` rows alone."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of the hidden states, the weight and the stored exponentials."""
        return ITEM_BYTES[self.dtype]

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of one element of the logits and of every sum: float64 keeps its width."""
        return max(4, self.item_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the caller asked for."""
        tokens = self.tokens // self.ranks if self.sequence_parallel else self.tokens
        rows = (tokens if self.grad_hidden else 0) + (self.vocab if self.grad_weight else 0)
        return rows * self.hidden * self.item_bytes
