"""What a call asks for, as far as its program depends on it: sizes, gradients, what is known when.

Numbers of options are no part of it: programs of calls that differ in them alone are the same.
"""

from dataclasses import dataclass
from enum import Enum

from cutefce.ops.program.steps import Home


class Upstream(Enum):
    """What is known of the upstream gradient of a loss, and when."""

    KNOWN = "before the forward, one for all tokens"
    SCALAR = "in the backward, one for all tokens"
    ROWS = "in the backward, one for each token"


@dataclass(frozen=True)
class LossProblem:
    """One linear cross entropy: `tokens` rows of `hidden` features against `vocab` classes."""

    tokens: int
    hidden: int
    vocab: int
    """Classes of this rank."""
    item: int = 2
    """Bytes of an element of the hidden states, the weight, exponentials and gradients."""
    sums: int = 4
    """Bytes of an element of logits and sums."""
    grad_hidden: bool = True
    grad_weight: bool = True
    grad_bias: bool = False
    upstream: Upstream = Upstream.SCALAR
    scales_rows: bool = False
    """Whether losses of tokens have factors of their own, as weights and z-loss give them."""
    every_class: bool = False
    """Whether a loss depends on all logits, as with label smoothing."""
    soft: int = 0
    """Target classes of a token, whose terms are entries among exponentials; 0 for one class."""
    returns_classes: bool = False
    """Whether these terms come with the upstream gradient, that of several classes' outputs."""
    scales_exps: bool = False
    """Whether exponentials have factors of their own in the backward, as for entropy's gradient."""
    reductions: int = 0
    """Numbers beside each partial sum, of which outputs are made."""
    top_k: int = 0
    """Classes of the largest logits that are outputs of a token."""
    stores: bool = True
    """Whether exponentials may be stored before log-sum-exps are known: float16 lacks the range."""
    selects: bool = False
    """Whether the rows that count are gathered on the device, which alone knows how many."""
    grad_weight_item: int = 0
    """Bytes of an element of dW; 0 for those of the weight."""
    grad_hidden_item: int = 0
    """Bytes of an element of dX; 0 for those of the hidden states."""
    into: int = 0
    """Bytes of an element of the caller's buffer that dW is added to; 0 where dW is returned."""
    adds_in_place: bool = True
    """Whether products can add to that buffer; else they are added by way of a block of rows."""
    samples: int = 0
    """Entries of a token that sampled gradients expect to keep; 0 for exact gradients."""
    ranks: int = 0
    """Ranks that share the vocabulary, each with all tokens; 0 for a call of one device."""

    @property
    def needs_gradients(self) -> bool:
        """Whether there is a backward."""
        return self.grad_hidden or self.grad_weight or self.grad_bias

    @property
    def dx_item(self) -> int:
        """Bytes of an element of dX as it is returned."""
        return self.grad_hidden_item or self.item

    @property
    def dw_item(self) -> int:
        """Bytes of an element of dW as it is returned."""
        return self.grad_weight_item or self.item

    @property
    def dw_holds_exps(self) -> bool:
        """Whether dW's memory may hold exponentials until dW is written."""
        return self.grad_weight and not self.into and self.dw_item == self.item

    @property
    def is_uniform(self) -> bool:
        """Whether all tokens have one factor, so that dW's products may be of probabilities.

        Hidden states then need no factors.  Sums in another dtype would have to be multiplied.
        """
        one = self.upstream is not Upstream.ROWS and not self.scales_rows
        one &= not self.soft and not self.scales_exps
        return one and self.dw_holds_exps

    @property
    def keeps_sums(self) -> bool:
        """Whether sums over chunks are wider than what is returned, and kept in pieces."""
        return self.item < self.sums

    @property
    def can_chunk(self) -> bool:
        """Whether gradients can be formed in the forward, before factors of tokens are known."""
        sums_tokens = self.grad_weight or self.grad_bias
        scalar = self.upstream is not Upstream.ROWS
        known = not (self.scales_exps or self.returns_classes)
        return self.stores and self.needs_gradients and known and (scalar or not sums_tokens)

    @property
    def rounds_hidden(self) -> bool:
        """Whether a chunk's rows of dX are final, as the upstream gradient is known."""
        return self.upstream is Upstream.KNOWN

    @property
    def adds_in_forward(self) -> bool:
        """Whether chunks add dW to the caller's buffer at once."""
        return self.into > 0 and self.adds_in_place and self.upstream is Upstream.KNOWN

    def gradient_bytes(self) -> dict[Home, int]:
        """Return the bytes of each gradient that is returned."""
        own_dw = self.grad_weight and not self.into
        return {
            Home.DX: self.tokens * self.hidden * self.dx_item * self.grad_hidden,
            Home.DW: self.vocab * self.hidden * self.dw_item * own_dw,
            Home.DBIAS: self.vocab * self.item * self.grad_bias,
        }
