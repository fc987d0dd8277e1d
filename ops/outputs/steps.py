"""The steps of outputs, which are among those of primitives.

In the shapes N is tokens, D hidden, V classes, P parts of the classes, M the blocks of classes that
a token chooses, and k the largest classes that are asked for.
"""

import copy
import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.defaults import KERNEL_REFERENCE_BLOCK
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.ops import torch_compat
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import LossOptions
from cutefce.ops.outputs.reductions import PartialOutputs
from cutefce.ops.outputs.top_classes import top_logits
from cutefce.ops.primitives.products import logits_into
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.targets import Targets, launch_transform

NO_BLOCK = 1 << 30
"""The block of a part without a finite logit, or without a column: one beyond any weight."""


class OutputSteps:
    """The steps in plain torch, and with kernels of blocks where there are some."""

    tiles: PortableTiles

    def partial_outputs(self, partial: Any) -> PartialOutputs:
        """Return the reductions that were computed beside the row sums, of all partials."""
        found = PartialOutputs() if partial.of_all is None else PartialOutputs(*partial.of_all)
        if partial.of_others is None:
            return found
        column, above = partial.of_others
        return found._replace(other=partial.largest, column=column, above=above)

    def top_logits(
        self, h: Tensor, w: Tensor, partial: Any, target_logit: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """Return the target's and the k largest other logits of each token, and their classes.

        See `top_classes`.  `partial` has the reductions of all columns of w (V, D), and h (N, D) is
        in the order of the targets.
        """
        targets = copy.copy(targets)
        targets.selection = None  # of no rows of h

        def top_of_blocks(chosen: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            return self._top_of_blocks(h[rows], w, chosen, targets.per_token(rows))

        chosen = self._chosen_blocks(partial, targets.options.top_k)
        return top_logits(chosen, target_logit, targets, top_of_blocks, self.largest)

    def largest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of each row of x (N, P), the largest first, and their columns."""
        kernels = self._block_kernels(x)
        if kernels is not None:
            found: tuple[Tensor, Tensor] = kernels.largest_of_rows(x, k)
            return found
        values, places = x.topk(k, 1)
        return values, places

    @property
    def _block(self) -> int:
        """Columns of a block of classes."""
        return self.tiles.reference_block

    def _chosen_blocks(self, partial: Any, k: int) -> Tensor:
        """Return the k blocks of each token, or all, with the largest logits, (N, M)."""
        return self.largest(partial.largest, min(k, partial.largest.shape[1]))[1]

    def _block_kernels(self, x: Tensor) -> Any:
        """Return the module with kernels of blocks for operands on the device of x, or None."""
        return None

    def _top_of_blocks(
        self, h: Tensor, w: Tensor, chosen: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """Return the k largest logits but the target's of the blocks that tokens have `chosen`.

        With h (R, D), w (V, D) and the blocks (R, M), they are (R, M, k), and so are their classes.
        Of fewer classes than k, and of a block beyond w, logits of -inf follow.  In plain torch a
        GPU is synchronized: the rows of a block are few, and the host must know how many.
        """
        kernels, count = self._block_kernels(h), min(targets.options.top_k, self._block)
        if kernels is not None:
            transform = launch_transform(targets, (0, len(w))) or (None, None, None)
            given = chosen, self._block, count, targets.index, transform
            found: tuple[Tensor, Tensor] = kernels.top_of_blocks(h, w, *given)
            return found
        values = h.new_full((*chosen.shape, count), -torch.inf, dtype=sum_dtype(h.dtype))
        classes = torch.zeros_like(values, dtype=torch.int64)
        for number, columns in enumerate(() if h.is_meta else blocks(len(w), self._block)):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            u = h.new_empty(len(rows), columns.stop - columns.start, dtype=values.dtype)
            own = None if targets.logits is None else targets.logits.part(rows, columns)
            logits_into(u, h[rows], w[columns], own)
            of_columns = torch.arange(columns.start, columns.stop, device=u.device)
            u.masked_fill_(targets.index[rows, None] == of_columns, -torch.inf)
            if own is not None and own.floor is not None:
                u.masked_fill_(u < own.floor[:, None], -torch.inf)
            some = u.topk(min(count, u.shape[1]), 1, sorted=False)
            values[rows, places, : some.values.shape[1]] = some.values
            classes[rows, places, : some.values.shape[1]] = some.indices + columns.start
            del u, some  # freed before the next ones are allocated
        return values, classes


class CuteOutputSteps(OutputSteps):
    """The steps on reductions of kernels in CuTe; blocks are Triton's there."""

    kernels: KernelSet

    @cached_property
    def block_sums(self) -> ProjectExpSpec:
        """The kernel of row sums whose tiles are blocks of classes.

        Windows begin at whole blocks, which have as many columns as a power of 2.  Tiles of
        gradients are narrow enough that registers hold all reductions beside them.
        """
        kernel = self.kernels.row_sums
        listed = arch_named(kernel.arch).listed
        configs = *listed.get("grad_hidden", ()), *listed["project_exp"]
        fits = (x for x in configs if KERNEL_REFERENCE_BLOCK % x.tile_n == 0)
        return replace(kernel, config=next(fits))

    def sums_kernel(self, options: LossOptions) -> ProjectExpSpec:
        """Return the kernel of row sums that a call launches."""
        return self.block_sums if options.searches_classes else self.kernels.row_sums

    def splits_of_blocks(self, kernel: ProjectExpSpec, columns: int, options: LossOptions) -> int:
        """Return the vocabulary splits with which no partial sum is of two blocks; 0 for any."""
        if not options.searches_classes:
            return 0
        tiles = ceil_div(columns, kernel.config.tile_n)
        return ceil_div(tiles, kernel.config.partials_per_row)

    def partial_outputs(self, partial: Any) -> PartialOutputs:
        """Return what plain torch does, of the planes that kernels have written."""
        planes, given = iter(partial.reductions), self.kernels.row_sums.reductions
        largest = next(planes) if given.of_all else None
        others = next(planes) if given.of_all else None
        distance = next(planes) * math.log(2) if given.entropy else None
        squares = next(planes) if given.sum_squares else None
        of_all = PartialOutputs(largest, others, distance, squares)
        if not given.of_others:
            return of_all
        other, column, above = planes
        return of_all._replace(other=other, column=column, above=above)

    @property
    def _block(self) -> int:
        return self.block_sums.config.tile_n

    def _chosen_blocks(self, partial: Any, k: int) -> Tensor:
        """Return what plain torch does: the class of a part's largest logit tells its block."""
        largest, column, _ = partial.reductions[-3:]
        values, places = self.largest(largest, min(k, largest.shape[1]))
        chosen: Tensor = column.gather(1, places).long() // self._block
        return chosen.masked_fill_(values == -torch.inf, NO_BLOCK)

    def _block_kernels(self, x: Tensor) -> Any:
        if not x.is_cuda or not torch_compat.has_triton():
            return None
        # this imports Triton, which no other call needs
        from cutefce.ops.outputs import triton_blocks

        return triton_blocks
