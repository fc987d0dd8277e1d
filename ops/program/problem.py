"""What a call asks for, and what serves it: all that its plan depends on.

Numbers of options are no part of it: programs of calls that differ in them alone are the same.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from cutefce.autotune_cache.defaults import window_configs
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.problem import LOW_BITS, Problem
from cutefce.ops.outputs.needs import NO_OUTPUTS, OutputNeeds
from cutefce.ops.program.steps import Home


class Upstream(Enum):
    """What is known of the upstream gradient of a loss, and when."""

    KNOWN = "before the forward, one for all tokens"
    SCALAR = "in the backward, one for all tokens"
    ROWS = "in the backward, one for each token"


@dataclass(frozen=True)
class LossProblem(Problem):
    """One linear cross entropy: the problem that kernels are chosen by, and what programs need.

    `vocab` are the classes of this rank.
    """

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
    outputs: OutputNeeds = NO_OUTPUTS
    """What outputs of tokens ask for."""
    stores: bool = True
    """Whether exponentials may be stored before log-sum-exps are known: float16 lacks the range."""
    selects: bool = False
    """Whether the rows that count are gathered on the device, which alone knows how many.

    Of a call, `selects_rows`; verification has problems of any size of either kind."""
    wide_grad_weight: bool = False
    """Whether dW is in the dtype of sums, as of a float32 weight beside 16-bit hidden states."""
    into: int = 0
    """Bytes of an element of the caller's buffer that dW is added to; 0 where dW is returned."""
    adds_in_place: bool = True
    """Whether products can add to that buffer; else they are added by way of a block of rows."""
    samples: int = 0
    """Entries of a token that sampled gradients expect to keep; 0 for exact gradients."""
    ranks: int = 0
    """Ranks that share the vocabulary, each with all tokens; 0 for a call of one device."""
    sequence_parallel: bool = False
    """Whether each rank is given the hidden states of `tokens` / `ranks` rows."""
    tile_copies: int = 0
    """Copies of a tile of logits that options of the loss make in plain torch."""
    copied_hidden: int = 0
    """Bytes per element of the hidden states as given, if the call works on a copy of them that
    lives until its backward, as under autocast; else 0."""
    copied_weight: int = 0
    """The same of the weight."""
    copied: int = 0
    """Bytes of operands that forward and backward each copy to a layout that GEMMs can address."""
    sorts: bool = False
    """Whether tokens that count come first, in copies of hidden states and dX, as kernels of ours
    need no copies for: products of Triton and cuBLAS leave out the others then."""

    @cached_property
    def dx_item(self) -> int:
        """Bytes of an element of dX as a rank returns it: ranks add theirs before it is rounded."""
        return self.accumulator_bytes if self.ranks else self.item_bytes

    @property
    def rounds_hidden(self) -> bool:
        """Whether dX has fewer bits than its sums, which may be packed."""
        return self.accumulates_wider and self.dx_item == self.item_bytes

    @cached_property
    def dw_item(self) -> int:
        """Bytes of an element of dW as it is returned."""
        is_wide = self.wide_grad_weight and not self.into
        return self.accumulator_bytes if is_wide else self.item_bytes

    @property
    def dw_holds_exps(self) -> bool:
        """Whether dW's memory may hold exponentials until dW is written."""
        return self.grad_weight and not self.into and self.dw_item == self.item_bytes

    @property
    def is_uniform(self) -> bool:
        """Whether all tokens have one factor, so that dW's products may be of probabilities.

        Hidden states then need no factors.  Sums in another dtype would have to be multiplied.
        """
        one = self.upstream is not Upstream.ROWS and not self.scales_rows
        one &= not self.soft and not self.scales_exps
        return one and self.dw_holds_exps

    @property
    def few_low_bits(self) -> int:
        """The least low bits of packed sums: two columns share a byte."""
        return LOW_BITS[self.hidden % 2]

    @property
    def can_chunk(self) -> bool:
        """Whether gradients can be formed in the forward, before factors of tokens are known."""
        sums_tokens = self.grad_weight or self.grad_bias
        scalar = self.upstream is not Upstream.ROWS
        known = not (self.scales_exps or self.returns_classes)
        return self.stores and self.needs_gradients and known and (scalar or not sums_tokens)

    @property
    def adds_in_forward(self) -> bool:
        """Whether chunks add dW to the caller's buffer at once, and have final rows of dX."""
        return self.into > 0 and self.adds_in_place and self.upstream is Upstream.KNOWN

    @cached_property
    def windows(self) -> tuple[PortableTiles, ...]:
        """The windows that plans choose from, the widest first."""
        return window_configs(self)

    @cached_property
    def tiles(self) -> PortableTiles:
        """The widest window, in tiles."""
        return self.windows[0]

    @cached_property
    def block(self) -> int:
        """Columns of which windows of classes are multiples."""
        return self.tiles.reference_block

    @cached_property
    def is_fused(self) -> bool:
        """Whether kernels form gradients, with no scratch of their own.

        They list the tokens of every class, and add to packed sums.  Else products are made beside.
        """
        return self.arch is not None and "grad_weight" in arch_named(self.arch).listed

    def gradient_bytes(self) -> dict[Home, int]:
        """Return the bytes of each gradient that is returned."""
        own_dw = self.grad_weight and not self.into
        return {
            Home.DX: self.tokens * self.hidden * self.dx_item * self.grad_hidden,
            Home.DW: self.vocab * self.hidden * self.dw_item * own_dw,
            Home.DBIAS: self.vocab * self.item_bytes * self.grad_bias,
        }

    def of_ranks(self, vocab: int, knows_upstream: bool) -> "LossProblem":
        """Return the same for the widest shard, without copies, and a buffer that GEMMs add to."""
        is_known = self.into > 0 and knows_upstream
        return replace(
            self,
            vocab=vocab,
            adds_in_place=True,
            upstream=Upstream.KNOWN if is_known else self.upstream,
            copied_hidden=0,
            copied_weight=0,
            copied=0,
        )

    def of_tokens(self, tokens: int) -> "LossProblem":
        """Return the same of some tokens, copied with their dX."""
        copied = (1 + self.grad_hidden) * tokens * self.hidden * self.item_bytes
        return replace(self, tokens=tokens, copied=self.copied + copied)

    def sorted(self) -> "LossProblem":
        """Return the same with the tokens that count first, in a copy of the hidden states.

        A copy of dX is made when what the call has saved, and this one, are freed.
        """
        copied = self.tokens * self.hidden * self.item_bytes
        return replace(self, copied=self.copied + copied, sorts=True)
