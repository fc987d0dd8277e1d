"""Every error that a user can cause names the argument, what was got and what is expected."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import cutefce

H, W, Y = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([0, 1, 2, -100])

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "h without dimensions": (
        {"h": torch.tensor(1.0)},
        ValueError,
        r"input: got shape \(\), expected",
    ),
    "w transposed": (
        {"w": W.t()},
        ValueError,
        r"linear_weight: got shape \(8, 10\), expected \(V, 8\)",
    ),
    "h of another width": ({"h": H[:, :7]}, ValueError, r"input: got shape \(4, 7\), .* 8\)"),
    "w not a matrix": (
        {"w": W[0]},
        ValueError,
        r"linear_weight: got shape \(8,\), .*sharded parameter",
    ),
    "w without rows": ({"w": W[:0]}, ValueError, r"linear_weight: got shape \(0, 8\), .*V >= 1"),
    "w emptied by sharding": (
        {"w": torch.empty(0)},
        ValueError,
        r"linear_weight: got shape \(0,\)",
    ),
    "y of another length": ({"y": Y[:3]}, ValueError, r"target: got shape \(3,\), expected \(4,\)"),
    "integer h": ({"h": H.long()}, TypeError, r"input: got dtype torch.int64, expected .*bfloat16"),
    "w of another dtype": (
        {"w": W.bfloat16()},
        TypeError,
        r"linear_weight: got dtype .*bfloat16.*autocast",
    ),
    "floating y": (
        {"y": Y.float()},
        TypeError,
        r"target: got dtype torch.float32 of .* expected integers",
    ),
    "boolean y": ({"y": Y > 0}, TypeError, r"target: got dtype torch.bool, expected integers"),
    "w on another device": (
        {"w": W.to("meta")},
        ValueError,
        r"linear_weight: got device meta, .*cpu",
    ),
    "sparse w": ({"w": W.to_sparse()}, TypeError, r"linear_weight: got layout torch.sparse_coo"),
    "unknown reduction": ({"reduction": "avg"}, ValueError, r"reduction: got 'avg', expected"),
    "unknown workspace": ({"workspace": "huge"}, ValueError, r"workspace: got 'huge', expected"),
    "negative workspace": ({"workspace": -1}, ValueError, r"workspace: got -1, expected"),
    "denominator without a mean": (
        {"denominator": torch.tensor(2.0), "reduction": "sum"},
        ValueError,
        'denominator: got one with reduction=.sum., expected "mean"',
    ),
    "denominators": ({"denominator": torch.ones(4)}, ValueError, r"denominator: got shape \(4,\)"),
    "a denominator with a gradient": (
        {"denominator": torch.tensor(2.0, requires_grad=True)},
        ValueError,
        r"denominator: got one that requires grad, expected denominator.detach\(\)",
    ),
    "shards without a group": ({"shards": [5, 5]}, ValueError, "shards: got .* without a group"),
    "sequence parallelism without a group": (
        {"sequence_parallel": True},
        ValueError,
        "sequence_parallel: got True without a group",
    ),
    "an unknown group": ({"group": "nobody"}, ValueError, "group: got 'nobody', expected"),
    "target too large": (
        {"y": Y + 8},
        IndexError,
        r"target: got 10 at token 2, expected 0 <= target < 10",
    ),
    "target negative": (
        {"y": Y - 1},
        IndexError,
        r"target: got -1 at token 0, .*ignore_index=-100",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"h": H, "w": W, "y": Y} | change
    tensors = [arguments.pop(name) for name in ("h", "w", "y")]
    with pytest.raises(error, match=message):
        torch.ops.cutefce.loss(*tensors, **arguments)


@pytest.mark.parametrize("group", ["a name", torch.distributed.GroupMember.NON_GROUP_MEMBER])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(TypeError, match=r"group: got .*, expected a ProcessGroup that this rank"):
        cutefce.linear_cross_entropy(H, W, Y, group=group)


def test_chunking_options_of_torch_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"^options: "):
        cutefce.linear_cross_entropy(H, W, Y, options=object())
    with pytest.raises(NotImplementedError, match=r"^options: "):
        cutefce.LinearCrossEntropyLoss(8, 10, options=object())


def test_sharded_tensors_are_refused(tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        w = DTensor.from_local(W, init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TypeError, match=r"got a DTensor .*full_tensor"):
            cutefce.linear_cross_entropy(H, w, Y)
    finally:
        torch.distributed.destroy_process_group()


NOT_OF_THEIR_TYPE: dict[str, tuple[dict[str, Any], str]] = {
    "no target": ({"target": None}, r"target: got None \(NoneType\), expected a tensor"),
    "an array": ({"input": H.numpy()}, "input: got a value of type ndarray, expected a tensor"),
    "a list": ({"target": [0, 1]}, r"target: got \[0, 1\] \(list\), expected a tensor"),
    "no reduction": ({"reduction": None}, r"reduction: got None \(NoneType\), expected a string"),
    "fractions of bytes": ({"workspace": 2.5}, r"workspace: got 2.5 \(float\), expected bytes as"),
    "a bool as bytes": ({"workspace": True}, r"workspace: got True \(bool\), expected bytes as"),
    "a list of bytes": ({"workspace": [1]}, r"workspace: got \[1\] \(list\), expected bytes as"),
    "bytes": ({"workspace": b"max"}, r"workspace: got b'max' \(bytes\), expected bytes as"),
    "a string": ({"ignore_index": "3"}, r"ignore_index: got '3' \(str\), expected an integer"),
    "a bool as index": (
        {"ignore_index": True},
        r"ignore_index: got True \(bool\), expected an int",
    ),
    "text": ({"denominator": "x"}, r"denominator: got 'x' \(str\), expected a number, a tensor"),
    "a number of rows": ({"shards": 10}, r"shards: got 10 \(int\), expected a sequence"),
    "an int": ({"sequence_parallel": 1}, r"sequence_parallel: got 1 \(int\), expected a bool"),
}


@pytest.mark.parametrize(("change", "message"), NOT_OF_THEIR_TYPE.values(), ids=NOT_OF_THEIR_TYPE)
def test_types_are_checked_by_name(change: dict[str, Any], message: str) -> None:
    arguments = {"input": H, "linear_weight": W, "target": Y} | change
    with pytest.raises(TypeError, match=f"^{message}"):
        cutefce.linear_cross_entropy(**arguments)
    served = inspect.signature(cutefce.plan).parameters
    if set(change) <= set(served) and "target" not in change:
        with pytest.raises(TypeError, match=f"^{message}"):
            cutefce.plan(**{name: x for name, x in arguments.items() if name in served})


def test_a_budget_may_be_the_largest_integer() -> None:
    largest, limit = (cutefce.plan(H, W, workspace=x) for x in (2**63 - 1, "max"))
    assert largest == limit
    cutefce.linear_cross_entropy(H, W, Y, workspace=2**63 - 1)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_switches_are_bools(value: Any) -> None:
    with pytest.raises(TypeError, match=f"^return_lse: got {value!r} .*, expected a bool"):
        cutefce.linear_cross_entropy(H, W, Y, return_lse=value)
    with pytest.raises(TypeError, match=f"^evaluation: got {value!r} .*, expected a bool"):
        cutefce.defer(torch.nn.Linear(8, 10), evaluation=value)


@pytest.mark.parametrize("workspace", [-1, 2**63, 2**70])
def test_budgets_out_of_range(workspace: int) -> None:
    for call in (
        lambda: cutefce.linear_cross_entropy(H, W, Y, workspace=workspace),
        lambda: cutefce.plan(H, W, workspace=workspace),
        lambda: cutefce.LinearCrossEntropyLoss(8, 10, workspace=workspace),
    ):
        with pytest.raises(ValueError, match=f"^workspace: got {workspace}, expected bytes from 0"):
            call()


def test_shards_are_integers() -> None:
    with pytest.raises(
        TypeError, match=r"^shards: got 5.0 \(float\) among them, expected integers"
    ):
        cutefce.linear_cross_entropy(H, W, Y, shards=[5.0, 5.0])  # type: ignore[list-item]


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.int64(2), np.float64(2)])
def test_denominators_of_any_number_type(number: Any) -> None:
    expected = cutefce.linear_cross_entropy(H, W, Y, denominator=torch.tensor(2.0))
    assert torch.equal(cutefce.linear_cross_entropy(H, W, Y, denominator=number), expected)


def test_complex_denominators() -> None:
    with pytest.raises(TypeError, match=r"^denominator: got \(2\+1j\) \(complex\), expected"):
        cutefce.linear_cross_entropy(H, W, Y, denominator=2 + 1j)  # type: ignore[call-overload]
    with pytest.raises(
        TypeError, match=r"^denominator: got dtype torch.complex64, expected a real"
    ):
        cutefce.linear_cross_entropy(H, W, Y, denominator=torch.tensor(2 + 1j))


@pytest.mark.parametrize("empty", [None, False, 0, 0.0, (), []])
def test_chunking_options_of_torch_may_ask_for_nothing(empty: Any) -> None:
    cutefce.LinearCrossEntropyLoss(8, 10, options=empty)
    cutefce.linear_cross_entropy(H, W, Y, options=empty)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reduction": "avg"}, ValueError, "reduction: got 'avg'"),
        ({"reduction": None}, TypeError, "reduction: got None"),
        ({"workspace": "big"}, ValueError, "workspace: got 'big'"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: got 1.5"),
        ({"label_smoothing": None}, TypeError, "label_smoothing: got None"),
        ({"label_smoothing": 2}, ValueError, "label_smoothing: got 2"),
        ({"z_loss": "0"}, TypeError, "z_loss: got '0'"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale: got 0.0"),
        ({"softcap": -1}, ValueError, "softcap: got -1"),
        ({"softcap": 1, "label_smoothing": 0.1}, NotImplementedError, "label_smoothing: .*softcap"),
        ({"weight": [1.0] * 10}, TypeError, "weight: got a value of type list"),
        ({"out_features": 3}, TypeError, r"out_features: got 3 \(int\), expected a tuple"),
    ],
)
def test_modules_check_their_options_when_made(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        cutefce.LinearCrossEntropyLoss(8, 10, **options)


def with_hook(linear: nn.Linear) -> nn.Module:
    linear.register_forward_hook(lambda *_: None)
    return linear


class Adapted(nn.Linear):
    """A layer that does more than a product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


LINEARS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooks": (lambda: with_hook(nn.Linear(8, 10, bias=False)), "hooks"),
    "another forward": (lambda: Adapted(8, 10, bias=False), "Adapted"),
    "another module": (lambda: nn.Sequential(nn.Linear(8, 10)), "Sequential"),
}


@pytest.mark.parametrize(("make", "got"), LINEARS.values(), ids=LINEARS)
def test_modules_refuse_a_head_that_they_would_not_call(
    make: Callable[[], nn.Module], got: str
) -> None:
    head = cutefce.LinearCrossEntropyLoss(8, 10)
    head.linear = make()  # type: ignore[assignment]
    with pytest.raises(
        TypeError, match=rf"^linear: got {got}, expected a torch\.nn\.Linear without"
    ):
        head(H, Y)


def test_parametrized_heads_are_served() -> None:
    head = nn.utils.parametrizations.weight_norm(
        cutefce.LinearCrossEntropyLoss(8, 10).linear, name="weight"
    )
    module = cutefce.LinearCrossEntropyLoss(8, 10)
    module.linear = head
    expected = nn.functional.cross_entropy(head(H), Y)
    torch.testing.assert_close(module(H, Y), expected)


def test_plans_check_what_calls_check() -> None:
    for options, message in (
        ({"shards": [5, 5]}, "shards: got .* without a group"),
        ({"sequence_parallel": True}, "sequence_parallel: got True without a group"),
        ({"reduction": "avg"}, "reduction: got 'avg'"),
    ):
        with pytest.raises(ValueError, match=message):
            cutefce.plan(H, W, **options)


def test_numbers_out_of_range() -> None:
    for index in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match=rf"^ignore_index: got {index}, expected an integer"):
            cutefce.linear_cross_entropy(H, W, Y, ignore_index=index)
        with pytest.raises(ValueError, match=r"^ignore_index: got"):
            cutefce.LinearCrossEntropyLoss(8, 10, ignore_index=index)
    with pytest.raises(ValueError, match=r"^denominator: got an integer beyond the range"):
        cutefce.linear_cross_entropy(H, W, Y, denominator=2**2000)


def test_layouts_are_named() -> None:
    nested = torch.nested.nested_tensor([H, H])
    for name in ("input", "linear_weight", "target"):
        arguments: dict[str, Any] = {"input": H, "linear_weight": W, "target": Y} | {name: nested}
        with pytest.raises(TypeError, match=rf"^{name}: got a nested tensor"):
            cutefce.linear_cross_entropy(**arguments)
    with pytest.raises(TypeError, match=r"^denominator: got layout torch\.sparse_coo"):
        cutefce.linear_cross_entropy(H, W, Y, denominator=torch.tensor(2.0).to_sparse())
    for name in ("linear_bias", "weight", "token_weights", "temperature"):
        size = 10 if name in ("linear_bias", "weight") else 4
        options: dict[str, Any] = {name: torch.ones(size).to_sparse()}
        with pytest.raises(TypeError, match=rf"^{name}: got layout torch\.sparse_coo"):
            cutefce.linear_cross_entropy(H, W, Y, **options)


def test_a_loss_of_no_position_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^linear_weight: got shape \(10, 0, 8\), expected a pos"):
        cutefce.linear_cross_entropy(H, W[:, None][:, :0], Y[:, None][:, :0])


@pytest.mark.parametrize("name", ["linear_bias", "temperature", "token_weights"])
def test_options_have_a_value_of_every_position(name: str) -> None:
    w, y = torch.stack([W, W], 1), torch.stack([Y, Y], 1)
    size = len(W) if name == "linear_bias" else len(Y)
    scalar = r"\(\) or " if name == "temperature" else ""
    message = rf"^{name}: got shape \(.*\), expected {scalar}\({size}, 2\)"
    for shape in ((size,), (size, 3)):
        options: dict[str, Any] = {name: torch.ones(shape)}
        with pytest.raises(ValueError, match=message):
            cutefce.linear_cross_entropy(H, w, y, **options)


def test_a_module_names_its_input() -> None:
    with pytest.raises(ValueError, match=r"^input: got shape \(4, 8\), expected \(\.\.\., 10\)"):
        cutefce.LinearCrossEntropyLoss(10, 8)(H, Y)


CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "loss": (cutefce.linear_cross_entropy, (H, W, Y)),
    "loss of K dimensions": (
        cutefce.linear_cross_entropy,
        (H, torch.stack([W, W], 1), torch.stack([Y, Y], 1)),
    ),
    "log-probabilities": (cutefce.linear_log_probs, (H, W, Y)),
}
TEN, FOUR = ("linear_bias", "weight"), ("token_weights", "temperature")
LONG = torch.ones(10).long()
WRONG_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a mask as token_weights": (
        {"token_weights": torch.ones(4, dtype=torch.bool)},
        TypeError,
        r"got dtype torch.bool, expected one of .*; pass token_weights.float\(\)$",
    ),
    "label_smoothing of None": ({"label_smoothing": None}, TypeError, "got None"),
    "label_smoothing of text": ({"label_smoothing": "x"}, TypeError, "got 'x'"),
    "label_smoothing of values": ({"label_smoothing": np.zeros(3)}, TypeError, "got array"),
    "label_smoothing below 0": ({"label_smoothing": -0.1}, ValueError, "got -0.1, .* 0 to 1"),
    "label_smoothing above 1": ({"label_smoothing": 1.1}, ValueError, "got 1.1"),
    "label_smoothing NaN": ({"label_smoothing": float("nan")}, ValueError, "got nan"),
    "z_loss of None": ({"z_loss": None}, TypeError, "got None"),
    "z_loss below 0": ({"z_loss": -1.0}, ValueError, "got -1.0, expected a finite number, 0"),
    "z_loss inf": ({"z_loss": float("inf")}, ValueError, "got inf"),
    "logit_scale of None": ({"logit_scale": None}, TypeError, "got None"),
    "logit_scale of text": ({"logit_scale": "x"}, TypeError, "got 'x'"),
    "logit_scale 0": ({"logit_scale": 0.0}, ValueError, "got 0.0, expected .* other than 0"),
    "logit_scale NaN": ({"logit_scale": float("nan")}, ValueError, "got nan"),
    "softcap of text": ({"softcap": "x"}, TypeError, "got 'x'"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "got 0.0, expected a finite number above 0"),
    "softcap inf": ({"softcap": float("inf")}, ValueError, "got inf"),
    "temperature of None": ({"temperature": None}, TypeError, "got None"),
    "temperature of values": ({"temperature": np.ones(4)}, TypeError, "got .*ndarray"),
    "temperature 0": ({"temperature": 0}, ValueError, "got 0, expected a finite number above 0"),
    "temperature below 0": ({"temperature": -1.0}, ValueError, "got -1.0"),
    "temperature inf": ({"temperature": float("inf")}, ValueError, "got inf"),
    "denominator below 0": ({"denominator": -1}, ValueError, "got -1, expected a finite number, 0"),
    "denominator NaN": ({"denominator": float("nan")}, ValueError, "got nan"),
    "ignore_index of text": ({"ignore_index": "3"}, TypeError, "got '3'"),
    "ignore_index too large": ({"ignore_index": 2**70}, ValueError, "got 1180591620717411303424"),
    "outputs of None": ({"outputs": None}, TypeError, "got None"),
    "outputs unknown": ({"outputs": ["perplexity"]}, ValueError, "got 'perplexity'"),
    "outputs of text": ({"outputs": "entropy"}, TypeError, "got 'entropy'"),
    **{f"{n} of lists": ({n: [1.0]}, TypeError, r"got \[1.0\] \(list\)") for n in TEN + FOUR},
    **{
        f"{n} of another shape": ({n: torch.ones(3)}, ValueError, r"got shape \(3,\)")
        for n in TEN + FOUR
    },
    **{
        f"{n} of integers": ({n: LONG[: 10 if n in TEN else 4]}, TypeError, "got dtype torch.int64")
        for n in TEN + FOUR
    },
    **{
        f"{n} elsewhere": ({n: torch.ones(size, device="meta")}, ValueError, "got device meta")
        for names, size in ((TEN, 10), (FOUR, 4))
        for n in names
    },
    **{
        f"{n} with a gradient": (
            {n: torch.ones(10 if n in TEN else 4, requires_grad=True)},
            ValueError,
            "got one that requires grad",
        )
        for n in ("weight", *FOUR)
    },
}


WRONG_CALLS = [
    pytest.param(*CALLS[call], *WRONG_OPTIONS[wrong], id=f"{call}, {wrong}")
    for call in CALLS
    for wrong in WRONG_OPTIONS
    if {*WRONG_OPTIONS[wrong][0]} <= {*inspect.signature(CALLS[call][0]).parameters}
]


@pytest.mark.parametrize(("function", "operands", "given", "error", "message"), WRONG_CALLS)
def test_wrong_options(
    function: Callable[..., Any],
    operands: tuple[torch.Tensor, ...],
    given: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    (name,) = given
    varies = name in FOUR or name == "linear_bias"
    if operands[1].ndim == 3 and varies and isinstance(given[name], torch.Tensor):
        given = {name: given[name][:, None].expand(-1, 2)}  # a value for every position
        message = message.replace(r"(3,\)", r"(3, 2\)")
    with pytest.raises(error, match=f"^{name}: {message}"):
        function(*operands, **given)


COMBINATIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "label_smoothing with softcap": (
        cutefce.linear_cross_entropy,
        {"label_smoothing": 0.1, "softcap": 3.0},
        "label_smoothing: got 0.1 with softcap=3.0",
    ),
    "mean_logit with softcap": (
        cutefce.linear_log_probs,
        {"outputs": ["mean_logit"], "softcap": 3.0},
        "outputs: got 'mean_logit' with softcap=3.0",
    ),
}


@pytest.mark.parametrize(("function", "given", "message"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_combinations_are_refused_by_name(
    function: Callable[..., Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"^{message}, .* together"):
        function(H, W, Y, **given)


def test_the_gradient_of_entropy_with_softcap_is_refused() -> None:
    h = H.clone().requires_grad_()
    values = cutefce.linear_log_probs(h, W, Y, outputs=["lse", "entropy"], softcap=3.0)
    assert values.entropy is not None and values.lse is not None
    with pytest.raises(NotImplementedError, match=r"^softcap: got one with 'entropy' in outputs"):
        (values.log_probs.sum() + values.entropy.sum()).backward(retain_graph=True)
    (values.log_probs.sum() + values.lse.sum()).backward()
    assert h.grad is not None and bool(h.grad.any())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": None}, TypeError, "input: got None"),
        ({"linear_weight": None}, TypeError, "linear_weight: got None"),
        ({"target": None}, TypeError, "target: got None"),
        ({"target": Y[:3]}, ValueError, r"target: got shape \(3,\)"),
        ({"target": Y + 8}, IndexError, "target: got 10 at token"),
        ({"input": H.numpy()}, TypeError, "input: got a value of type ndarray"),
        ({"workspace": "huge"}, ValueError, "workspace: got 'huge'"),
        ({"workspace": 2.5}, TypeError, "workspace: got 2.5"),
        ({"shards": 3}, TypeError, "shards: got 3"),
        ({"shards": [5, 5]}, ValueError, "shards: got .* without a group"),
        ({"sequence_parallel": 1}, TypeError, "sequence_parallel: got 1"),
        ({"group": "tp"}, TypeError, "group: got 'tp'"),
        ({"linear_weight": torch.ones(10, 2, 8)}, ValueError, r"linear_weight: got shape \(10, 2"),
    ],
)
def test_operands_of_log_probs(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"input": H, "linear_weight": W, "target": Y} | change
    with pytest.raises(error, match=f"^{message}"):
        cutefce.linear_log_probs(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": None}, "input: got None"),
        ({"target": None}, "target: got None"),
        ({"target": Y}, r"target: got shape \(4,\) with input .* expected \(N, 2\)"),
        ({"input": H[None]}, r"target: .* with input of shape \(1, 4, 8\), expected \(N, 2\)"),
    ],
)
def test_operands_of_losses_of_k_dimensions(change: dict[str, Any], message: str) -> None:
    w, y = torch.stack([W, W], 1), torch.stack([Y, Y], 1)
    arguments = {"input": H, "linear_weight": w, "target": y} | change
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        cutefce.linear_cross_entropy(**arguments)


@pytest.mark.parametrize("name", ["softcap", "z_loss", "logit_scale", "label_smoothing"])
def test_a_bool_is_no_number(name: str) -> None:
    """True would be 1."""
    given: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=f"{name}: got True"):
        cutefce.linear_cross_entropy(torch.randn(3, 8), torch.randn(9, 8), torch.arange(3), **given)


def test_a_module_shows_its_options() -> None:
    module = cutefce.LinearCrossEntropyLoss(8, 9, softcap=30.0, z_loss=0.1)
    assert "softcap=30.0" in repr(module) and "z_loss=0.1" in repr(module)
    assert "logit_scale" not in repr(module)


def test_a_float32_weight_beside_16_bits_is_planned() -> None:
    h = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    plan = cutefce.plan(h, torch.randn(40, 8, requires_grad=True))
    assert plan.grad_weight and plan.aliased == 0
