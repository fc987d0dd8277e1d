"""Which implementation of the primitives serves a call, and why."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from cutefce.autotune_cache import lookup, verdicts
from cutefce.autotune_cache.verdicts import FORWARD, OPTIONS, SOFT_TARGETS, STEP
from cutefce.cute_kernels import kernel_set
from cutefce.cute_kernels.arch import ARCHS, arch_for, arch_named
from cutefce.cute_kernels.arch.base import Arch, Gpu
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.jit.cache import CompilerError, compiled
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import on_reset, process_cache, reset, warn_once
from cutefce.cute_kernels.spec import rowwise as spec
from cutefce.cute_kernels.variant import KernelVariant
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface.arguments import Kind, LossOptions, TensorOptions
from cutefce.ops.outputs.needs import unserved_reason
from cutefce.ops.primitives.cute_gradients import CutePrimitives
from cutefce.ops.primitives.cute_rowwise import CublasPrimitives
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.primitives.select_rows import has_aligned_rows
from cutefce.ops.rows.selection import CountedRows
from cutefce.ops.rows.targets import Targets, variant_of

VERIFY = "cutefce verify"
META_ARCH = arch_named("sm_90a")
"""The architecture that tensors on `meta` are planned for."""

F = TypeVar("F", bound=Callable[..., Any])

_strict = False
_compiler_failures: dict[str, str] = {}
"""Why the kernels of an architecture cannot be compiled in this process."""
on_reset(_compiler_failures.clear)


@dataclass(frozen=True)
class Backend:
    """Which primitives serve a call."""

    name: str
    """"cute", the kernels, or of the portable path "triton" or "torch"."""
    reason: str
    """Why."""


def set_strict(enabled: bool) -> None:
    """Make calls that the kernels cannot serve raise RuntimeError, on a CPU too, or warn once."""
    global _strict
    _strict = enabled


def backend_of(h: Tensor, w: Tensor) -> Backend:
    """Return which backend serves h (N, D) and w (V, D), and why."""
    try_compiler(h.device, h.dtype)
    reason = _unsupported_reason(h, w, STEP)
    if reason is not None:
        return Backend("triton" if triton_serves(h, w) else "torch", reason)
    capability = gpu_of(h.device).arch.capability
    return Backend("cute", f"{h.dtype} on compute capability {capability[0]}.{capability[1]}")


def arch_of(h: Tensor, w: Tensor, part: str = STEP) -> str | None:
    """Return the architecture whose kernels serve a part of calls, None if there is none.

    h is (N, D), w is (V, D).
    """
    if h.is_meta:
        served = dtype_name(h.dtype) in META_ARCH.dtypes
        return META_ARCH.name if served and not _layout_unsupported_reason(h, w) else None
    return None if _unsupported_reason(h, w, part) else gpu_of(h.device).arch.name


def planned_device(x: Tensor) -> str:
    """Return the type of the device that calls with x are planned for: a GPU's for `meta`."""
    return "cuda" if x.is_meta else x.device.type


def problem_of(
    h: Tensor,
    w: Tensor,
    grad_hidden: bool,
    grad_weight: bool,
    grad_bias: bool = False,
    tokens: int | None = None,
) -> Problem:
    """Return the problem of h (N, D) against w (V, D), with the gradients to compute.

    It has `tokens`, if h is a share of these.
    """
    (rows, hidden), vocab = h.shape, w.shape[0]
    arch = arch_of(h, w, STEP if grad_hidden or grad_weight or grad_bias else FORWARD)
    return Problem(
        rows if tokens is None else tokens,
        hidden,
        vocab,
        dtype_name(h.dtype),
        planned_device(h),
        grad_hidden,
        grad_weight,
        arch,
        grad_bias=grad_bias,
        triton=arch is None and triton_serves(h, w),
    )


def primitives_for(
    h: Tensor,
    w: Tensor,
    problem: Problem,
    tiles: PortableTiles,
    targets: Targets | None = None,
    device: torch.device | None = None,
    counted: CountedRows | None = None,
) -> Primitives:
    """Return the primitives for one call with h (N, D) and w (V, D), and what `targets` ask for.

    `tiles` are the widest window.  Its kernels are those of `device`, if that is not the one of h.
    In plain torch and in Triton, `counted` rows count.

    Raises:
        RuntimeError: in strict mode, if the kernels cannot serve the call.
    """
    if problem.arch is not None:
        kernels = kernels_for(device or h.device, problem, variant_of(targets))
        return kernel_primitives(tiles, *kernels, grad_bias=problem.grad_bias)
    reason = _unsupported_reason(h, w, STEP if problem.needs_gradients else FORWARD)
    if reason is None and targets is not None:
        given = targets.options, targets.tensors
        reason = options_unsupported_reason(problem, h.device, *given)
    if problem.tokens and reason is not None:
        report(reason, h.is_cuda)
    if not problem.triton:
        return Primitives(tiles)
    # this imports Triton, which no other call needs
    from cutefce.ops.primitives.triton_primitives import TritonPrimitives

    return TritonPrimitives(tiles, counted)


def options_unsupported_reason(
    problem: Problem, device: torch.device, options: LossOptions, tensors: TensorOptions
) -> str | None:
    """Return why kernels that serve `problem` cannot with options of a call, None if they can."""
    reason = unserved_reason(options, tensors)
    if device.type == "meta":  # nothing is launched
        return reason
    has_options = options.kinds > {None} or Kind.LOGITS in tensors.kinds
    for part, is_launched in ((OPTIONS, has_options), (SOFT_TARGETS, bool(tensors.soft_targets))):
        if reason is None and is_launched:
            reason = unproven_reason(device, problem.dtype, part)
    return reason


def kernel_primitives(
    tiles: PortableTiles,
    kernels: KernelSet,
    num_sms: int,
    grad_bias: bool = False,
) -> CublasPrimitives:
    """Return primitives on the kernels, for one call on one stream of a GPU with `num_sms` SMs."""
    gemms = kernels.grad_weight
    # the bias' gradient is a GEMM of cuBLAS, as all are without kernels for them
    clears = grad_bias or gemms is None
    primitives = CublasPrimitives if gemms is None else CutePrimitives
    return primitives(kernels, num_sms, tiles, clears)


def report(reason: str, on_gpu: bool, what: str = "served by the portable path:") -> None:
    """Raise RuntimeError in strict mode, that no kernels serve; else warn once on a GPU.

    The warning begins with `what` is done instead.
    """
    if _strict:
        raise RuntimeError(f"cutefce: the kernels cannot serve this call: {reason}")
    if on_gpu:
        warn_once(f"{what} {reason}")


def _unsupported_reason(h: Tensor, w: Tensor, part: str) -> str | None:
    """Return why the kernels cannot serve a part of calls with h and w, None if they can."""
    reason = device_unsupported_reason(h.device, h.dtype) or _layout_unsupported_reason(h, w)
    if reason is not None:
        return reason
    return unproven_reason(h.device, dtype_name(h.dtype), part)


def _layout_unsupported_reason(h: Tensor, w: Tensor) -> str | None:
    """Return why kernels cannot serve the shapes and strides of h (N, D) and w (V, D)."""
    if h.shape[0] == 0:
        return "input: got no rows, expected at least 1"
    if h.shape[1] % 8:
        return f"input: got hidden size {h.shape[1]}, expected a multiple of 8"
    if not has_aligned_rows(w):
        return (
            f"linear_weight: got strides {w.stride()} from byte {w.data_ptr() % 16} of 16, "
            "expected rows that are contiguous and begin at multiples of 16 bytes"
        )
    return None


def triton_serves(h: Tensor, w: Tensor) -> bool:
    """Whether Triton's kernel can make exponentials of h (N, D) and w (V, D)."""
    if not h.is_cuda or h.dtype not in (torch.bfloat16, torch.float16):
        return False
    if h.shape[0] == 0 or h.shape[1] % 8:
        return False
    return has_aligned_rows(w) and has_triton(h.device)


@process_cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton compiles tensor-core kernels for a GPU."""
    capability = capability_of(device)
    return find_spec("triton") is not None and capability is not None and capability >= (8, 0)


class _RetryLaterError(Exception):
    """A reason that must not be cached: a later call may be served."""


@process_cache
def device_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot serve `dtype` on `device`, None if they can.

    They can before they are verified, unless they have failed.
    """
    if device.type != "cuda":
        return f"input: got device {device.type}, expected cuda"
    capability = capability_of(device)
    if capability is None:
        return "input: got a GPU of AMD, expected one of NVIDIA"
    arch = arch_for(capability)
    if arch is None:
        expected = ", ".join(f"{major}.{minor}" for major, minor in (a.capability for a in ARCHS))
        got = f"{capability[0]}.{capability[1]}"
        return f"input: got compute capability {got}, expected one of {expected}"
    name = dtype_name(dtype)
    if name not in arch.dtypes:
        return f"input: got dtype {dtype}, expected one of {', '.join(arch.dtypes)}"
    return (
        _missing_reason()
        or _compiler_failures.get(arch.name)
        or _failed_reason(gpu_of(device), verdicts.known(gpu_of(device), name))
    )


def unproven_reason(device: torch.device, dtype: str, part: str) -> str | None:
    """Return why a part of calls must not launch its kernels on a GPU, None if it may.

    Verifies them on first use.
    """
    try:
        return _unproven_reason(device, dtype, part)
    except _RetryLaterError as later:
        return str(later)


@process_cache
def _unproven_reason(device: torch.device, dtype: str, part: str) -> str | None:
    gpu = gpu_of(device)
    verdict = verdicts.known(gpu, dtype, part)
    if verdict is None:
        if torch.cuda.is_current_stream_capturing():
            raise _RetryLaterError(f"the kernels never ran on {gpu.name}; first run: {VERIFY}")
        verdict = verdicts.verify(gpu, str(device), dtype, part)
    return _failed_reason(gpu, verdict)


def _failed_reason(gpu: Gpu, verdict: verdicts.Verdict | None) -> str | None:
    """Return why the kernels must not be launched, None if they have not failed."""
    if verdict is None or verdict.passed:
        return None
    return f"the kernels failed on {gpu.name} ({verdict.reason}); to try again: {VERIFY}"


def _missing_reason() -> str | None:
    """Return which package that compiles or loads kernels is not installed, None if all are."""
    for module in ("cutlass", "tvm_ffi"):
        if find_spec(module) is None:
            return (
                f"{module} is not installed: pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
            )
    return None


def try_compiler(device: torch.device, dtype: torch.dtype) -> None:
    """Compile or load a kernel for `dtype` on `device`: calls do without kernels if that fails.

    It is for those who cannot do so once they launch kernels.
    """
    if device_unsupported_reason(device, dtype) is None:
        try:
            compiled(spec.TargetLogitSpec(gpu_of(device).arch.name, dtype_name(dtype)))
        except CompilerError as error:
            _do_without(error)


def falls_back(function: F) -> F:
    """Return a `function` that runs again, in plain torch, if its kernels cannot be compiled."""

    @functools.wraps(function)
    def run(*arguments: Any, **more: Any) -> Any:
        known = {*_compiler_failures}  # another thread may find the same now
        try:
            return function(*arguments, **more)
        except CompilerError as error:
            if error.arch in known:  # what an earlier call kept needs kernels
                raise
            _do_without(error)
        return function(*arguments, **more)

    return cast(F, run)


def _do_without(error: CompilerError) -> None:
    """Serve calls without kernels of an architecture from now on."""
    reset()
    _compiler_failures[error.arch] = str(error)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None of one of AMD, which reports NVIDIA's."""
    return None if torch.version.hip else torch.cuda.get_device_capability(device)


def gpu_arch(device: torch.device) -> Arch | None:
    """Return the architecture of a GPU; None if it has no kernels."""
    capability = capability_of(device)
    return None if capability is None else arch_for(capability)


@process_cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the model of a GPU that has kernels."""
    arch = gpu_arch(device)
    assert arch is not None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(arch, properties.name, properties.multi_processor_count)


@process_cache
def kernels_for(
    device: torch.device, problem: Problem, variant: KernelVariant
) -> tuple[KernelSet, int]:
    """Return the kernels of a problem on a GPU, and its number of SMs."""
    gpu = gpu_of(device)
    configs = lookup.kernel_configs(problem, gpu)
    return kernel_set.kernel_set(gpu.arch, problem.dtype, configs, variant), gpu.num_sms
