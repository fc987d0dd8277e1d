"""Axolotl: a plugin whose models defer their logits, and distill without them.

In the configuration:

    plugins:
      - cutefce.integrations.axolotl.CutefcePlugin
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import cutefce
from cutefce.integrations import axolotl_kd
from cutefce.integrations.options import checked_options, set_options
from cutefce.integrations.support import hooks

TESTED = "axolotl 0.19.0"

OTHERS = (
    "chunked_cross_entropy",
    "cut_cross_entropy",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
)
"""Keys with which Axolotl replaces the same loss."""


class CutefceArgs(BaseModel):
    """Keys of Axolotl's configuration, as the arguments of `cutefce.defer`."""

    cutefce_gradient: str = "exact"
    cutefce_samples: int = 256
    cutefce_workspace: int | str | None = None


class CutefcePlugin(BasePlugin):
    """Calls `cutefce.defer` on the model, before it gets adapters; serves `kd_trainer`."""

    def get_input_args(self) -> str:
        """Return where the keys of the configuration are."""
        return "cutefce.integrations.axolotl.CutefceArgs"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Defer the logits of `model`; with `kd_trainer`, replace the loss of Axolotl's trainer.

        Raises:
            TypeError, ValueError: if the configuration enables another fused loss, or has a key of
                `CutefceArgs` with another value.
            RuntimeError: with `kd_trainer`, if its function has other parameters.
        """
        hooks.check_version(TESTED)
        for key in OTHERS:
            if cfg.get(key):
                raise ValueError(f"{key}: got {cfg[key]!r}, expected none beside CutefcePlugin")
        keys = {key: x for key, x in cfg.items() if key.startswith("cutefce_")}
        given = CutefceArgs(**{key: x for key, x in keys.items() if x is not None})
        own = given.cutefce_gradient, given.cutefce_samples, given.cutefce_workspace
        options = checked_options(*own)
        set_options(**options)
        cutefce.defer(model, **options)
        if cfg.get("kd_trainer"):
            fused, unused = axolotl_kd.fused_linear_topk_kl, ("compiled", "chunk_size")
            hooks.replace(axolotl_kd.PATH, fused, tested=TESTED, unused=unused)
