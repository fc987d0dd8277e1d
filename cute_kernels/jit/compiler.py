"""Compiles a kernel spec into a host function; the only module that runs the DSL's compiler."""

import importlib
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.spec.kernel import KernelSpec

OPTIONS = "--enable-tvm-ffi"
SYMBOL = "kernel"
"""Name of the exported function."""


@dataclass(frozen=True)
class Report:
    """The assembler's remarks on one kernel."""

    kernel: KernelSpec
    registers: int
    """Registers a thread at launch; warp-specialized kernels redistribute them."""
    spill_bytes: int
    warnings: tuple[str, ...]
    """Codes C75xx: MMAs that the assembler serialized."""
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether nothing is spilled and no MMAs are serialized."""
        return not self.spill_bytes and not self.warnings


def compile_kernel(kernel: KernelSpec, options: str = "") -> Any:
    """Compile `kernel` for its architecture; needs no GPU."""
    import cutlass.cute as cute

    function, arguments = compile_signature(kernel)
    return cute.compile(
        function, *arguments, options=f"--gpu-arch {kernel.arch} {OPTIONS} {options}"
    )


def compile_signature(kernel: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    name = kernel.MODULE.format(family=arch_named(kernel.arch).family)
    module = importlib.import_module(f"cutefce.cute_kernels.{name}")
    return cast(tuple[Any, tuple[Any, ...]], module.compile_signature(kernel))


def report(kernel: KernelSpec) -> tuple[Report, Any]:
    """Compile `kernel`; return the assembler's remarks and the compiled function."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        remarks = Path(folder) / "remarks"
        function = compile_kernel(kernel, f"remarks{{ptx}} --remark-output {remarks}")
        text = " ".join(remarks.read_text().split())
    used = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    if not used or not spills:
        raise RuntimeError(f"unexpected remarks of the assembler on {kernel}: {text!r}")
    seconds = time.perf_counter() - begin
    warnings = tuple(sorted(set(re.findall(r"C75\d\d", text))))
    return Report(kernel, max(map(int, used)), sum(map(int, spills)), warnings, seconds), function
