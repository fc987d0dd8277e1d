"""Results of kernels that verification compares with float64 and with the portable path.

steps.py         of losses and exact gradients
samples.py       of sampled gradients
soft_targets.py  of the kernels of soft targets
divergences.py   of the kernels of divergences
"""

from cutefce.autotune_cache.tuning.cases import Case, CheckedOutput
from cutefce.autotune_cache.tuning.outputs.divergences import divergence_outputs
from cutefce.autotune_cache.tuning.outputs.samples import sampled_outputs
from cutefce.autotune_cache.tuning.outputs.soft_targets import soft_outputs
from cutefce.autotune_cache.tuning.outputs.steps import (
    FORWARDS,
    STEPS,
    partial_outputs,
    way_outputs,
)
from cutefce.cute_kernels.parts import DIVERGENCES, FORWARD, SAMPLES, SOFT_TARGETS, STEP
from cutefce.ops.primitives.primitives import Primitives


def outputs_of(
    case: Case, primitives: Primitives, parts: tuple[str, ...]
) -> dict[str, CheckedOutput]:
    """Return what the `parts` of a call compute, by name.

    Launches every kernel of these parts that a call without options may launch.
    """
    results: dict[str, CheckedOutput] = {}
    if FORWARD in parts:
        results |= way_outputs(case, primitives, FORWARDS)
    if STEP in parts:
        results |= way_outputs(case, primitives, STEPS)
        results |= partial_outputs(case, primitives)
    if SAMPLES in parts:
        results |= sampled_outputs(case, primitives)
    if DIVERGENCES in parts:
        results |= divergence_outputs(case, primitives)
    if SOFT_TARGETS in parts:
        results |= soft_outputs(case, primitives)
    return results
