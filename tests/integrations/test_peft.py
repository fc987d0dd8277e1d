"""defer: adapters of PEFT, of the head and of other layers."""

import copy
from typing import Any

import pytest

pytest.importorskip("peft")

import peft
import torch

import cutefce
from bench.harness.tiny_models import batch, build, tiny_config
from tests.support.deferral import assert_same, own_step

ADAPTERS: dict[str, tuple[dict[str, Any], int]] = {
    "layers": ({"target_modules": ["q_proj", "v_proj"]}, 1),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, 0),
    "DoRA on the head": ({"target_modules": ["lm_head"], "use_dora": True}, 0),
    "copy of the head": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, 1),
}
"""Settings of LoRA, and how many losses are fused."""
# here peft makes a head with in_features and out_features swapped
ADAPTERS |= {
    f"tied copies of {' and '.join(saved)}": (
        {"target_modules": ["q_proj"], "modules_to_save": saved, "ensure_weight_tying": True},
        1,
    )
    for saved in (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"])
}


@pytest.mark.parametrize("deferred_first", [True, False])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, deferred_first: bool) -> None:
    settings, fused = ADAPTERS[name]
    fields = {"tie_word_embeddings": "ensure_weight_tying" in settings}

    def adapted(defer: bool) -> Any:
        model = build(tiny_config("llama", **fields))
        if defer and deferred_first:
            cutefce.defer(model)
        torch.manual_seed(0)
        own = copy.deepcopy(settings)  # peft adds to its lists
        config = peft.LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, **own)
        wrapped = peft.get_peft_model(model, config)
        if defer and not deferred_first:
            cutefce.defer(wrapped)
        return wrapped.train()

    loss, theirs = own_step(adapted(defer=False))
    model = adapted(defer=True)
    ours, mine = own_step(model)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)
    assert_same(mine, theirs)
    report = cutefce.deferral_report(model)
    assert report.fused == fused and bool(report.fallbacks) == (not fused)
    merged = model.merge_and_unload()(**batch()).loss
    expected = adapted(defer=False).merge_and_unload()(**batch()).loss
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)
