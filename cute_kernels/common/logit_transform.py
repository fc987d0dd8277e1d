"""The logit transform: the one place where raw logits become the model's logits."""

from typing import Any

import cutlass.cute as cute

from cutefce.cute_kernels.spec import LogitTransform


@cute.jit
def transform(z: Any, options: LogitTransform) -> Any:
    """Return the model's logits for raw ones: z itself, as `options` has no fields yet.

    z is one float32 or a vector of them; applied before logits are masked.
    """
    return z


@cute.jit
def transform_registers(z: cute.Tensor, options: LogitTransform) -> None:
    """Apply `transform` in place to logits in registers."""
    z.store(transform(z.load(), options))
