"""What can be tuned: `project_exp`, the gradient GEMMs and the width of windows."""

from cutefce.autotune_cache.tuning.targets.base import TuningTarget
from cutefce.autotune_cache.tuning.targets.gradients import GradHiddenTarget, GradWeightTarget
from cutefce.autotune_cache.tuning.targets.project_exp import ProjectExpTarget
from cutefce.autotune_cache.tuning.targets.window import WindowTarget
from cutefce.cute_kernels.gpu import Gpu


def all_targets(gpu: Gpu, device: str) -> tuple[TuningTarget, ...]:
    """Return everything that can be tuned on `gpu`, which torch addresses as `device`."""
    gradients = (GradHiddenTarget, GradWeightTarget) if gpu.arch.forms_weight_gradient else ()
    kinds: tuple[type[TuningTarget], ...] = (ProjectExpTarget, *gradients, WindowTarget)
    return tuple(kind(gpu, device) for kind in kinds)
