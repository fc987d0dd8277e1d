"""The public names, their arguments and the operator's schema: what users depend on."""

import dataclasses
import inspect

import pytest
import torch

import cutefce
from cutefce.ops.interface.arguments import OPTIONS

SCHEMA = (
    "cutefce::loss{name}(Tensor input, Tensor linear_weight, Tensor? target=None, *, "
    "str reduction='mean', int ignore_index=-100, float label_smoothing=0., float z_loss=0., "
    "float logit_scale=1., float? softcap=None, str gradient='exact', int samples=256, "
    "{workspace}, Tensor? linear_bias=None, Tensor? weight=None, Tensor? token_weights=None, "
    "Tensor? temperature=None, Tensor? denominator=None, "
    "Tensor? accumulate_into=None, Tensor? grad_output=None, Tensor? target_indices=None, "
    "Tensor? target_probs=None, str? group=None, int[]? shards=None, "
    "bool sequence_parallel=False) -> Tensor"
)
SIGNATURES = {
    "defer": "(model: torch.nn.modules.module.Module, *, evaluation: bool = False, "
    "gradient: str = 'exact', samples: int = 256, workspace: int | str | None = None, "
    "**removed: Any) -> None",
    "undefer": "(model: torch.nn.modules.module.Module) -> None",
    "deferral_report": "model",
    "DeferralReport": "fused fallbacks",
    "DivergenceOutput": "loss overlap",
    "backend_for": "input linear_weight",
    "set_strict": "(enabled: bool) -> None",
    "linear_cross_entropy": "input linear_weight target target_indices target_probs linear_bias "
    "weight reduction ignore_index "
    "label_smoothing options token_weights z_loss logit_scale softcap temperature return_lse "
    "gradient samples workspace denominator accumulate_into grad_output group shards "
    "sequence_parallel",
    "linear_divergence": "student_input student_weight teacher_input teacher_weight target "
    "divergence beta student_bias teacher_bias logit_scale softcap temperature reduction "
    "ignore_index denominator return_overlap workspace group shards",
    "linear_log_probs": "input linear_weight target target_indices outputs top_k linear_bias "
    "logit_scale softcap temperature logit_floor kept_classes ignore_index gradient samples "
    "workspace accumulate_into group shards sequence_parallel",
    "LossOutput": "loss lse",
    "LogProbs": "log_probs lse entropy sum_p_squared mean_logit is_top1 argmax rank "
    "top_log_probs top_classes",
    "plan": "input linear_weight target reduction label_smoothing gradient samples workspace "
    "accumulate_into grad_output target_indices target_probs group shards sequence_parallel "
    "others",
    "plan_divergence": "student_input student_weight teacher_input teacher_weight target "
    "divergence beta student_bias teacher_bias temperature reduction ignore_index workspace group "
    "shards",
    "LinearCrossEntropyLoss": "in_features num_classes out_features bias device dtype reduction "
    "weight ignore_index label_smoothing options z_loss logit_scale softcap gradient samples "
    "workspace others",
}
"""Whole signatures, or the names of the arguments."""
FUNCTIONS = [getattr(cutefce, name) for name in SIGNATURES if name[0].islower() or name[0] == "L"]


def test_strict_calls_raise_where_no_kernels_serve() -> None:
    given = torch.ones(4, 8), torch.ones(10, 8), torch.arange(4)
    cutefce.set_strict(True)
    try:
        with pytest.raises(RuntimeError, match="serve this call: input: got device cpu"):
            cutefce.linear_cross_entropy(*given)
    finally:
        cutefce.set_strict(False)
    assert cutefce.linear_cross_entropy(*given) > 0


def test_all_names() -> None:
    assert sorted(cutefce.__all__) == sorted(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments(name: str) -> None:
    signature = inspect.signature(getattr(cutefce, name))
    assert SIGNATURES[name] in (str(signature), " ".join(signature.parameters))


@pytest.mark.parametrize(
    ("overload", "name", "workspace"),
    [("default", "", "int? workspace=None"), ("preset", ".preset", "str workspace")],
)
def test_schema_of_the_operator(overload: str, name: str, workspace: str) -> None:
    schema = getattr(torch.ops.cutefce.loss, overload)._schema
    assert str(schema).replace('"', "'") == SCHEMA.format(name=name, workspace=workspace)


def test_signatures_have_the_defaults_of_the_table() -> None:
    """But for what users may leave out: a number for None of a tensor, None for an index."""
    loss = inspect.signature(cutefce.linear_cross_entropy).parameters
    for record in OPTIONS:
        defaults = {field.name: field.default for field in dataclasses.fields(record)}
        assert set(record.names(of="loss")) <= set(loss)
        for function in (*FUNCTIONS, cutefce.LinearCrossEntropyLoss.forward):
            given = inspect.signature(function).parameters
            for name in record.names(of="loss"):
                expected = {"temperature": 1.0, "ignore_index": None}.get(name, defaults[name])
                assert name not in given or given[name].default == expected, (function, name)
