"""The modules of the package, which are in folders at the root."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = "cute_kernels", "autotune_cache", "ops", "integrations", "cutefce"


def modules() -> dict[str, Path]:
    """Return the module files by the modules' names; `rglob` follows no links of cutefce/."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join(parts if folder == "cutefce" else ("cutefce", *parts))] = path
    return found
