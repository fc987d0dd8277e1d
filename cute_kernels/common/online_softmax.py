"""Interface of `project_exp` on every architecture, and its row arithmetic.

    sums (N, P)   log2 Σ exp(z_iv - ρ_i) over the columns of one partial, without the target
    exps (N, K)   exp(z_iv - ρ_i), 0 at the target, in the inputs' dtype; the first K columns;
                  of bounded logits times the derivative of tanh

with the model's logits z, which `logit_transform` calls u.

A kernel of logits writes these in the place of exps, in float32, and has neither reference nor
targets.  Of each partial, sums are the largest logit t in units of ln 2, and the one plane of
reductions is Σ 2^(z log2 e - t).

Sums are relative to the running maximum until they are written (online softmax, the paper's
Algorithm 1), so that they are exact for any logits; exps are relative to ρ and may overflow.
Beside reductions over all columns, sums follow from these: there ρ is the target's own logit.

Shapes: h (N, D), w (V, D), reference ρ (N,) float32, target (N,) int64 counted from `first`,
semaphores int32 as in `workspace.Semaphore`, transform as in `logit_transform.Transform`, whose
bias (V,) belongs to the rows of w, reductions as in `row_reductions`, samples as in `sampling`.
N, V and D are dynamic; rows of h, w and exps start at multiples of 16 bytes.  With a `RowCount`,
only the first rows of tokens count: the others have neither sums nor samples, and exps are 0 for
those of the last row block.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor

from cutefce.cute_kernels.common.dsl import DTYPES, LOG2_E, exp2, matrix, vector
from cutefce.cute_kernels.common.launch import HostFunction, Signature
from cutefce.cute_kernels.common.logit_transform import transform_argument
from cutefce.cute_kernels.common.row_reductions import finite
from cutefce.cute_kernels.common.sampling import samples_argument
from cutefce.cute_kernels.spec import gemm as spec


class Rows(NamedTuple):
    """Row vectors and outputs that the epilogue needs."""

    reference: cute.Tensor
    target: cute.Tensor
    sums: Any
    semaphores: cute.Tensor
    transform: Any
    reductions: Any
    samples: Any
    first: Int32
    """Vocabulary entry of the first column: targets are counted from it."""


class ProjectExp(HostFunction):
    """The host function of `project_exp`, on clusters that must fit on the device at a time.

    Subclasses have the launch.
    """

    def rows_of(self, operands: Any) -> Rows:
        """Return what the epilogue needs of the operands."""
        return Rows(**{name: getattr(operands, name) for name in Rows._fields})

    def signature_of(self, kernel: spec.ProjectExpSpec) -> Signature:
        """Return the function and the arguments to compile it for."""
        dtype, tokens, vocab = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int()
        hidden, columns = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
        stored, partials = Float32 if kernel.logits else dtype, cute.sym_int()
        return self.signature(
            h=matrix(dtype, tokens, hidden),
            w=matrix(dtype, vocab, hidden),
            reference=None if kernel.logits else vector(Float32, tokens),
            target=None if kernel.logits else vector(Int64, tokens),
            sums=matrix(Float32, tokens, partials, aligned=False) if kernel.sums else None,
            exps=matrix(stored, tokens, columns) if kernel.store else None,
            semaphores=vector(Int32, cute.sym_int()),
            transform=transform_argument(kernel.transform, tokens, vocab),
            reductions=reductions_argument(kernel, tokens, partials),
            samples=samples_argument(kernel, tokens),
            count=vector(Int32, cute.sym_int()),
            selects=Int32(0),
            first=Int32(0),
            vocab_splits=Int32(1),
            clusters=Int32(1),
        )


def reductions_argument(kernel: spec.ProjectExpSpec, tokens: Any, partials: Any) -> Any:
    """Return the output of row reductions to compile a kernel for, None without them."""
    planes = 1 if kernel.logits and kernel.sums else kernel.reductions.planes
    if not planes:
        return None
    assert kernel.sums
    shape = planes, tokens, partials
    return make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0))


@cute.jit
def accumulate(z: cute.Tensor, row_max: Float32, row_sum: Float32) -> Any:
    """Add logits z of one row to its accumulators: (max of z·log2 e, Σ exp2(z·log2 e - max))."""
    z_max = z[0]
    for i in cutlass.range_constexpr(cute.size(z)):
        z_max = cute.arch.fmax(z_max, z[i])
    new_max = cute.arch.fmax(row_max, z_max * LOG2_E)
    base = finite(new_max)
    sums = [row_sum * exp2(row_max - base), Float32(0.0)]
    for i in cutlass.range_constexpr(cute.size(z)):
        sums[i % 2] += exp2(z[i] * LOG2_E - base)
    return new_max, sums[0] + sums[1]
