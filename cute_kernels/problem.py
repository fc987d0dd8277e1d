"""The problem that a call poses: sizes, dtype, device and requested gradients."""

from dataclasses import dataclass
from functools import cached_property

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes per element of each supported dtype."""

SLACK = 32.0
"""Nats that a logit may exceed the reference by before the reference is raised.  Sums stay below
V·e³², so that they and 1/T are in the range of bfloat16 and float32."""

LOWEST_LOGIT = -1e38
"""What kernels replace lower target logits by, such as -inf: a finite reference tells rows that
have a higher logit, whose loss is +inf, from others, whose loss is NaN.  Differences of logits up
to its magnitude are finite in float32, times log2 e too."""

GRADIENT_LOSS = 2.0**24
"""Loss from which on kernels give a row no gradient but NaN: its sum of exponentials, which is
relative to the target's logit in float32, has no correct digit."""

FLOAT16_TOTAL = 2.0**15
"""T of float16 rows: their exponentials are probabilities times this, within float16's range."""


LOW_BITS = 4, 8
"""Bits beside the upper 16 that a packed sum of dX may have, or one of dW."""
FLOAT32_LOW_BITS = 16
"""Those of a sum in float32, as a caller's buffer has them."""


def can_keep(dtype: str) -> bool:
    """Return whether `dtype` can store exponentials before T is known: float16 lacks the range."""
    return dtype != "float16"


MIN_SELECTED, MAX_SELECTED = 512, 1 << 19
"""Tokens from and up to which kernels select the rows that count: fewer are a few row blocks, and
each block of `select_rows` reads the targets of all."""


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
    grad_bias: bool = False
    triton: bool = False
    """Whether Triton's kernel makes its exponentials, so that no tile of logits is in memory; then
    `arch` is None."""

    @property
    def needs_gradients(self) -> bool:
        """Whether there is a backward."""
        return self.grad_hidden or self.grad_weight or self.grad_bias

    @property
    def selects_rows(self) -> bool:
        """Whether kernels serve it, and gather the rows that count and compute no others.

        They index the elements of these by int32.
        """
        is_small = self.tokens * self.hidden < 1 << 31
        return self.arch is not None and is_small and MIN_SELECTED <= self.tokens <= MAX_SELECTED

    @cached_property
    def item_bytes(self) -> int:
        """Bytes per element of the hidden states, the weight and the stored exponentials."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def accumulator_bytes(self) -> int:
        """Bytes per element of logits and sums: 4, or 8 for float64."""
        return max(4, self.item_bytes)

    @property
    def accumulates_wider(self) -> bool:
        """Whether sums need more bytes than the inputs have."""
        return self.item_bytes < self.accumulator_bytes
