"""From a kernel's description to a function; the only module that runs the DSL's compiler."""

import importlib
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.spec import FusedForwardSpec, GradGemmSpec, KernelSpec, ProjectExpSpec

OPTIONS = "--enable-tvm-ffi"
SYMBOL = "kernel"
"""Name of an exported function."""


@dataclass(frozen=True)
class Report:
    """What the assembler said of one kernel."""

    kernel: KernelSpec
    registers: int
    """Registers a thread at launch; warp-specialised kernels share them out anew."""
    spill_bytes: int
    warnings: tuple[str, ...]
    """Codes C75xx: products that the assembler made wait for each other."""
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether nothing spills and no products wait."""
        return not self.spill_bytes and not self.warnings


def compile_kernel(kernel: KernelSpec, options: str = "") -> Any:
    """Compile `kernel` for its architecture; a GPU is not needed."""
    import cutlass.cute as cute

    function, arguments = traced(kernel)
    return cute.compile(
        function, *arguments, options=f"--gpu-arch {kernel.arch} {OPTIONS} {options}"
    )


def traced(kernel: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and arguments to compile it for."""
    source = importlib.import_module(f"cutefce.cute_kernels.{source_of(kernel)}")
    return cast(tuple[Any, tuple[Any, ...]], source.trace(kernel))


def source_of(kernel: KernelSpec) -> str:
    """Return the module of this folder that holds the code of `kernel`."""
    if isinstance(kernel, FusedForwardSpec):
        return "fused_forward"
    family = arch_named(kernel.arch).family
    if isinstance(kernel, ProjectExpSpec):
        return f"{family}.project_exp"
    return f"{family}.gradient" if isinstance(kernel, GradGemmSpec) else "rowwise"


def report(kernel: KernelSpec) -> tuple[Report, Any]:
    """Compile `kernel`; return what the assembler said, and the compiled function."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        remarks = Path(folder) / "remarks"
        function = compile_kernel(kernel, f"remarks{{ptx}} --remark-output {remarks}")
        text = " ".join(remarks.read_text().split())
    used = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    if not used or not spills:
        raise RuntimeError(f"the assembler's remarks on {kernel} are not as expected: {text!r}")
    seconds = time.perf_counter() - begin
    warnings = tuple(sorted(set(re.findall(r"C75\d\d", text))))
    return Report(kernel, max(map(int, used)), sum(map(int, spills)), warnings, seconds), function
