"""Prints the lines of the package by feature: `python -m tests.lines`, or `make lines`.

A file belongs to the first feature with a part of its path.
"""

from collections.abc import Mapping

from tests.support.package import ROOT, modules

FEATURES: Mapping[str, tuple[str, ...]] = {
    "soft targets": ("soft",),
    "sampled gradients": ("sampl",),
    "divergences of two heads": ("divergence", "integrations/distillation"),
    "log-probabilities and outputs": (
        "output_classes",
        "ops/outputs/",
        "log_probs",
        "probabilit",
    ),
    "tensor, sequence and data parallelism": ("ops/parallel/", "agreement"),
    "kernels for Blackwell": ("sm100",),
    "kernels for Hopper": ("sm90", "cute_kernels/rowwise", "cute_kernels/common"),
    "compiling, caching and describing kernels": ("cute_kernels/",),
    "kernels in Triton": ("triton",),
    "tuning and verification": ("autotune_cache/",),
    "plans and programs": ("ops/program/", "ops/planning/"),
    "steps on the kernels and in plain torch": ("ops/primitives/",),
    "losses: targets, options, coefficients": ("ops/rows/",),
    "calls and operators": ("ops/",),
    "deferred heads": ("integrations/deferral/",),
    "trainers": ("integrations/",),
    "command line": ("cutefce/",),
}
"""Parts of paths, by feature."""


def feature_of(path: str) -> str:
    """Return the feature of a file, by its path below the root."""
    return next(name for name, parts in FEATURES.items() if any(part in path for part in parts))


def lines_by_feature() -> dict[str, int]:
    """Return the lines of each feature's files."""
    found = dict.fromkeys(FEATURES, 0)
    for path in modules().values():
        name = path.relative_to(ROOT).as_posix()
        found[feature_of(name)] += len(path.read_text().splitlines())
    return found


def main() -> None:
    """Print a table in Markdown."""
    found = lines_by_feature()
    print("| feature | lines |\n|---|---|")
    for name, lines in found.items():
        print(f"| {name} | {lines:,} |")
    print(f"| all | {sum(found.values()):,} |")


if __name__ == "__main__":
    main()
