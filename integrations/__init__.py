"""The fused loss in training frameworks; each file is one framework, imported only on request.

deferral/      a head that defers its logits, for any model and trainer: `cutefce.defer`
support/       what the integrations share
automodel.py   NeMo Automodel: a loss for `_target_`
axolotl.py     Axolotl: a plugin
axolotl_kd.py  the loss of its `kd` plugin, from a stored top k
liger.py       Liger: what transformers, LLaMA-Factory and ms-swift call, and its JSD
megatron.py    Megatron-Core: the loss of a model
nemo_rl.py     NeMo-RL: log-probabilities of Megatron policies, distillation of DTensor policies
openrlhf.py    OpenRLHF: log-probabilities and entropies of actors
options.py     gradients and budgets: one setting for all of them
prime_rl.py    prime-rl: its fused heads
report.py      which calls of them were fused
skyrl.py       SkyRL: log-probabilities and entropies of Megatron policies
slime.py       slime: log-probabilities and entropies of Megatron policies
torchtitan.py  torchtitan: an override of the chunked loss
trl.py         TRL: SFT, DPO, KTO, GRPO, RLOO, distillation, GKD
unsloth.py     Unsloth: SFT, preference and RL trainers, GKD
verl.py        verl: fused log-probabilities and entropies
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import the file `name` of this folder, when it is used first."""
    path = f"{__name__}.{name}"
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # a framework that is not installed
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
