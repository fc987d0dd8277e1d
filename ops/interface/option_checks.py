"""Checks of the options of a loss, made before anything is allocated."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cutefce.ops import torch_compat
from cutefce.ops.interface.checks import INTEGERS, OUTPUTS, check_dtype, check_layout, check_type
from cutefce.ops.sampling.sample_sizes import MAX_SAMPLES, MIN_SAMPLES

GRADIENTS = "exact", "sampled"


def check_numbers(
    label_smoothing: float, z_loss: float, logit_scale: float, softcap: float | None
) -> None:
    """Raise ValueError for a number out of its range, NotImplementedError for a combination."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: got {label_smoothing}, expected a number from 0 to 1")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss: got {z_loss}, expected a finite number, 0 or more")
    if not 0 < abs(logit_scale) < math.inf:
        raise ValueError(f"logit_scale: got {logit_scale}, expected a finite number other than 0")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap: got {softcap}, expected a finite number above 0, or None")
    if softcap is not None and label_smoothing:
        raise NotImplementedError(
            f"label_smoothing: got {label_smoothing} with softcap={softcap}, which cutefce does "
            "not serve together; expected one of them"
        )


def check_linear(linear: Any) -> None:
    """Raise TypeError unless the head is a plain `nn.Linear`, whose parameters alone are used."""
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        got = type(linear).__name__
    elif any(getattr(linear, name) for name in hooks):
        got = "hooks"
    else:
        return
    raise TypeError(
        f"linear: got {got}, expected a torch.nn.Linear without hooks: the loss uses its "
        "parameters and does not call it; merge an adapter into the weight, apply fully_shard to "
        "the module that holds it, call torch.nn.utils.prune.remove, or take weight_norm of "
        "torch.nn.utils.parametrizations"
    )


def check_features(input: Tensor, in_features: int) -> None:
    """Raise ValueError unless hidden states (..., D) fit a module's D."""
    if isinstance(input, Tensor) and input.shape[-1:] != (in_features,):
        raise ValueError(
            f"input: got shape {tuple(input.shape)}, expected (..., {in_features}), the "
            "in_features of the module"
        )


def check_sizes(in_features: int, num_classes: int, out_features: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless they are the sizes of a head with rows and columns."""
    check_type("in_features", in_features)
    check_type("num_classes", num_classes)
    check_type("out_features", out_features)
    for x in out_features:
        if isinstance(x, bool) or not isinstance(x, INTEGERS):
            raise TypeError(f"out_features: got {x!r} among them, expected integers")
    named = ("in_features", in_features), ("num_classes", num_classes)
    for name, size in (*named, *(("out_features", x) for x in out_features)):
        if size < 1:
            raise ValueError(f"{name}: got {size}, expected 1 or more")


def check_sampling(gradient: str, samples: int) -> None:
    """Raise TypeError or ValueError unless `gradient` has a name, and `samples` is in its range."""
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient: got {gradient!r}, expected one of {GRADIENTS}")
    if not MIN_SAMPLES <= samples <= MAX_SAMPLES:
        raise ValueError(
            f"samples: got {samples}, expected an integer from {MIN_SAMPLES} to {MAX_SAMPLES}"
        )


def check_entropy_gradient(softcap: float | None, gradient: str) -> None:
    """Raise NotImplementedError for options with which entropy has no gradient."""
    for name, got, expected in (
        ("softcap", "one" if softcap is not None else None, None),
        ("gradient", gradient, "exact"),
    ):
        if got != expected:
            raise NotImplementedError(
                f"{name}: got {got} with 'entropy' in outputs, which has no gradient then; "
                f"expected {name}={expected!r}, or entropy.detach()"
            )


def check_range(name: str, value: float) -> None:
    """Raise ValueError for a number out of the range of the argument `name`, which may be one."""
    in_range, expected = {
        "temperature": (0 < value < math.inf, "a finite number above 0"),
        "denominator": (0 <= value < math.inf, "a finite number, 0 or more"),
        "grad_output": (-math.inf < value < math.inf, "a finite number"),
    }[name]
    if not in_range:
        raise ValueError(f"{name}: got {value}, expected {expected}")


def check_vocab(linear_weight: Tensor, outputs: Sequence[str]) -> None:
    """Raise ValueError if classes are too many for the number of one to be a float32."""
    if "argmax" in outputs and linear_weight.shape[0] > 1 << 24:
        raise ValueError(
            f"outputs: got 'argmax' with {linear_weight.shape[0]} classes, expected at most 2^24"
        )


def check_outputs(names: Sequence[str], softcap: float | None) -> None:
    """Raise ValueError for an unknown output, NotImplementedError for a combination."""
    for name in names:
        if name not in OUTPUTS:
            raise ValueError(f"outputs: got {name!r}, expected some of {OUTPUTS}")
    if softcap is not None and "mean_logit" in names:
        raise NotImplementedError(
            f"outputs: got 'mean_logit' with softcap={softcap}, which cutefce does not serve "
            "together; expected one of them"
        )


def check_denominator(denominator: Tensor, h: Tensor, reduction: str) -> None:
    """Raise TypeError or ValueError unless it is one real number, for "mean"."""
    if reduction != "mean":
        raise ValueError(f'denominator: got one with reduction={reduction!r}, expected "mean"')
    _check_scalar("denominator", denominator, h)


def check_grad_output(grad_output: Tensor, h: Tensor, reduction: str, adds: bool) -> None:
    """Raise TypeError or ValueError unless it is one real number, for a loss that is one.

    `adds` says that dW is added to a buffer.
    """
    if not adds:
        raise ValueError("grad_output: got one without accumulate_into, expected None")
    if reduction not in ("mean", "sum"):
        expected = '"mean" or "sum"'
        raise ValueError(f"grad_output: got one with reduction={reduction!r}, expected {expected}")
    _check_scalar("grad_output", grad_output, h)


def check_bias(bias: Tensor, h: Tensor, w: Tensor) -> None:
    """Raise TypeError or ValueError unless it is (V, ...) floating-point on h's device.

    The weight w is (V, ..., D).
    """
    check_layout("linear_bias", bias)
    _check_floats("linear_bias", bias, h, w.shape[:-1])


def check_buffer(buffer: Tensor, h: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Raise TypeError or ValueError unless the gradient of w (V, D) can be added to `buffer`."""
    check_layout("accumulate_into", buffer)
    for name, x in (("linear_weight", w), ("input", h), ("linear_bias", bias)):
        if x is not None and _overlap(buffer, x):
            raise ValueError(f"accumulate_into: got the memory of {name}, expected its own")
    _check_constant("accumulate_into", buffer)
    dtypes = dict.fromkeys((torch.promote_types(w.dtype, torch.float32), w.dtype))
    if buffer.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise TypeError(f"accumulate_into: got dtype {buffer.dtype}, expected {expected}")
    _check_place("accumulate_into", buffer, h, w.shape)
    if not buffer.is_contiguous():
        raise ValueError(
            f"accumulate_into: got strides {buffer.stride()}, expected a contiguous tensor"
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether a byte of b lies between the first and the last one of a, or the reverse."""
    if not (a.numel() and b.numel() and torch_compat.shares_memory(a, b)):
        return False
    (first_a, end_a), (first_b, end_b) = _bytes_of(a), _bytes_of(b)
    return bool(first_a < end_b and first_b < end_a)


def _bytes_of(x: Tensor) -> tuple[Any, Any]:
    """Return the first byte of x in its storage, and that behind its last one."""
    first, size = x.storage_offset(), x.element_size()
    last = first + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return first * size, (last + 1) * size


def check_factors(name: str, x: Tensor, h: Tensor, shape: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless x has `shape`, is floating-point and on h's device."""
    _check_constant(name, x)
    _check_floats(name, x, h, shape)


def check_temperature(x: Tensor, h: Tensor, shape: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless x is floating-point, one for all tokens or for each.

    The target has `shape`.
    """
    if x.ndim and tuple(x.shape) != tuple(shape):
        got, expected = tuple(x.shape), tuple(shape)
        raise ValueError(f"temperature: got shape {got}, expected () or {expected}")
    check_factors("temperature", x, h, x.shape)


def _check_floats(name: str, x: Tensor, h: Tensor, shape: Sequence[int]) -> None:
    check_dtype(name, x)
    _check_place(name, x, h, shape)


def _check_place(name: str, x: Tensor, h: Tensor, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {tuple(shape)}")
    if x.device != h.device:
        raise ValueError(f"{name}: got device {x.device}, expected that of input, {h.device}")


def _check_scalar(name: str, x: Tensor, h: Tensor) -> None:
    _check_constant(name, x)
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {x.dtype}, expected a real one")
    if x.shape not in ((), (1,)):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected () or (1,)")
    if x.device not in (h.device, torch.device("cpu")):
        or_cpu = "" if h.device.type == "cpu" else ", or cpu"
        raise ValueError(
            f"{name}: got device {x.device}, expected that of input, {h.device}{or_cpu}"
        )


def _check_constant(name: str, x: Tensor) -> None:
    check_layout(name, x)
    if x.requires_grad:
        raise ValueError(f"{name}: got one that requires grad, expected {name}.detach()")
