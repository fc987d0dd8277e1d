"""defer: every causal LM of transformers that can be built tiny has the same loss and gradients."""

import pytest

pytest.importorskip("transformers")

from bench.experiments import causal_lms
from bench.harness import records
from tests.support.tiers import rest_slow

LIMIT = 1e-5
LEFT_OUT = {"kimi_linear"}
"""Takes as long as all others together; its row is in the recorded results."""
KINDS = {
    "llama": "a plain head",
    "gpt2": "tied to the embedding",
    "phi": "a bias",
    "bart": "an added bias",
    "cohere": "a scale",
    "gemma2": "a softcap",
    "inkling_text": "the first classes",
    "mixtral": "a head after experts",
    "prophetnet": "a loss of its own",
}
"""One type of each kind of logits and loss, which are not slow."""
FALLS_BACK = {"prophetnet": "log_softmax"}
"""Types whose own loss is not a cross entropy of logits."""
REFUSED = {"dory"}
"""Types whose head is more than a linear layer."""
RECORDED = {
    row["model_type"]: row for row in records.read(records.RESULTS / "cpu/causal_lms.jsonl")[1]
}
TYPES = sorted(set(causal_lms.model_types()) - LEFT_OUT, key=lambda name: (name not in KINDS, name))


@pytest.mark.parametrize("model_type", rest_slow(TYPES, default=len(KINDS)))
def test_loss_and_gradients_are_those_of_the_model(model_type: str) -> None:
    (row,) = causal_lms.run(model_type)
    recorded = RECORDED[model_type]
    assert (row.outcome, row.reason) == (recorded["outcome"], recorded["reason"])
    if row.outcome in ("fused", "fell back"):
        assert row.reason == FALLS_BACK.get(model_type, "")
        assert row.loss_error is not None and row.loss_error <= LIMIT
        assert row.gradient_error is not None and row.gradient_error <= LIMIT


def test_recorded_results_are_of_all_types() -> None:
    assert sorted(RECORDED) == causal_lms.model_types()
    run = [row for row in RECORDED.values() if row["outcome"] in ("fused", "fell back")]
    assert sum(row["outcome"] == "fused" for row in run) >= 183 and len(run) >= 184
    assert {name for name, row in RECORDED.items() if row["outcome"] == "refused"} == REFUSED
    assert all(row["loss_error"] <= LIMIT and row["gradient_error"] <= LIMIT for row in run)
