"""Axolotl: a plugin whose models defer their logits.

In the configuration:

    plugins:
      - cutefce.integrations.axolotl.CutefcePlugin
"""

from typing import Any

from axolotl.integrations.base import BasePlugin

import cutefce
from cutefce.integrations import hooks

TESTED = "axolotl 0.19.0"

OTHERS = (
    "chunked_cross_entropy",
    "cut_cross_entropy",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
)
"""Keys with which Axolotl replaces the same loss."""


class CutefcePlugin(BasePlugin):
    """Calls `cutefce.defer` on the model, before it gets adapters."""

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Defer the logits of `model`.

        Raises:
            ValueError: if the configuration enables another fused loss.
        """
        hooks.check_version(TESTED)
        for key in OTHERS:
            if cfg.get(key):
                raise ValueError(f"{key}: got {cfg[key]!r}, expected none beside CutefcePlugin")
        cutefce.defer(model)
