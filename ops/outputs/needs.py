"""What outputs of tokens ask of programs and of kernels."""

from dataclasses import dataclass

from cutefce.cute_kernels.variant import RowReductions
from cutefce.ops.interface.arguments import LossOptions

SUMS_OF_ALL = 4
"""Numbers of a part of the classes in plain torch, if outputs need sums over all classes."""
SUMS_OF_OTHERS = 2
"""Those beside the largest logit, if outputs need reductions over all classes but the target."""


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
