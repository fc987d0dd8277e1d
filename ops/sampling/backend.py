"""The memory and the time of the steps of sampled gradients.

How many entries there are depends on the softmax.  Predicted are those of a flat one, which keeps
the most: `samples` of each token.
"""

from enum import Enum

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.planning.device import Device
from cutefce.ops.planning.step_memory import (
    CONVERTED,
    PLAIN,
    accumulates_wider,
    added_bytes,
    rows_bytes,
    target_rows_bytes,
    tile_bytes,
)
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.place import soft_target_bytes
from cutefce.ops.program.primitives_backend import PrimitivesBackend
from cutefce.ops.program.problem import Problem
from cutefce.ops.program.steps import Program, Step
from cutefce.ops.sampling.lower import INDEX, are_matrices, entries_of, lower, most_entries
from cutefce.ops.sampling.sample_sizes import GATHERED_COLUMNS, chosen_rows, slots
from cutefce.ops.sampling.steps import SampleKind

PRODUCTS = SampleKind.PROJECT_CLASSES, SampleKind.SAMPLE
SPARSE = SampleKind.SPARSE_HIDDEN, SampleKind.SPARSE_WEIGHT
CHOICE = 21
"""Bytes of a logit while it is chosen, beside its probability: bits, in 32 and in 64, a threshold
in 64, and the choice."""
CHOOSE = 32
"""Bytes of a class while the most frequent ones are found in plain torch."""
SAMPLED_AGAIN = 28
"""Bytes of a token's target, order and references where it may be sampled again."""


class SamplingBackend(PrimitivesBackend):
    """The primitives that serve a call with sampled gradients."""

    def lower(self, p: Problem, x: Layout, *, brief: bool = False) -> Program:
        """Return the program of a call; a brief one is no shorter."""
        return lower(p, x, self, self.operands)

    def seconds(self, program: Program, device: Device) -> float:
        """Return the time of a program; a GPU without kernels multiplies whole windows."""
        p, total = program.problem, super().seconds(program, device)
        product = 2 * p.tokens * p.hidden / device.flops
        sparse = p.tokens * p.samples * p.hidden * p.item / max(p.vocab, 1) / device.bytes
        whole = are_matrices(self.operands)
        each: dict[Enum, float] = {
            **dict.fromkeys(PRODUCTS, product),
            **dict.fromkeys(SPARSE, product if whole else sparse),
            SampleKind.LIST: product * whole,
        }
        columns = ((x.kind, x.columns[1] - x.columns[0]) for x in program.steps())
        return total + sum(count * each.get(kind, 0) for kind, count in columns)

    def scratch(self, p: Problem, x: Layout, step: Step) -> int:
        """Return the bytes that a step takes while it runs, beside its buffers."""
        columns, is_portable = step.columns[1] - step.columns[0], self.operands.arch is None
        match step.kind:
            case SampleKind.CHOOSE_CLASSES:
                return (CHOOSE if is_portable else 4) * p.vocab * max(p.ranks, 1)
            case SampleKind.PROJECT_CLASSES:
                return tile_bytes(self.operands, self.tiles, p.tokens, columns)
            case SampleKind.SAMPLE if is_portable:
                # the soft targets of a call are made later
                return max(self._sample(p) - p.tokens * p.soft * soft_target_bytes(p), 0)
            case SampleKind.SAMPLE_AGAIN:
                sums = self.partial_sums(p, p.tokens, p.vocab)
                return p.tokens * (SAMPLED_AGAIN + sums * p.sums)
            case SampleKind.LIST if is_portable:
                return self._list(p, columns)
            case SampleKind.SPARSE_HIDDEN if is_portable:
                return self._product(p, columns, p.tokens, columns)
            case SampleKind.SPARSE_WEIGHT if is_portable and p.grad_weight:
                return self._rows_of_dw(p, columns)
        return super().scratch(p, x, step)

    def _sample(self, p: Problem) -> int:
        """Bytes of tiles of exponentials, and of the choice among some of their rows."""
        assert isinstance(self.tiles, PortableTiles)
        rows, columns = min(p.tokens, self.tiles.tile_rows), self.tiles.columns(p.tokens)
        tile = rows * columns * p.sums
        chosen = min(rows, chosen_rows(columns, self.operands.device)) * columns
        step = tile_bytes(self.operands, self.tiles, p.tokens, p.vocab)
        # rows' hashes, expected entries, and whether their references are far
        return p.tokens * (5 + p.sums) + max(
            tile * are_matrices(self.operands) + step, tile + chosen * (CHOICE + p.sums)
        )

    def _list(self, p: Problem, columns: int) -> int:
        """Bytes of finding the entries of some columns, beside them."""
        if are_matrices(self.operands):
            return p.tokens * (p.soft + slots(p.samples, p.vocab)) * (14 + p.sums)
        return max(
            3 * p.tokens * most_entries(p) - entries_of(p, columns) * (3 * INDEX + p.sums), 0
        )

    def _product(self, p: Problem, columns: int, rows: int, inner: int) -> int:
        """Bytes of the product of a window's entries, of so many rows of the result."""
        of = self.operands
        if are_matrices(self.operands):
            return 0
        # torch's product of float64 numbers the sum of every entry, twice
        bags = 2 * INDEX * entries_of(p, columns) * (p.sums == INDEX)
        width = min(p.hidden, GATHERED_COLUMNS) * p.sums
        copied = inner * (accumulates_wider(of) or p.hidden > GATHERED_COLUMNS)
        return bags + (rows + copied) * width + 2 * INDEX * rows

    def _rows_of_dw(self, p: Problem, columns: int) -> int:
        """Bytes of the product for rows of dW, and of what it adds to them."""
        of, sums = self.operands, 0
        if p.into:
            sums = 0 if p.adds_in_place else added_bytes(of, columns)
        elif accumulates_wider(of) and p.dw_item < p.sums:
            sums = columns * p.hidden * p.sums
        entries = entries_of(p, columns) * (not are_matrices(self.operands))
        product = self._product(p, columns, columns, p.tokens)
        product = entries * (2 * INDEX + p.sums) + max(entries * INDEX, product)
        targets = max(target_rows_bytes(of, p.tokens), rows_bytes(of, p.tokens, CONVERTED))
        return sums + max(product, rows_bytes(of, columns, PLAIN), targets)
