"""Parts of what calls launch, which are verified apart from each other.

A call needs the parts that it launches, with its own configurations.
"""

from collections.abc import Iterable

from cutefce.cute_kernels.config import GemmConfig, KernelConfigs

FORWARD = "forward"
"""Losses without gradients."""
STEP = "step"
"""Exact gradients, by any plan; a plan that stores nothing has the forward of `FORWARD`."""
SOFT_TARGETS = "soft targets"
SAMPLES = "samples"
"""Sampled gradients."""
DIVERGENCES = "divergences"
"""Rows of two models' logits, and logits, whatever the configurations."""
PARTS = FORWARD, STEP, SOFT_TARGETS, SAMPLES, DIVERGENCES


def parts_of(part: str) -> tuple[str, ...]:
    """Return the part with those that calls of it launch too."""
    return (FORWARD, STEP) if part == STEP else (part,)


def has_gradients(parts: Iterable[str]) -> bool:
    """Return whether any of the parts launches GEMMs of gradients."""
    return not {FORWARD, SAMPLES, DIVERGENCES}.issuperset(parts)


def part_configs(part: str, configs: KernelConfigs) -> set[tuple[str, GemmConfig]]:
    """Return kernels, as tables name them, and configurations that a part depends on.

    cuBLAS is not verified.
    """
    if part == DIVERGENCES:
        return set()
    found: list[tuple[str, GemmConfig | None]] = [("project_exp", configs.project_exp)]
    if part != FORWARD:
        found.append(("exps", configs.exps))
    if has_gradients((part,)):
        found += [
            ("grad_hidden", configs.grad_hidden),
            ("grad_hidden", configs.grad_hidden_short),
            ("grad_weight", configs.grad_weight),
            ("kept_sums", configs.kept_sums),
        ]
    return {(kernel, config) for kernel, config in found if config is not None}
