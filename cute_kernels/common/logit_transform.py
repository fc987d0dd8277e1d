"""The logit transform: the one place where raw logits become the model's."""

from typing import Any

import cutlass
import cutlass.cute as cute

from cutefce.cute_kernels.spec import LogitTransform


@cute.jit
def transform(z: Any, options: LogitTransform) -> Any:
    """Return the model's logit of a raw logit z: z itself, as `options` has no fields yet."""
    return z


@cute.jit
def transform_all(z: cute.Tensor, options: LogitTransform) -> None:
    """Apply `transform` in place to logits in registers, before they are masked."""
    for i in cutlass.range_constexpr(cute.size(z)):
        z[i] = transform(z[i], options)
