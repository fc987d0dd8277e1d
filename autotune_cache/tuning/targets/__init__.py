"""TODO."""

from cutefce.autotune_cache.tuning.targets.base import (
    Tunable,
)
from cutefce.autotune_cache.tuning.targets.gradients import GradHidden, GradWeight
from cutefce.autotune_cache.tuning.targets.project_exp import ProjectExp
from cutefce.autotune_cache.tuning.targets.window import Window
from cutefce.cute_kernels.arch.base import Arch


def all_tunables(arch: Arch, num_sms: int, device: str) -> tuple[Tunable, ...]:
    """Return what can be tuned on a GPU of `arch`, which torch names `device`."""
    gradients = (GradHidden, GradWeight) if arch.forms_weight_gradient else ()
    kinds: tuple[type[Tunable], ...] = (ProjectExp, *gradients, Window)
    return tuple(kind(arch, num_sms, device) for kind in kinds)
