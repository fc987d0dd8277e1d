"""Results of kernels that verification compares with float64 and with the portable path.

steps.py         of losses and exact gradients
options.py       of the same with options, and of outputs of tokens
samples.py       of sampled gradients
soft_targets.py  of the kernels of soft targets
divergences.py   of the kernels of divergences
"""

import functools
from collections.abc import Callable

from cutefce.autotune_cache.tuning.cases import Case, CheckedOutput
from cutefce.autotune_cache.tuning.outputs.divergences import divergence_outputs
from cutefce.autotune_cache.tuning.outputs.options import option_outputs
from cutefce.autotune_cache.tuning.outputs.samples import sampled_outputs
from cutefce.autotune_cache.tuning.outputs.soft_targets import soft_outputs
from cutefce.autotune_cache.tuning.outputs.steps import (
    FORWARDS,
    STEPS,
    partial_outputs,
    way_outputs,
)
from cutefce.autotune_cache.verdicts import (
    DIVERGENCES,
    FORWARD,
    OPTIONS,
    SAMPLES,
    SOFT_TARGETS,
    STEP,
)
from cutefce.cute_kernels.variant import PLAIN, KernelVariant
from cutefce.ops.primitives.primitives import Primitives

PrimitivesOf = Callable[[KernelVariant], Primitives]
"""Returns the primitives of calls with a variant."""

PLAIN_OUTPUTS: dict[str, tuple[Callable[[Case, Primitives], dict[str, CheckedOutput]], ...]] = {
    FORWARD: (functools.partial(way_outputs, ways=FORWARDS),),
    STEP: (functools.partial(way_outputs, ways=STEPS), partial_outputs),
    SAMPLES: (sampled_outputs,),
    DIVERGENCES: (divergence_outputs,),
    SOFT_TARGETS: (soft_outputs,),
}
"""What computes the outputs of each part of calls without options of logits and rows."""


def outputs_of(
    case: Case, primitives_of: PrimitivesOf, parts: tuple[str, ...]
) -> dict[str, CheckedOutput]:
    """Return what the `parts` of a call compute, by name.

    Launches every kernel of these parts.
    """
    plain = primitives_of(PLAIN)
    every = [make(case, plain) for part in parts for make in PLAIN_OUTPUTS.get(part, ())]
    if OPTIONS in parts:
        every.append(option_outputs(case, primitives_of))
    return {name: output for some in every for name, output in some.items()}
