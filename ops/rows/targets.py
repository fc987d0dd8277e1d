"""Targets of a call, with the options of their losses."""

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cutefce.cute_kernels.variant import (
    IDENTITY,
    PLAIN,
    KernelVariant,
    LogitTransform,
)
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import LossOptions, TensorOptions
from cutefce.ops.outputs.needs import reductions_of
from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.loss_parts import LossParts, parts_of, without_weightless
from cutefce.ops.rows.loss_terms import GivenTargets, LossTerms
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.soft_targets.output_classes import OutputClasses
from cutefce.ops.soft_targets.targets import SoftTargets

if TYPE_CHECKING:
    from cutefce.ops.rows.statistics import RowStats

NO_TENSORS = TensorOptions()
OUTPUTS = "outputs"
"""The reduction of calls that return values of each token, see `outputs`."""
IGNORED = -(1 << 62)
"""The index of ignored targets on a rank, whose other ranks' targets are also outside [0, V_k)."""


class ClassRow(NamedTuple):
    """Σ_v κ_v W_v over the classes of all ranks, over V for mean logits."""

    row: Tensor
    """(D,) in the dtype of sums"""
    offset: Tensor | None
    """() the same sum of biases; None without."""


class Targets:
    """The targets of N tokens with the options of their losses; derived tensors are lazy.

    So are the parts of losses: the product of hidden states and weight needs none of them, and is
    launched before what makes them.
    """

    def __init__(
        self,
        index: Tensor,
        vocab: int,
        options: LossOptions,
        tensors: TensorOptions = NO_TENSORS,
        make_parts: Callable[[], LossParts] = LossParts,
        logits: LogitMap | None = None,
        first: int = 0,
    ) -> None:
        self.index = index
        """(N,) int64 as given: may hold ignored and out-of-range values."""
        self.vocab = vocab
        self.options = options
        self.tensors = tensors
        self._make_parts = make_parts
        self.logits = logits
        """The logit transform; None for the identity."""
        self.first = first
        """The class that `index` counts from: the first one of this rank."""
        self.class_row: ClassRow | None = None
        """In a forward of losses or outputs that depend on class logits."""
        self.class_logits: Tensor | None = None
        """(N,) U, which `target_logit` sets from the class row; the mean logit as an output."""
        self.selection: RowSelection | None = None
        """Which rows of the hidden states these tokens are, if kernels have selected them."""
        self._loss_scale: Tensor | None = None

    @cached_property
    def parts(self) -> LossParts:
        """What losses are made of."""
        return self._make_parts()

    @property
    def terms(self) -> LossTerms | None:
        """Those of `parts`."""
        return self.parts.terms

    @property
    def soft(self) -> SoftTargets | None:
        """Those of `parts`."""
        return self.parts.soft

    @cached_property
    def active(self) -> Tensor:
        """(N,) bool: the token is not ignored."""
        return self.index != self.options.ignore_index

    @cached_property
    def safe_index(self) -> Tensor:
        """(N,) int64 clamped to [0, V): may be used to address memory."""
        return self.index.clamp(0, self.vocab - 1)

    @property
    def order(self) -> Tensor | None:
        """(N,) int64: which rows these are, if kernels have selected them; None for all."""
        return None if self.selection is None else self.selection.order

    @property
    def divides_by_count(self) -> bool:
        """Whether the reduced loss is the sum over the number of active tokens."""
        return self.options.reduction == "mean" and self.tensors.denominator is None

    @property
    def is_plain(self) -> bool:
        """Whether losses are cross entropies of raw logits, and no outputs."""
        return self.terms is None and self.logits is None and self.options.reduction != OUTPUTS

    def loss_scale(self, dtype: torch.dtype) -> Tensor:
        """Return () the factor of each active token's loss in the reduced loss, of `dtype`."""
        if self._loss_scale is None:
            self._loss_scale = self._new_loss_scale(dtype)
        return self._loss_scale

    def _new_loss_scale(self, dtype: torch.dtype) -> Tensor:
        denominator = self.tensors.denominator
        if self.divides_by_count:
            weight = None if self.terms is None else self.terms.weight
            if weight is None:
                return self.active.sum(dtype=dtype).clamp_(min=1).reciprocal_()
            return inverse_of_sum(torch.where(self.active, weight, 0), self.active, dtype)
        if denominator is not None:
            return inverse_of(denominator, dtype)
        return torch.ones((), dtype=dtype, device=self.index.device)

    def set_class_logits(self, products: Tensor) -> None:
        """Set the class logits from the products (N,) of hidden states and the class row."""
        assert self.class_row is not None
        if self.class_row.offset is not None:
            products = products + self.class_row.offset
        if self.logits is not None and self.logits.row_scale is not None:
            products = products * self.logits.row_scale
        self.class_logits = products

    def by_lse(self, stats: "RowStats") -> Tensor | float:
        """Return the derivatives α of the losses by the log-sum-exps (N,) of `stats`."""
        derivative = 1.0 if self.terms is None else self.terms.by_lse(stats)
        return derivative if self.soft is None else self.soft.bounded(derivative)

    @property
    def output_classes(self) -> OutputClasses | None:
        """The classes whose log-probabilities are outputs, if a token has several."""
        return self.soft if isinstance(self.soft, OutputClasses) else None

    def soft_entries(self, stats: "RowStats", dtype: torch.dtype) -> Tensor | None:
        """Return the `SoftTargets.entries` (N, K) of exponentials of `dtype`.

        None without soft targets, and before their logits and coefficients are known.
        """
        soft = self.soft
        if soft is None or soft.logits is None:
            return None
        if isinstance(soft, OutputClasses):
            given = soft.gradients
            if given is None:
                return None
            return soft.entries(given.values, stats, given.by_softmax, self.logits, of_exps=True)
        a, of_exps = torch.as_tensor(self.by_lse(stats)), dtype != sum_dtype(dtype)
        return soft.entries(-soft.coefficient, stats, a, self.logits, of_exps=of_exps)

    def drop_forward(self, *, keeps_soft: bool) -> None:
        """Free what a backward does not need of these, or makes again.

        It needs no excess of soft targets, and `keeps_soft` tells whether it needs their logits.
        """
        if self.tensors.target_indices is not None:
            if not keeps_soft:
                vars(self).pop("parts", None)
            elif self.soft is not None:
                self.soft.excess = None
        self.class_row = self.class_logits = None

    @property
    def owned(self) -> Tensor:
        """(N,) bool: the token is active, and its target is a row of this weight."""
        return self.active & (self.safe_index == self.index)

    def per_token(self, rows: slice | Tensor) -> "Targets":
        """Return the targets of some tokens, whose losses are not reduced.

        They are a slice, or given by their numbers (M,) where nothing has selected rows.
        """
        part = Targets(
            self.index[rows],
            self.vocab,
            self.options.per_token(),
            replace(self.tensors, denominator=None),
            lambda: self.parts.rows(rows),
            None if self.logits is None else self.logits.rows(rows),
            self.first,
        )
        part.class_logits = None if self.class_logits is None else self.class_logits[rows]
        if self.selection is not None:
            assert isinstance(rows, slice)
            part.selection = self.selection.rows(rows)
        return part


def inverse_of(denominator: Tensor, dtype: torch.dtype) -> Tensor:
    """Return () the factor of a loss that a denominator () divides; 0 if that is 0."""
    return torch.where(denominator == 0, 0, denominator.to(dtype).reciprocal())


def inverse_of_sum(weights: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return () the factor of a mean over tokens of these weights; 0 if none `counts`.

    It is infinite if those of tokens that count add up to 0: the mean is then what torch's is, the
    sum of the losses over 0.
    """
    return torch.where(counts.any(), weights.sum().to(dtype).reciprocal(), 0)


def make_targets(
    y: Tensor,
    vocab: int,
    options: LossOptions,
    tensors: TensorOptions,
    dtype: torch.dtype = torch.float32,
    selection: RowSelection | None = None,
    shard: slice | None = None,
) -> Targets:
    """Return the targets y (N,) int64, with sums of `dtype`.

    Soft targets are those of all tokens, of which `selection` has chosen these.  Of `vocab` classes
    a rank of a group has the `shard`, from whose first one on it counts; other ranks' targets are
    no classes of it, and its targets are checked with their logits.

    Raises:
        IndexError: on a CPU, for a target outside [0, V).  A GPU is not synchronized for this.
    """
    y = without_weightless(y, options, tensors).contiguous()
    own = slice(0, vocab) if shard is None else shard
    given = GivenTargets(y, options, tensors, vocab, own, dtype)
    make_parts = functools.partial(parts_of, given, selection)
    logits = LogitMap.of(options, tensors, y, dtype)
    if shard is not None:
        index = y.clamp(min=IGNORED // 2) - own.start  # no target is taken for an ignored one
        index = torch.where(y == options.ignore_index, IGNORED, index)
        options = replace(options, ignore_index=IGNORED)
        rows = own.stop - own.start
        return Targets(index, rows, options, tensors, make_parts, logits, own.start)
    targets = Targets(y, vocab, options, tensors, make_parts, logits)
    if y.device.type == "cpu":
        wrong = targets.active & (targets.safe_index != y)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            token = row if selection is None else int(selection.order[row])
            raise IndexError(
                f"target: got {int(y[row])} at token {token}, expected 0 <= target < {vocab} "
                f"or ignore_index={options.ignore_index}"
            )
    return targets


def variant_of(targets: Targets | None) -> KernelVariant:
    """Return what kernels must be compiled with for the options of a call."""
    if targets is None:
        return PLAIN
    logits, transform = targets.logits, IDENTITY
    if logits is not None:
        operands = logits.row_scale, logits.bias, logits.slope, logits.floor
        transform = LogitTransform(*(x is not None for x in operands))
    return KernelVariant(transform, reductions_of(targets.options))


def launch_transform(targets: Targets, window: tuple[int, int]) -> tuple[Any, ...] | None:
    """Return the logit transform of a launch over the columns of `window`."""
    return None if targets.logits is None else targets.logits.columns(*window)
