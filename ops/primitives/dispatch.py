"""Which primitives serve a call here, and why."""

import functools
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from cutefce.autotune_cache import defaults, lookup, verdicts
from cutefce.cute_kernels import spec
from cutefce.cute_kernels.arch import arch_for
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives.cute import CutePrimitives, has_aligned_rows
from cutefce.ops.primitives.interface import Primitives
from cutefce.ops.primitives.portable import TorchPrimitives

VERIFY = "python -m cutefce verify"

_strict = False


@dataclass(frozen=True)
class Backend:
    """Which primitives serve a call."""

    name: str
    """"cute", the kernels, or "torch", the portable path."""
    reason: str
    """Why."""


def set_strict(enabled: bool) -> None:
    """Make calls that the kernels cannot serve raise RuntimeError, instead of a warning once."""
    global _strict
    _strict = enabled


def backend_for(h: Tensor, w: Tensor) -> Backend:
    """Return what serves a call with hidden states h (..., D) and weight w (V, D)."""
    rows = h if h.ndim == 2 else h.reshape(-1, h.shape[-1])
    reason = _unsupported_reason(rows, w)
    if reason is not None:
        return Backend("torch", reason)
    capability = torch.cuda.get_device_capability(h.device)
    return Backend("cute", f"{h.dtype} on compute capability {capability[0]}.{capability[1]}")


def arch_of(h: Tensor) -> str | None:
    """Return the architecture whose kernels take h (N, D), None if there is none.

    Does not look at how tensors lie in memory, which a graph compiler does not know.
    """
    if device_unsupported_reason(h.device, h.dtype) is not None or h.shape[1] % 8:
        return None
    return gpu_of(h.device).arch.name


def are_concrete(*sizes: int) -> bool:
    """Whether all sizes are numbers, not symbols of a graph compiler."""
    return set(map(type, sizes)) == {int}


def problem_of(h: Tensor, w: Tensor, grad_hidden: bool, grad_weight: bool) -> Problem:
    """Return what is asked: h (N, D) against w (V, D), and the gradients that are wanted."""
    (tokens, hidden), vocab = h.shape, w.shape[0]
    return (_cached_problem if are_concrete(tokens, hidden, vocab) else Problem)(
        tokens,
        hidden,
        vocab,
        str(h.dtype).removeprefix("torch."),
        h.device.type,
        grad_hidden,
        grad_weight,
        arch_of(h),
    )


_cached_problem = functools.lru_cache(maxsize=1024)(Problem)
"""The one of these sizes: to make and to compare problems takes 3 us of a call."""


def widths_for(problem: Problem, device: torch.device) -> tuple[PortableTiles, ...]:
    """Return what a plan for `problem` on `device` chooses from; not tuned for symbolic sizes."""
    if problem.arch is None or not are_concrete(problem.tokens, problem.hidden, problem.vocab):
        return defaults.window_configs(problem)
    return lookup.window_configs(problem, gpu_of(device))


def primitives_for(h: Tensor, w: Tensor, problem: Problem) -> Primitives:
    """Return the primitives for h (N, D) and w (V, D).

    Raises:
        RuntimeError: in strict mode, if the kernels cannot serve the call.
    """
    reason = _unsupported_reason(h, w) if problem.arch is None else _layout_unsupported_reason(h, w)
    if reason is None:
        return _cute_primitives(h.device, problem).with_scratch()
    if problem.tokens:
        _report(reason, h.is_cuda)
    return _torch_primitives(defaults.widest_window(problem))


def _report(reason: str, on_gpu: bool) -> None:
    if _strict:
        raise RuntimeError(f"cutefce: the kernels cannot serve this call: {reason}")
    if on_gpu:
        _warn_once(reason)


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"cutefce: served by the portable path: {reason}", stacklevel=2)


def _unsupported_reason(h: Tensor, w: Tensor) -> str | None:
    """Return why the kernels cannot serve h (N, D) and w (V, D), None if they can."""
    return device_unsupported_reason(h.device, h.dtype) or _layout_unsupported_reason(h, w)


def _layout_unsupported_reason(h: Tensor, w: Tensor) -> str | None:
    """Return why the kernels that the device has cannot serve h (N, D) and w (V, D)."""
    if h.shape[0] == 0:
        return "h: got no rows, expected at least 1"
    if h.shape[1] % 8:
        return f"h: got hidden size {h.shape[1]}, expected a multiple of 8"
    if not has_aligned_rows(w):
        return (
            f"w: got strides {w.stride()} from byte {w.data_ptr() % 16} of 16, "
            "expected rows that are contiguous and begin at multiples of 16 bytes"
        )
    return None


def device_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot serve `dtype` on `device`, None if they can."""
    try:
        return _device_unsupported_reason(device, dtype)
    except _RetryLaterError as later:
        return str(later)


class _RetryLaterError(Exception):
    """An obstacle that only the next call can remove."""


@functools.cache
def _device_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"h: got device {device.type}, expected cuda"
    capability = torch.cuda.get_device_capability(device)
    arch = arch_for(capability)
    if arch is None:
        return f"h: got a device of compute capability {capability}, for which there are no kernels"
    name = str(dtype).removeprefix("torch.")
    if name not in arch.dtypes:
        return f"h: got dtype {dtype}, expected one of {', '.join(arch.dtypes)}"
    return _compiler_unsupported_reason(arch, name) or _unverified(device, name)


@functools.cache
def _unverified(device: torch.device, dtype: str) -> str | None:
    """Return why the kernels may not be launched on this GPU, None if they may; tries them once."""
    gpu = gpu_of(device)
    verdict = verdicts.known(gpu, dtype)
    if verdict is None:
        if torch.cuda.is_current_stream_capturing():
            raise _RetryLaterError(f"the kernels never ran on {gpu.name}; first run: {VERIFY}")
        from cutefce.autotune_cache.tuning import first_use

        verdict = first_use.verify_on_first_use(gpu, str(device), dtype)
    if verdict.passed:
        return None
    return f"the kernels failed on {gpu.name} ({verdict.reason}); to try again: {VERIFY}"


def _compiler_unsupported_reason(arch: Arch, dtype: str) -> str | None:
    """Return why kernels cannot be had for `arch`, None if they can; compiles or loads one."""
    for module in ("cutlass", "tvm_ffi"):
        if find_spec(module) is None:
            return (
                f"{module} is not installed: pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
            )
    try:
        compiled(spec.TargetLogitSpec(arch.name, dtype))
    except Exception as error:  # whatever a compiler raises, a loss can still be computed
        return f"the kernels' compiler failed: {type(error).__name__}: {error}"
    return None


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the architecture, name and num_sms of a GPU that there are kernels for."""
    arch = arch_for(torch.cuda.get_device_capability(device))
    assert arch is not None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(arch, properties.name, properties.multi_processor_count)


@functools.lru_cache(maxsize=1024)
def _cute_primitives(device: torch.device, problem: Problem) -> CutePrimitives:
    tiles, gpu = defaults.widest_window(problem), gpu_of(device)
    if lookup.tunes_on_first_use() and not _must_not_block():
        from cutefce.autotune_cache.tuning import first_use

        torch.cuda.synchronize(device)
        first_use.tune_on_first_use(gpu, str(device), problem)
    configs = lookup.kernel_configs(problem, gpu)
    return CutePrimitives(tiles, gpu.arch, problem.dtype, configs, gpu.num_sms)


def _must_not_block() -> bool:
    """Whether work that takes long is out of place: in a graph's capture, or beside other ranks."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.cuda.is_current_stream_capturing() or (
        distributed and torch.distributed.get_world_size() > 1
    )


@functools.cache
def _torch_primitives(tiles: PortableTiles) -> Primitives:
    return TorchPrimitives(tiles)
