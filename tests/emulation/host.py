"""Runs the host function of a kernel, whose launches are recorded instead of sent to a device.

The function is the compiled one.  So kernel parameters, tensor maps and launch shapes are what a
GPU would get, of whatever arguments.
"""

import ctypes
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cutefce.cute_kernels.jit.compiler import SYMBOL
from cutefce.cute_kernels.spec.kernel import KernelSpec
from tests.emulation.compiled import compiled

CUDA = 2
"""The device type of DLPack."""
COOPERATIVE, CLUSTER = 2, 4
"""Launch attributes: whether all blocks run at the same time, and the cluster's shape."""


class _Attribute(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Shape(ctypes.Structure):
    """A `cudaLaunchConfig_t`."""

    _fields_ = (
        ("grid", ctypes.c_int * 3),
        ("block", ctypes.c_int * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_int),
    )


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Shape), ctypes.POINTER(ctypes.c_void_p)
)


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    entry: str
    blocks: int
    warps: int
    """Warps of a block."""
    cluster: int
    """Blocks of a cluster."""
    is_cooperative: bool
    """Whether all blocks run at the same time."""
    shared_bytes: int
    parameters: tuple[bytes, ...]


class HostFunction:
    """The host function of a kernel, and its PTX."""

    def __init__(self, kernel: KernelSpec) -> None:
        import tvm_ffi

        self._launches: list[Launch] = []
        found = compiled(kernel)
        self.ptx = found.ptx
        self._function = tvm_ffi.load_module(str(found.library))[SYMBOL]
        self._callback = _CALLBACK(self._record)
        ctypes.CDLL(str(found.library)).on_launch(self._callback)

    def launches(self, arguments: Sequence[Any]) -> list[Launch]:
        """Return the launches of a call with `arguments`, of CPU tensors."""
        self._launches = []
        self._function(*map(_on_device, arguments))
        return self._launches

    def _record(self, name: bytes, shape: Any, values: Any) -> int:
        shape, entry = shape.contents, name.decode()
        attributes = {each.kind: each.value for each in shape.attributes[: shape.count]}
        sizes = parameter_sizes(self.ptx, entry)
        assert [*shape.grid[1:], *shape.block[1:]] == [1] * 4, "grids have one dimension"
        self._launches.append(
            Launch(
                entry,
                blocks=shape.grid[0],
                warps=shape.block[0] // 32,
                cluster=attributes[CLUSTER][0] if CLUSTER in attributes else 1,
                is_cooperative=COOPERATIVE in attributes and bool(attributes[COOPERATIVE][0]),
                shared_bytes=shape.shared_bytes,
                parameters=tuple(ctypes.string_at(values[i], n) for i, n in enumerate(sizes)),
            )
        )
        return 0


host_function = functools.cache(HostFunction)


def parameter_sizes(ptx: str, entry: str) -> list[int]:
    """Return the bytes of each parameter of a kernel."""
    header = ptx.split(f".entry {entry}(", 1)[1].split("{", 1)[0]
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+) \w+(?:\[(\d+)\])?", header)
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


def tensors(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments and in tuples of them."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from tensors(argument)
        elif isinstance(argument, torch.Tensor):
            yield argument


def _on_device(argument: Any) -> Any:
    """Return an argument for the host function, which takes CPU tensors for a GPU's."""
    import tvm_ffi

    if isinstance(argument, tuple):
        return tuple(map(_on_device, argument))
    if isinstance(argument, torch.Tensor):
        return tvm_ffi.from_dlpack(_Exported(argument))
    return argument


class _Exported:
    """A tensor as DLPack, on another device and with its strides."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.tensor.detach().__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        header = _DLTensor.from_address(pointer(capsule, b"dltensor"))
        header.device_type = CUDA
        for mode, stride in enumerate(self.tensor.stride()):
            header.strides[mode] = stride  # torch has replaced those of dimensions of size 1
        return capsule
