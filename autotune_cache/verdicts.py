"""TODO."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cutefce.autotune_cache import lookup
from cutefce.autotune_cache.table_io import file_name
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.jit import cache as jit_cache

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Verdict:
    """What became of the kernels on one GPU model."""

    passed: bool
    reason: str = ""
    """Why not."""


def known(arch: Arch, device: str, num_sms: int) -> Verdict | None:
    """Return the verdict on the kernels on this kind of GPU, None if there is none yet."""
    if lookup.has_shipped(arch, device, num_sms):
        return Verdict(True)
    try:
        data = json.loads(_record(device).read_text())
        return Verdict(data["passed"] is True, str(data["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record(device: str) -> Path:
    stem = file_name(device).removesuffix(".json")
    return jit_cache.base_folder() / "verified" / f"{stem}-{jit_cache.fingerprint()}.json"
