"""What outputs of tokens ask of programs and of kernels."""

from dataclasses import dataclass

from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.variant import RowReductions
from cutefce.ops.interface.arguments import LossOptions, TensorOptions

SUMS_OF_ALL = 4
"""Numbers of a part of the classes in plain torch, if outputs need sums over all classes."""
SUMS_OF_OTHERS = 2
"""Those beside the largest logit, if outputs need reductions over all classes but the target."""


LEAST_SEARCHED = 2048
"""Tokens of a chunk below which a search takes longer for each."""


@dataclass(frozen=True)
class OutputNeeds:
    """All that the plan of a call depends on of its outputs."""

    reductions: int = 0
    """Numbers beside each partial sum, of which outputs are made."""
    reduces_all: bool = False
    """Whether some are over all classes."""
    top_k: int = 0
    """Classes of the largest logits that are outputs of a token."""

    @property
    def searches(self) -> bool:
        """Whether blocks of classes are searched, for which logits are computed again."""
        return self.top_k > 0

    @property
    def least_chunk(self) -> int:
        """The fewest tokens of a chunk: a search reads parts of the weight for each."""
        return LEAST_SEARCHED if self.searches else 0

    def parts(self, tiles: int, affordable: int) -> int:
        """Return how many partial sums a row has of so many tiles, if kernels sum them.

        A search has one of each tile, whose number two warpgroups may round up.
        """
        return round_up(tiles, 2) if self.searches else max(1, min(tiles, affordable))


NO_OUTPUTS = OutputNeeds()


def needs_of(options: LossOptions, has_kernels: bool) -> OutputNeeds:
    """Return what a call needs that kernels in CuTe serve, or others."""
    if has_kernels:
        return OutputNeeds(reductions_of(options).planes, options.reduces_all, options.top_k)
    others = options.keeps_largest + SUMS_OF_OTHERS * options.reduces_others
    return OutputNeeds(
        SUMS_OF_ALL * options.reduces_all + others, options.reduces_all, options.top_k
    )


def reductions_of(options: LossOptions) -> RowReductions:
    """Return what kernels reduce logits to beside their sums."""
    names = options.output_names
    return RowReductions("entropy" in names, "sum_p_squared" in names, options.keeps_largest)


def unserved_reason(options: LossOptions, tensors: TensorOptions) -> str | None:
    """Return why kernels in CuTe cannot serve the outputs of a call, None if they can."""
    if options.searches_classes and tensors.linear_bias is not None:
        return (
            "linear_bias: got one with top_k; where a bias excludes the target, "
            "log-sum-exps of kernels are NaN"
        )
    return None


def unsampled_reason(options: LossOptions) -> str | None:
    """Return why no kernel samples gradients beside the outputs of a call, None if some do."""
    if options.searches_classes:
        return f"top_k: got {options.top_k}, beside which no kernel samples"
    return None
