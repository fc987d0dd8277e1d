"""What every kernel spec has."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class KernelSpec:
    """A description of a kernel that can be compiled, which is its JIT key."""

    MODULE: ClassVar[str]
    """Its module, below `cute_kernels`; `{family}` is the architecture's."""

    arch: str
