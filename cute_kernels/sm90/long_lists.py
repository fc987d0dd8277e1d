"""Terms of long lists of tokens, added to the accumulators of dW: soft targets.

An accumulator's row is in four lanes, each of which has 2 of every 8 columns.  They read vectors of
8 columns of a token's hidden states, 32 columns together, and exchange pairs: so a line of memory
is read once.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels.common.row_vectors import row_vectors, widened

LANES = 4
"""Lanes that have a row."""


class LongLists:
    """Additions to rows of `tile_n` columns, of hidden states of `dtype`."""

    def __init__(self, dtype: Any, tile_n: int) -> None:
        assert self.can_add(tile_n)
        self.dtype, self.vectors = dtype, tile_n // (8 * LANES)
        # more would not fit in the registers that accumulators leave
        self.at_once = next(n for n in (4, 2, 1) if self.vectors % n == 0)

    @staticmethod
    def can_add(tile_n: int) -> bool:
        """Whether tiles have whole vectors of all lanes."""
        return tile_n % (8 * LANES) == 0

    @cute.jit
    def add(
        self, acc: cute.Tensor, place: Any, targets: Any, begin: Int32, count: Int32, start: Int32
    ) -> None:
        """Add `count` terms from `begin` on to the lane's row; `start` is the tile's first column.

        `place` is (half, m_block) of the row's accumulators.  All lanes of a warp take part.
        """
        most = count
        for step in cutlass.range_constexpr(3):
            other = cute.arch.shuffle_sync_bfly(most, offset=LANES << step)
            most = cutlass.max(most, other)
        last_vector = targets.h.shape[1] // 8 - 1
        first = start // 8 + cute.arch.lane_idx() % LANES
        for begin_v in cutlass.range_constexpr(0, self.vectors, self.at_once):
            token, factor = self.entry(targets, begin, count, Int32(0))
            for step in cutlass.range(most, unroll=1):
                vectors = cute.make_rmem_tensor((8, self.at_once), self.dtype)
                vectors.fill(0.0)
                if step < count:
                    of_token = row_vectors(targets.h, token)
                    for v in cutlass.range_constexpr(self.at_once):
                        column = cutlass.min(first + (begin_v + v) * LANES, last_vector)
                        cute.autovec_copy(of_token[None, column], vectors[None, v])
                own_factor = factor
                token, factor = self.entry(targets, begin, count, step + 1)
                for v in cutlass.range_constexpr(self.at_once):
                    self.add_vector(acc, place, begin_v + v, vectors[None, v], own_factor)

    @cute.jit
    def entry(self, targets: Any, begin: Int32, count: Int32, step: Int32) -> Any:
        """Return the token and the factor of a term; those beyond the list are 0."""
        token, factor = Int64(0), Float32(0.0)
        if step < count:
            token, factor = targets.order[begin + step], targets.coef[begin + step]
        return token, factor

    @cute.jit
    def add_vector(
        self, acc: cute.Tensor, place: Any, v: int, vector: cute.Tensor, factor: Float32
    ) -> None:
        """Add the lanes' vectors `v` to the accumulators of their row."""
        half, m_block = place
        words = cute.recast_tensor(vector, Int32)
        for offset in cutlass.range_constexpr(1, 3):
            for i in cutlass.range_constexpr(4):
                if cutlass.const_expr(i & offset == 0):
                    self.exchange(words, i, i + offset, offset)
        values = widened(vector)
        for j in cutlass.range_constexpr(4):
            for k in cutlass.range_constexpr(2):
                coord = (k, half, 4 * v + j), m_block, 0
                acc[coord] = acc[coord] + factor * values[2 * j + k]

    @cute.jit
    def exchange(self, words: cute.Tensor, i: int, j: int, offset: int) -> None:
        """Transpose the matrix of words i and j of two lanes, whose numbers differ by `offset`."""
        is_second = cute.arch.lane_idx() & offset
        sent = words[j]
        if is_second != 0:
            sent = words[i]
        received = cute.arch.shuffle_sync_bfly(sent, offset=offset)
        if is_second != 0:
            words[i] = received
        else:
            words[j] = received
