"""Compiles a kernel spec into a host function; the only module that runs the DSL's compiler."""

import importlib
import re
import tempfile
from pathlib import Path
from typing import Any, cast

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.variant import IDENTITY, SUM_ONLY

OPTIONS = "--enable-tvm-ffi"
SYMBOL = "kernel"
"""Name of the exported function."""


MAX_TRANSFORM_SPILL_BYTES, MAX_REDUCTION_SPILL_BYTES = 64, 1024
"""Stores and loads of spilled registers that a logit transform, and reductions beside the sums, may
cost a tile: softcap with stored exponentials takes 24, and no measurable time, all transforms
together 64; a rank 160, and 2 to 3 % of a forward (`bench options`); all options 824."""


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


def compile_clean(kernel: KernelSpec) -> Any:
    """Compile `kernel`.

    Raises:
        ValueError: if MMAs are serialized, or more is spilled than options may.
    """
    # where it is asked for remarks, the compiler looks for the source line of every instruction, in
    # a third of the time that compiling takes; these remarks do not name any
    dsl = importlib.import_module("cutlass.base_dsl.dsl")
    vars(dsl)["_set_enable_frame_filtering"] = lambda enable: None
    with tempfile.TemporaryDirectory() as folder:
        remarks = Path(folder) / "remarks"
        function = compile_kernel(kernel, f"remarks{{ptx}} --remark-output {remarks}")
        text = " ".join(remarks.read_text().split())
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    if not spills:
        raise RuntimeError(f"unexpected remarks of the assembler on {kernel}: {text!r}")
    warnings, spilled = sorted(set(re.findall(r"C75\d\d", text))), sum(map(int, spills))
    most = MAX_TRANSFORM_SPILL_BYTES * (getattr(kernel, "transform", IDENTITY) != IDENTITY)
    if getattr(kernel, "reductions", SUM_ONLY) != SUM_ONLY:
        most = MAX_REDUCTION_SPILL_BYTES
    if warnings or spilled > most:
        raise ValueError(f"{spilled} bytes spilled, warnings {warnings}: {kernel}")
    return function
