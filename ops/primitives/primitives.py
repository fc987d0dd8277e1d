"""What the steps of a program launch: one implementation of the forward and of the backward."""

from dataclasses import dataclass

from cutefce.cute_kernels.config import WindowConfig
from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.primitives.portable_projection import PortableProjection


@dataclass(frozen=True)
class Primitives:
    """One implementation of the steps; all tensors of a call are on one device."""

    config: WindowConfig
    projection: PortableProjection
    gradients: PortableGradients
