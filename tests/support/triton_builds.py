"""Compiles Triton's kernels without a GPU: `python -m tests.support.triton_builds 86 101376 dW`.

The arguments are a compute capability, its bytes of shared memory for a thread block, and kernels.
It prints what each takes, as JSON.  Triton must not interpret (`TRITON_INTERPRET=0`).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cutefce.cute_kernels.problem import SLACK
from cutefce.ops.outputs import triton_blocks
from cutefce.ops.primitives import triton_kernels as tiles
from cutefce.ops.primitives import triton_rows, triton_weight

POINTERS = {
    **dict.fromkeys(("reference", "sums", "references", "of_all", "largest", "of_others"), "*fp32"),
    **dict.fromkeys(
        ("row_scale", "bias", "floor", "scale", "coefficient", "factor", "row"), "*fp32"
    ),
    **dict.fromkeys(("exps", "out", "table"), "*bf16"),
    **{"x": "*fp32", "packed": "*i16", "low": "*u8"},
    **{"target": "*i64", "index": "*i64", "bounds": "*i32", "count": "*i32", "slope": "fp32"},
}
"""Types of operands; others are int32."""
OPTIONS = "row_scale", "bias", "slope", "floor"
ALL_OPTIONS = ("exps", "of_all", "largest", "of_others", "count", *OPTIONS)
PROJECTIONS = {"sums": (), "stored": ("exps",), "sums, stored, all options": ALL_OPTIONS}
BLOCKS = {"blocks": (), "blocks, all options": OPTIONS}
ROWS = {
    "packed": ("JOINS", "SPLITS"),
    "dX": ("scale", "table", "factor", "coefficient"),
}
WEIGHTS = {
    "dW": ("coefficient", "factor", "last", "count", "HAS_TARGETS"),
    "packed dW": ("coefficient", "ACCUMULATES", "PACKS"),
}
"""Operands and flags that the kernels which are compiled have, of those that are not always there.
"""
OPTIONAL = {*ALL_OPTIONS[1:], "scale", "table", "coefficient", "factor", "last"}


def build(capability: int, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """Return registers, bytes of stack and of shared memory of a kernel."""
    constants |= {"SLACK": SLACK}
    types = types | dict.fromkeys((OPTIONAL & types.keys()) - constants.keys(), "none")
    constants = {name: constants.get(name, False) for name in kernel.arg_names if name.isupper()}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    for name in [name for name, kind in signature.items() if kind == "none"]:
        signature[name], constants[name] = "constexpr", None
    options = {"num_warps": 4, "enable_fp_fusion": True}
    if kernel in (tiles._project, triton_weight._weight, triton_blocks._top_of_blocks):
        module = {tiles._project: tiles, triton_weight._weight: triton_weight}
        warps = module.get(kernel, triton_blocks).WARPS
        options |= {"num_warps": warps, "num_stages": tiles.STAGES}
    target = GPUTarget("cuda", capability, 32)
    # what a launch finds out: addresses and pitches are multiples of 16
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("pitch") or name == "hidden"
    }
    built = triton.compile(ASTSource(kernel, signature, constants, aligned), target, options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(x.split(":")[:2] for x in text.split() if x.count(":") == 1 and x[-1].isdigit())
    return {
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
        "shared": built.metadata.shared,
        "copies": sum(built.asm["ptx"].count(name) for name in ("cp.async.c", "cp.async.bulk")),
    }


def main() -> None:
    """Compile the kernels."""
    capability, shared, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    features = tiles.features_of(shared)
    has_tma = capability >= 10 * tiles.TMA_CAPABILITY
    found = {}

    def operand(rows: int, columns: int) -> str:
        return f"tensordesc<bf16[{rows},{columns}]>" if has_tma else "*bf16"

    for name, flags in ((name, PROJECTIONS[name]) for name in names if name in PROJECTIONS):
        types = {
            **POINTERS,
            "h": operand(tiles.ROWS, features),
            "w": operand(tiles.BLOCK, features),
            "exps_tiles": f"tensordesc<bf16[{tiles.ROWS},{tiles.BLOCK // 2}]>",
        }
        if "exps" not in flags:
            types["exps"] = "none"
        if "exps" not in flags or features != tiles.HOPPER_FEATURES:
            types["exps_tiles"] = "none"
        sizes = {"ROWS": tiles.ROWS, "BLOCK": tiles.BLOCK, "FEATURES": features}
        sizes |= {"GROUP": tiles.GROUP, "BLOCKS": 100, "HAS_TMA": has_tma}
        found[name] = build(
            capability, tiles._project, types, {**sizes, **dict.fromkeys(flags, True)}
        )
    for name, flags in ((name, BLOCKS[name]) for name in names if name in BLOCKS):
        sizes = {"ROWS": triton_blocks.ROWS, "BLOCK": tiles.BLOCK, "FEATURES": features}
        sizes |= {"K": 8, "CHOSEN": 8, "BLOCKS": 512, **dict.fromkeys(flags, True)}
        pairs = dict.fromkeys(("pairs", "starts", "last_tiles", "found"), "*i64")
        types = {**POINTERS, **pairs, "h": "*bf16", "values": "*fp32"}
        types |= {"w": operand(tiles.BLOCK, features)}
        sizes |= {"HAS_TMA": has_tma}
        found[name] = build(capability, triton_blocks._top_of_blocks, types, sizes)
    for name, flags in ((name, ROWS[name]) for name in names if name in ROWS):
        sizes = {"COLUMNS": triton_rows.COLUMNS, "LOW_BITS": 8, **dict.fromkeys(flags, True)}
        types = {**POINTERS, "last": "*fp32"}
        found[name] = build(capability, triton_rows._combine, types, sizes)
    if "largest" in names:
        types = {**POINTERS, "values": "*fp32", "places": "*i64"}
        sizes = {"K": 8, "COLUMNS": 1024}
        found["largest"] = build(capability, triton_blocks._largest_of_rows, types, sizes)
    for name, flags in ((name, WEIGHTS[name]) for name in names if name in WEIGHTS):
        rows, block, packs = triton_weight.ROWS, triton_weight.BLOCK, "PACKS" in flags
        low_bits = 4 if packs else 8
        types = {
            **POINTERS,
            "exps": operand(features, rows),
            "states": operand(features, block),
            "out_tiles": f"tensordesc<i16[{rows},{block // 4}]>" if has_tma else "none",
            "low_tiles": f"tensordesc<u8[{rows},{block // 8}]>" if has_tma and packs else "none",
            **{"order": "*i64", "h": "*bf16", "last": "*fp32", "out": "*i16"},
        }
        constants = {
            **{"ROWS": rows, "BLOCK": block, "TOKENS": features, "GROUP": tiles.GROUP},
            **{"BLOCKS": 100, "LOW_BITS": low_bits, "HAS_TMA": has_tma},
            **{"PARTS": triton_weight.PARTS, "DTYPE": tl.bfloat16},
            **dict.fromkeys(flags, True),
        }
        found[name] = build(capability, triton_weight._weight, types, constants)
        constants["COLUMNS"] = triton_weight.COLUMNS
        found[f"terms of {name}"] = build(capability, triton_weight._add_terms, types, constants)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
