"""What a call costs on the primitives that serve it: the scratch of each step, and the workspace.

Kernels compute in registers and shared memory.  Plain torch takes tiles of logits; on a CPU also
blocks of operands that are converted to the dtype of sums, and of rows.
"""

from dataclasses import dataclass, field, replace

import torch

from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.costs.device import Device
from cutefce.ops.costs.step_memory import (
    accumulates_wider,
    added_bytes,
    few_low_bits,
    finished_rows,
    has_weight_kernels,
    partial_sums,
    rows_bytes,
    shared_sums_bytes,
    soft_block_rows,
    target_rows_bytes,
    targets_bytes,
    tile_bytes,
    upcast_bytes,
)
from cutefce.ops.program.layout import Layout, scales_exps
from cutefce.ops.program.lower import lower
from cutefce.ops.program.predicted_time import seconds
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.steps import Kind, Program, Step

MADE_BYTES = 33
"""Bytes of a soft target while it is sorted, or put."""


@dataclass(frozen=True)
class Copies:
    """Copies of operands that a call makes, or works on, as under autocast."""

    hidden: int = 0
    """Bytes per element of the hidden states as given, if the call works on a copy of them that
    lives until its backward; else 0."""
    weight: int = 0
    """The same of the weight."""
    dense: int = 0
    """Bytes of operands that forward and backward each copy to a layout that GEMMs can address."""


@dataclass(frozen=True)
class CostModel:
    """What programs cost on the primitives that serve a call."""

    kernel_problem: Problem
    """What says which kernels serve it, on which device."""
    tiles: PortableTiles
    """The widest window."""
    windows: tuple[int, ...]
    """Widths of windows that plans choose from, the widest first."""
    copies: Copies = Copies()
    device: torch.device | None = field(default=None, compare=False)
    """The GPU whose kernels serve it, if some do."""
    sorts: bool = False
    """Whether tokens that count come first, in copies of hidden states and dX, as kernels of ours
    need no copies for: products of Triton and cuBLAS leave out the others then."""

    @property
    def block(self) -> int:
        """Columns of which windows of classes are multiples."""
        return self.tiles.reference_block

    @property
    def is_fused(self) -> bool:
        """Whether kernels form gradients, with no scratch of their own."""
        return has_weight_kernels(self.kernel_problem)

    @property
    def skips_far(self) -> bool:
        """Whether steps on far rows take no time where no row is far: kernels select rows."""
        return self.is_fused and self.kernel_problem.selects_rows

    def lower(self, p: LossProblem, x: Layout, *, brief: bool = False) -> Program:
        """Return the program of a call, see `cutefce.ops.program.lower`."""
        return lower(p, x, self, brief=brief)

    def seconds(self, program: Program, device: Device) -> float:
        """Return the time of a program."""
        return seconds(program, device, self._is_fused_step)

    def _is_fused_step(self, step: Step) -> bool:
        """Whether the product of a step is rounded or kept without sums that are written before.

        Triton's rows of dW are rounded so, and take as long as the others if they are kept.
        """
        is_rounded = step.kind is Kind.GEMM_WEIGHT and len(step.writes) == 1
        return self.is_fused or (self.kernel_problem.triton and is_rounded)

    def workspace(self, p: LossProblem, peak: int, saved: int) -> int:
        """Return the workspace of a call whose program takes `peak` bytes.

        `saved` are the bytes that it holds from the forward to the end of the backward.
        Copies made before the forward live until the backward has its gradients, which then are
        converted, one after the other, to the dtypes of the tensors given.  A rank whose hidden
        states are a share gathers them, and has all of dX's sums until the ranks add theirs.
        """
        of, copies, converted = self.kernel_problem, self.copies, 0
        peak += copies.dense
        if p.grad_hidden_item and p.grad_hidden:  # ranks add theirs
            shared, reduced = shared_sums_bytes(of)
            ordered = p.tokens * p.hidden * p.sums * p.selects  # in the order of the call
            peak = max(peak, saved + max(ordered, reduced)) + shared
        if of.sequence_parallel:
            peak += p.tokens * p.hidden * p.item
        own_tokens = p.tokens // of.ranks if of.sequence_parallel else p.tokens
        for given, rows, returned in (
            (copies.hidden, own_tokens, p.grad_hidden),
            (copies.weight, p.vocab, p.grad_weight and not of.wide_grad_weight),
        ):
            copy = rows * p.hidden * p.item
            if given:
                peak += copy
            if returned and given > p.item:
                peak -= rows * p.hidden * (given - p.item)
                converted = max(converted, copy)
        return max(peak, converted)

    def partial_sums(self, p: LossProblem, rows: int, columns: int) -> int:
        """Return how many numbers PROJECT writes for a row, of so many rows and columns."""
        return partial_sums(self.kernel_problem, self.tiles, rows, columns)

    def few_low_bits(self, p: LossProblem) -> int:
        """Return 4, or 8 where two columns of a byte would be of two rows."""
        return few_low_bits(p.hidden)

    def listed_targets(self, p: LossProblem, in_chunks: bool) -> int:
        """Return the bytes of the targets' part of dW; plain torch adds that of each chunk."""
        if in_chunks and not self.is_fused:
            return 0
        return targets_bytes(self.kernel_problem, p.tokens)

    def scratch(self, p: LossProblem, x: Layout, step: Step) -> int:
        """Return the bytes that a step takes while it runs, beside its buffers.

        A block of rows on a CPU, and of the steps that may be at a peak what they make.
        """
        of, own = self.kernel_problem, 0
        rows, columns = (last - first for first, last in (step.rows, step.columns))
        match step.kind:
            case Kind.PROJECT if not step.repairs or "exps" in step.writes:
                stores = any(name.startswith("exps") for name in step.writes)
                if of.tile_copies > 1 and "logits" not in step.reads:  # of sums over all classes
                    of = replace(of, tile_copies=0)
                own = tile_bytes(of, self.tiles, rows, columns, stored=stores)
            case Kind.REDUCE:
                parts = sum(name.startswith("partial") for name in step.reads)
                sums = rows * partial_sums(of, self.tiles, rows, p.vocab) * p.sums
                own = sums * ((parts > 1) + (of.arch is None))
            case Kind.TARGET_LOGIT if step.rows[0] == 0:  # makes the soft targets of all tokens
                own = p.tokens * p.soft * (MADE_BYTES - 8 - 2 * p.sums)
            case Kind.ENTRIES | Kind.SCALE_EXPS:
                own = rows * p.soft * (p.sums + MADE_BYTES * (not self.is_fused))
            case Kind.BIAS:
                own = 4 * columns * p.sums
            case Kind.GEMM_HIDDEN if not self.is_fused:
                kept = self._finished_rows(p, rows) if len(step.writes) > 1 else 0
                product = upcast_bytes(of, kept or rows, columns, p.hidden)
                joined = rows_bytes(of, kept, x.low_bits)
                own = kept * p.hidden * p.sums + max(product, joined)
            case Kind.GEMM_WEIGHT:
                own = self._weight(p, step, rows, columns, x)
            case Kind.KEEP_HIDDEN | Kind.FINISH_HIDDEN if step.low and not self.is_fused:
                own = rows_bytes(of, rows, few_low_bits(p.hidden) if x.in_chunks else x.low_bits)
        if p.soft and of.device == "cpu":  # gathers the weight's rows of one token at least
            elements = p.soft * p.hidden
            block = min(soft_block_rows(elements, p.sums, of.device), rows)
            own = max(own, block * elements * (p.sums + p.item * accumulates_wider(of)))
        return max(own, rows_bytes(of, rows * max(p.soft, 1)))

    def _weight(self, p: LossProblem, step: Step, rows: int, columns: int, x: Layout) -> int:
        """Bytes of a product that adds to dW, or writes rows of it."""
        of, is_kept = self.kernel_problem, len(step.writes) > 1
        is_beside = step.writes == ("into",) and not p.adds_in_place
        sums = added_bytes(of, columns) if is_beside else 0
        if self.is_fused:
            return sums
        window = min(self.tiles.window, columns)
        is_wide = accumulates_wider(of) and step.writes != ("into",)
        is_wide &= is_kept or p.dw_item < p.sums
        if of.triton and not sums:  # has low bits of rows to which terms of targets are added
            is_wide &= not (is_kept or scales_exps(p, x))
            sums = min(rows, columns) * p.hidden * is_wide
        elif not sums:
            sums = window * p.hidden * p.sums * is_wide
        block = window if sums else columns
        most = max(upcast_bytes(of, block, rows, p.hidden), target_rows_bytes(of, rows))
        joined = rows_bytes(of, block, x.low_bits * is_kept)
        # the targets of a chunk are summed for it
        return sums + targets_bytes(of, rows) * is_kept + max(most, joined)

    def _finished_rows(self, p: LossProblem, rows: int) -> int:
        """Rows of dX's sums that exist at a time beside kept ones."""
        return min(finished_rows(p.hidden, p.sums, self.kernel_problem.device), rows)
