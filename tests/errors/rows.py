"""Every wrong argument of the public functions, and what its error says: a row for each kind."""

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import GroupMember

from tests.errors.calls import Call, calls_on

OPERATORS = "operator", "operator of log_probs"
LOSSES = "loss", "loss without gradients", "module", "operator"
LOG_PROBS = "log_probs", "operator of log_probs"
K = "loss of K dimensions"
INDEXED = *LOSSES, *LOG_PROBS, K
"""The calls whose target is class indices."""
FLOORED = ("log_probs",)
SOFT_LOSS, CLASSES = "loss of soft targets", "log_probs of classes"
SOFT = SOFT_LOSS, CLASSES
"""Those with `target_indices`."""
DIVERGENCES = "divergence", "plan_divergence"
REFUSING = "loss", "loss without gradients", K, SOFT_LOSS, "plan", "defer"
"""Those that say of an unknown argument that there is none."""


@dataclass(frozen=True)
class Row:
    """A wrong value of an argument, its error, and how the message goes on after the name."""

    value: Any
    """Or a function that makes it of the valid arguments."""
    error: type[Exception]
    said: str
    also: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments that differ from those of the valid call."""
    on: Collection[str] = ()
    """The calls that raise it; by default all that take the arguments."""
    but: Collection[str] = ()
    """Calls that take them and say something else, or nothing."""

    def calls(self, argument: str, device: str = "cpu") -> dict[str, Call]:
        """Return the calls that raise it, by name."""
        calls, but = calls_on(device), {*self.but}
        if self.error is TypeError and not isinstance(self.value, Tensor):
            but |= {*OPERATORS}  # torch's dispatcher raises its own
        taking = [name for name in calls if {argument, *self.also} <= calls[name].names]
        return {name: calls[name] for name in self.on or taking if self.on or name not in but}

    def change(self, argument: str, call: Call, device: str = "cpu") -> dict[str, Any]:
        """Return the arguments that differ from those of the valid `call`, on `device`."""
        value = self.value(call.valid) if callable(self.value) else self.value
        changed = {**self.also, argument: value}
        return {
            name: x.to(device) if isinstance(x, Tensor) and x.is_cpu else x
            for name, x in changed.items()
        }


H, W, Y = torch.ones(4, 8), torch.ones(10, 8), torch.tensor([0, 1, 2, -100])
INDICES, PROBS, DENSE = torch.zeros(4, 3).long(), torch.ones(4, 3), torch.ones(4, 10)
PAIR, SUMS = torch.ones(10, 2, 8), torch.zeros(10, 8)
IN_SUMS: dict[str, Any] = {"accumulate_into": SUMS}
INF, NAN = float("inf"), float("nan")

TENSOR, OPTIONAL = "expected a tensor", "expected a tensor or None"
NUMBER, INTEGER, STRING = "expected a number", "expected an integer", "expected a string"
BYTES = 'expected bytes as an integer, "min", "max" or None'
SOME_BYTES = 'expected bytes from 0 to 2**63 - 1, "min", "max" or None'
FLOATS = "expected one of bfloat16, float16, float32, float64"
ROWS = "expected (V, D) with V >= 1 and D >= 1"
OF_ALL = "probabilities of all classes as the target, expected "
SPARSE = "got layout torch.sparse_coo, expected torch.strided"
NESTED = "got a nested tensor, expected a plain one"
TRAINED = "got one that requires grad, expected"
ELSEWHERE = "got device meta, expected that of input, "
NOT_OF_STUDENT = "got device meta, expected that of student_input, "
LARGE_INTEGER = f"got {reprlib.repr(10**400)}, expected a finite number"
OF_WEIGHT = "got the memory of linear_weight, expected its own"
BEYOND_FLOATS = "got an integer beyond the range of a float, expected a finite number"


def nested(x: Tensor) -> Tensor:
    """Return a nested tensor of x, twice."""
    return torch.nested.nested_tensor([x, x])


def trained(*size: int) -> Tensor:
    """Return a tensor that requires grad."""
    return torch.ones(size, requires_grad=True)


def eight_bits(size: int) -> Tensor:
    """Return floating-point numbers of a dtype that calls do not take."""
    return torch.ones(size).to(torch.float8_e4m3fn)


def weight(valid: dict[str, Any]) -> Any:
    """Return the weight of the call."""
    return valid["linear_weight"]


def memory(valid: dict[str, Any]) -> Tensor:
    """Return a buffer in the weight's memory."""
    w: Tensor = valid["linear_weight"]
    return w.detach()


def later_rows(valid: dict[str, Any]) -> Tensor:
    """Return a buffer that begins in the weight's second row."""
    w = memory(valid)
    return w.as_strided(w.shape, w.stride(), w.storage_offset() + w.shape[1])


def of_one_position(size: int, expected: str) -> list[Row]:
    """Return rows of tensors without a value for each of two positions."""
    also = {"linear_weight": PAIR, "target": torch.stack([Y, Y], 1)}
    return [
        Row(torch.ones(shape), ValueError, f"got shape {shape}, {expected}", also, ["loss"])
        for shape in ((size,), (size, 3))
    ]


BOOLS = [
    Row("yes", TypeError, "got 'yes' (str), expected a bool"),
    Row(1, TypeError, "got 1 (int), expected a bool"),
    Row(None, TypeError, "got None (NoneType), expected a bool"),
]

WRONG: dict[str, list[Row]] = {
    "input": [
        Row(None, TypeError, f"got None (NoneType), {TENSOR}"),
        Row(H.numpy(), TypeError, f"got {reprlib.repr(H.numpy())} (ndarray), {TENSOR}"),
        Row(H.long(), TypeError, f"got dtype torch.int64, {FLOATS}"),
        Row(H > 0, TypeError, f"got dtype torch.bool, {FLOATS}; pass input.float()"),
        Row(H.to_sparse(), TypeError, SPARSE),
        Row(nested(H), TypeError, NESTED, but=(*SOFT, "plan")),
        Row(H[:, :7], ValueError, "got shape (4, 7), expected (..., 8)"),
        Row(H[0, 0], ValueError, "got shape (), expected (..., 8)", but=(K, *SOFT)),
    ],
    "linear_weight": [
        Row(None, TypeError, f"got None (NoneType), {TENSOR}"),
        Row([1.0], TypeError, f"got [1.0] (list), {TENSOR}"),
        Row(W.long(), TypeError, "got dtype torch.int64, expected that of input, torch.float32"),
        Row(
            W.double(), TypeError, "got dtype torch.float64, expected that of input, torch.float32"
        ),
        Row(
            W.bfloat16(),
            TypeError,
            "got dtype torch.bfloat16, expected that of input, torch.float32; cast one of them, "
            "or call under torch.autocast",
        ),
        Row(W.to_sparse(), TypeError, SPARSE),
        Row(nested(W), TypeError, NESTED, but=(SOFT_LOSS,)),
        Row(W.to("meta"), ValueError, ELSEWHERE),
        Row(
            W.t(),
            ValueError,
            "got shape (8, 10), expected (V, 8) to match input of shape (4, 8); pass "
            "linear_weight.t()",
            but=(K,),
        ),
        Row(
            W[0],
            ValueError,
            "got shape (8,), expected (V, D) with V >= 1 and D >= 1; gather it first if it is a "
            "sharded parameter",
            but=(K,),
        ),
        Row(W[:0], ValueError, f"got shape (0, 8), {ROWS}"),
        Row(W[:, :0], ValueError, f"got shape (10, 0), {ROWS}"),
        Row(torch.empty(0), ValueError, "got shape (0,), expected (V, D) with V >= 1", but=(K,)),
        Row(PAIR, ValueError, "got shape (10, 2, 8), expected (V, D)", but=(*LOSSES, K, *SOFT)),
        Row(
            PAIR[:, :0],
            ValueError,
            "got shape (10, 0, 8), expected a position or more in (V, d_1, ..., d_K, D)",
            on=("loss",),
        ),
    ],
    "target": [
        Row(
            None,
            TypeError,
            "got None (NoneType), expected a tensor, or target_indices",
            on=INDEXED,
        ),
        Row([0, 1], TypeError, f"got [0, 1] (list), {TENSOR}"),
        Row(Y > 0, TypeError, "got dtype torch.bool, expected integers", on=INDEXED),
        Row(
            Y[:3],
            ValueError,
            "got shape (3,), expected (4,) to match",
            on=(*LOSSES, *LOG_PROBS, *DIVERGENCES),
        ),
        Row(
            Y[:3],
            ValueError,
            "got shape (3, 2) with input of shape (4, 8), expected (N, 2) with (N, D), to match "
            "linear_weight of shape (10, 2, 8)",
            on=(K,),
        ),
        Row(
            Y,
            ValueError,
            "got shape (4, 2) with input of shape (1, 4, 8), expected (N, 2) with (N, D)",
            also={"input": H[None]},
            on=(K,),
        ),
        Row(
            Y,
            ValueError,
            "got shape (4,) with input of shape (4, 8), expected (N, 2) with (N, D)",
            also={"linear_weight": PAIR},
            on=("loss", "loss without gradients"),
        ),
        Row(
            Y.float(),
            TypeError,
            "got dtype torch.float32 of shape (4,), expected integers (class indices) of shape "
            "(4,), or probabilities of shape (4, 10)",
            on=LOSSES,
        ),
        Row(
            DENSE,
            TypeError,
            "got dtype torch.float32, expected integers (class indices)",
            on=LOG_PROBS,
        ),
        Row(
            Y.float(),
            TypeError,
            "got dtype torch.float32, expected integers, ignore_index where a token does not "
            "count, or a mask of booleans",
            on=DIVERGENCES,
        ),
        Row(Y.to_sparse(), TypeError, SPARSE, on=(*INDEXED, *DIVERGENCES)),
        Row(nested(Y), TypeError, NESTED, on=(*INDEXED, *DIVERGENCES)),
        Row(Y.to("meta"), ValueError, ELSEWHERE, on=INDEXED),
        Row(Y.to("meta"), ValueError, NOT_OF_STUDENT, on=DIVERGENCES),
        # probabilities of all classes
        Row(
            DENSE[:, :9],
            ValueError,
            "got dtype torch.float32 of shape (4, 9), expected integers (class indices) of shape "
            "(4,), or probabilities of shape (4, 10)",
            on=LOSSES,
        ),
        Row(
            DENSE.to(torch.complex64),
            TypeError,
            "got dtype torch.complex64, expected integers",
            on=(*LOSSES, *LOG_PROBS, *DIVERGENCES),
        ),
        Row(
            trained(4, 10),
            ValueError,
            "got probabilities that require grad, expected target.detach()",
            on=LOSSES,
        ),
        Row(DENSE.to("meta"), ValueError, ELSEWHERE, on=LOSSES),
        Row(
            DENSE,
            NotImplementedError,
            "got probabilities of all classes, whose loss has no plan, expected class indices",
            on=("plan",),
        ),
        Row(
            DENSE,
            NotImplementedError,
            "got probabilities with linear_weight of shape (10, 2, 8), expected class indices "
            "with losses of K dimensions",
            also={"linear_weight": PAIR},
            on=("loss", "loss without gradients"),
        ),
        # beside others
        Row(
            Y,
            ValueError,
            "got one beside target_indices, expected None beside it",
            on=(SOFT_LOSS,),
        ),
        Row(
            DENSE,
            ValueError,
            "got one beside target_indices, expected None beside it",
            also={"target_indices": INDICES, "target_probs": PROBS},
            on=LOSSES,
        ),
        Row(
            Y,
            ValueError,
            "got one beside target_indices, expected None beside it",
            on=(CLASSES,),
        ),
    ],
    "target_indices": [
        Row(7, TypeError, f"got 7 (int), {OPTIONAL}", on=(*SOFT, "log_probs", "plan")),
        Row(INDICES.float(), TypeError, "got dtype torch.float32, expected integers", on=SOFT),
        Row(INDICES > 0, TypeError, "got dtype torch.bool, expected integers", on=SOFT),
        Row(INDICES.to_sparse(), TypeError, SPARSE, on=SOFT),
        Row(INDICES.to("meta"), ValueError, ELSEWHERE, on=SOFT),
        Row(INDICES[:3], ValueError, "got shape (3, 3), expected (4, K) to match input", on=SOFT),
        Row(
            INDICES[0, 0], ValueError, "got shape (), expected a tensor of shape (..., K)", on=SOFT
        ),
        Row(INDICES[:, :0], ValueError, "got 0 classes a token, expected 1 to 256", on=(CLASSES,)),
        Row(
            INDICES[:, :1].expand(4, 257),
            ValueError,
            "got 257 classes a token, expected 1 to 256",
            on=(CLASSES,),
        ),
        Row(
            INDICES[:, :0],
            ValueError,
            "got 0 classes a token, expected 1 to 256",
            also={"target_probs": PROBS[:, :0]},
            on=(SOFT_LOSS,),
        ),
        Row(
            INDICES[:, :1].expand(4, 257),
            ValueError,
            "got 257 classes a token, expected 1 to 256",
            also={"target_probs": PROBS[:, :1].expand(4, 257)},
            on=(SOFT_LOSS,),
        ),
        Row(
            None,
            ValueError,
            "got None, expected a tensor of shape (..., K)",
            also={"target": None, "target_probs": PROBS},
            on=LOSSES,
        ),
        Row(
            INDICES,
            NotImplementedError,
            "got soft targets with linear_weight of shape (10, 2, 8), expected target with losses "
            "of K dimensions",
            also={"target": None, "target_probs": PROBS},
            on=(K,),
        ),
    ],
    "target_probs": [
        Row([1.0], TypeError, f"got [1.0] (list), {OPTIONAL}", on=(SOFT_LOSS,)),
        Row(PROBS.int(), TypeError, f"got dtype torch.int32, {FLOATS}", on=(SOFT_LOSS,)),
        Row(PROBS.to_sparse(), TypeError, SPARSE, on=(SOFT_LOSS,)),
        Row(nested(PROBS), TypeError, NESTED, on=(SOFT_LOSS,)),
        Row(PROBS.to("meta"), ValueError, ELSEWHERE, on=(SOFT_LOSS,)),
        Row(trained(4, 3), ValueError, f"{TRAINED} target_probs.detach()", on=(SOFT_LOSS,)),
        Row(
            PROBS[:, :2],
            ValueError,
            "got shape (4, 2), expected that of target_indices, (4, 3)",
            on=(SOFT_LOSS,),
        ),
        Row(
            None,
            ValueError,
            "got None beside target_indices, expected a tensor of its shape",
            also={"target": None, "target_indices": INDICES},
            on=(*LOSSES, "plan"),
        ),
        Row(
            PROBS,
            ValueError,
            "got probabilities with log-probabilities, expected None",
            also={"target": None, "target_indices": INDICES},
            on=("operator of log_probs",),
        ),
    ],
    "linear_bias": [
        Row([1.0], TypeError, f"got [1.0] (list), {OPTIONAL}"),
        Row(torch.ones(10).long(), TypeError, f"got dtype torch.int64, {FLOATS}"),
        Row(eight_bits(10), TypeError, f"got dtype torch.float8_e4m3fn, {FLOATS}"),
        Row(torch.ones(10).to_sparse(), TypeError, SPARSE),
        Row(torch.ones(10, device="meta"), ValueError, ELSEWHERE),
        Row(torch.ones(3), ValueError, "got shape (3,), expected (10,)", but=(K,)),
        Row(torch.ones(3), ValueError, "got shape (3, 2), expected (10, 2)", on=(K,)),
        *of_one_position(10, "expected (10, 2)"),
    ],
    "weight": [
        Row([1.0], TypeError, f"got [1.0] (list), {OPTIONAL}"),
        Row(torch.ones(10).long(), TypeError, f"got dtype torch.int64, {FLOATS}"),
        Row(eight_bits(10), TypeError, f"got dtype torch.float8_e4m3fn, {FLOATS}"),
        Row(torch.ones(10).to_sparse(), TypeError, SPARSE),
        Row(torch.ones(10, device="meta"), ValueError, ELSEWHERE, but=("module",)),
        Row(torch.ones(3), ValueError, "got shape (3,), expected (10,)"),
        Row(trained(10), ValueError, f"{TRAINED} weight.detach()"),
    ],
    "token_weights": [
        Row([1.0], TypeError, f"got [1.0] (list), {OPTIONAL}"),
        Row(torch.ones(4).long(), TypeError, f"got dtype torch.int64, {FLOATS}"),
        Row(eight_bits(4), TypeError, f"got dtype torch.float8_e4m3fn, {FLOATS}"),
        Row(
            torch.ones(4) > 0,
            TypeError,
            f"got dtype torch.bool, {FLOATS}; pass token_weights.float()",
        ),
        Row(torch.ones(4).to_sparse(), TypeError, SPARSE),
        Row(torch.ones(4, device="meta"), ValueError, ELSEWHERE),
        Row(torch.ones(3), ValueError, "got shape (3,), expected (4,)", but=(K,)),
        Row(torch.ones(3), ValueError, "got shape (3, 2), expected (4, 2)", on=(K,)),
        Row(trained(4), ValueError, f"{TRAINED} token_weights.detach()"),
        *of_one_position(4, "expected (4, 2)"),
    ],
    "temperature": [
        Row(None, TypeError, f"got None (NoneType), {NUMBER} or a tensor"),
        Row("1", TypeError, f"got '1' (str), {NUMBER} or a tensor"),
        Row(np.ones(2), TypeError, f"got array([1., 1.]) (ndarray), {NUMBER} or a tensor"),
        Row(True, TypeError, f"got True (bool), {NUMBER} or a tensor"),
        Row(0.0, ValueError, "got 0.0, expected a finite number above 0", but=OPERATORS),
        Row(-1.0, ValueError, "got -1.0, expected a finite number above 0", but=OPERATORS),
        Row(INF, ValueError, "got inf, expected a finite number above 0", but=OPERATORS),
        Row(10**400, ValueError, BEYOND_FLOATS, but=OPERATORS),
        Row((1.0, 0.0), ValueError, "got 0.0, expected a finite number above 0", on=DIVERGENCES),
        Row(
            (1, 2, 3), ValueError, "got a sequence of 3, expected a number, or two", on=DIVERGENCES
        ),
        Row(torch.ones(4).long(), TypeError, f"got dtype torch.int64, {FLOATS}"),
        Row(eight_bits(4), TypeError, f"got dtype torch.float8_e4m3fn, {FLOATS}"),
        Row(torch.ones(4).to_sparse(), TypeError, SPARSE, but=(K,)),
        Row(torch.ones(4, device="meta"), ValueError, ELSEWHERE, but=DIVERGENCES),
        Row(torch.ones(4, device="meta"), ValueError, NOT_OF_STUDENT, on=DIVERGENCES),
        Row(torch.ones(3), ValueError, "got shape (3,), expected () or (4,)", but=(K,)),
        Row(torch.ones(3), ValueError, "got shape (3, 2), expected () or (4, 2)", on=(K,)),
        Row(trained(4), ValueError, f"{TRAINED} temperature.detach()"),
        Row(trained(), ValueError, f"{TRAINED} temperature.detach()"),
        *of_one_position(4, "expected () or (4, 2)"),
    ],
    "logit_floor": [
        Row(1.0, TypeError, f"got 1.0 (float), {OPTIONAL}"),
        Row(torch.ones(4).long(), TypeError, f"got dtype torch.int64, {FLOATS}", on=FLOORED),
        Row(torch.ones(4).to_sparse(), TypeError, SPARSE, on=FLOORED),
        Row(torch.ones(4, device="meta"), ValueError, ELSEWHERE, on=FLOORED),
        Row(torch.ones(3), ValueError, "got shape (3,), expected (4,)", on=FLOORED),
        Row(trained(4), ValueError, f"{TRAINED} logit_floor.detach()", on=FLOORED),
        Row(
            torch.ones(4),
            NotImplementedError,
            "got one with target_indices, expected None, or a target",
            on=(CLASSES,),
        ),
        Row(
            torch.ones(4),
            NotImplementedError,
            "got one with 'mean_logit' in outputs, expected one of them",
            also={"outputs": ["mean_logit"]},
            on=FLOORED,
        ),
        Row(
            torch.ones(4),
            ValueError,
            "got one without a target, expected None",
            also={"target": None, "outputs": ["lse"]},
            on=FLOORED,
        ),
    ],
    "top_k": [
        Row(1.0, TypeError, "got 1.0 (float), expected an integer", on=(*FLOORED, CLASSES)),
        Row(True, TypeError, "got True (bool), expected an integer", on=FLOORED),
        Row(-1, ValueError, "got -1, expected an integer from 0 to 32", on=(*FLOORED, CLASSES)),
        Row(33, ValueError, "got 33, expected an integer from 0 to 32", on=FLOORED),
        Row(32, ValueError, "got 32 with 10 classes, expected at most 10", on=FLOORED),
        Row(
            1,
            NotImplementedError,
            "got 1 with kept_classes, expected 0, or no kept_classes",
            also={"kept_classes": INDICES},
            on=FLOORED,
        ),
    ],
    "kept_classes": [
        Row(1, TypeError, f"got 1 (int), {OPTIONAL}"),
        Row(INDICES.float(), TypeError, "got dtype torch.float32, expected integers", on=FLOORED),
        Row(INDICES.to_sparse(), TypeError, SPARSE, on=FLOORED),
        Row(INDICES[0], ValueError, "got shape (3,), expected (4, K), K from 1 to 255", on=FLOORED),
        Row(INDICES[:, :0], ValueError, "got shape (4, 0), expected (4, K)", on=FLOORED),
        Row(
            torch.zeros(4, 256).long(),
            ValueError,
            "got shape (4, 256), expected (4, K), K from 1 to 255",
            on=FLOORED,
        ),
        Row(
            torch.zeros(4, 3, device="meta").long(),
            ValueError,
            "got device meta, expected that of target, ",
            on=FLOORED,
        ),
        Row(
            INDICES,
            NotImplementedError,
            "got some with target_indices, expected one of them",
            on=(CLASSES,),
        ),
        Row(
            INDICES,
            NotImplementedError,
            "got some with logit_floor, expected one of them",
            also={"logit_floor": torch.ones(4)},
            on=FLOORED,
        ),
        Row(
            INDICES,
            NotImplementedError,
            "got some with 'mean_logit' in outputs, expected one of them",
            also={"outputs": ["mean_logit"]},
            on=FLOORED,
        ),
        Row(
            INDICES,
            ValueError,
            "got some without a target, expected None",
            also={"target": None, "outputs": ["lse"]},
            on=FLOORED,
        ),
    ],
    "denominator": [
        Row("x", TypeError, f"got 'x' (str), {NUMBER}, a tensor or None"),
        Row(True, TypeError, f"got True (bool), {NUMBER}, a tensor or None"),
        Row(2 + 1j, TypeError, f"got (2+1j) (complex), {NUMBER}, a tensor or None"),
        Row(-1, ValueError, "got -1, expected a finite number, 0 or more", but=OPERATORS),
        Row(NAN, ValueError, "got nan, expected a finite number, 0 or more", but=OPERATORS),
        Row(2**2000, ValueError, BEYOND_FLOATS, but=OPERATORS),
        Row(torch.tensor(2 + 1j), TypeError, "got dtype torch.complex64, expected a real one"),
        Row(torch.tensor(2.0).to_sparse(), TypeError, SPARSE),
        Row(torch.ones(4), ValueError, "got shape (4,), expected () or (1,)"),
        Row(torch.ones((), device="meta"), ValueError, ELSEWHERE, but=DIVERGENCES),
        Row(torch.ones((), device="meta"), ValueError, NOT_OF_STUDENT, on=("divergence",)),
        Row(trained(), ValueError, f"{TRAINED} denominator.detach()"),
        Row(
            torch.tensor(2.0),
            ValueError,
            """got one with reduction='sum', expected "mean\"""",
            also={"reduction": "sum"},
        ),
    ],
    "accumulate_into": [
        Row(
            SUMS,
            NotImplementedError,
            f"got one with {OF_ALL}",
            also={"target": DENSE},
            on=LOSSES,
        ),
        Row(3, TypeError, f"got 3 (int), {OPTIONAL}"),
        Row(SUMS.half(), TypeError, "got dtype torch.float16, expected torch.float32"),
        Row(SUMS.to_sparse(), TypeError, SPARSE),
        Row(nested(SUMS), TypeError, NESTED),
        Row(SUMS.to("meta"), ValueError, ELSEWHERE),
        Row(SUMS[:5], ValueError, "got shape (5, 8), expected (10, 8)"),
        Row(
            torch.zeros(8, 10).t(),
            ValueError,
            "got strides (1, 10), expected a contiguous tensor",
        ),
        Row(trained(10, 8), ValueError, f"{TRAINED} accumulate_into.detach()"),
        Row(weight, ValueError, OF_WEIGHT, but=("module",)),
        Row(memory, ValueError, OF_WEIGHT, but=("module",)),
        Row(later_rows, ValueError, OF_WEIGHT, but=("module",)),
        Row(
            SUMS,
            ValueError,
            "got a buffer for a linear_weight that does not require grad, expected None",
            also={"linear_weight": W},
            but=("loss without gradients",),
        ),
        Row(
            SUMS,
            NotImplementedError,
            "got a buffer with linear_weight of shape (10, 2, 8), expected None with losses of K "
            "dimensions",
            on=(K,),
        ),
    ],
    "grad_output": [
        Row("1", TypeError, f"got '1' (str), {NUMBER}, a tensor or None", IN_SUMS),
        Row(NAN, ValueError, "got nan, expected a finite number", IN_SUMS, but=OPERATORS),
        Row(
            10**400,
            ValueError,
            BEYOND_FLOATS,
            IN_SUMS,
            but=OPERATORS,
        ),
        Row(torch.tensor(True), TypeError, "got dtype torch.bool, expected a real one", IN_SUMS),
        Row(torch.ones(2), ValueError, "got shape (2,), expected () or (1,)", IN_SUMS),
        Row(torch.ones((), device="meta"), ValueError, ELSEWHERE, IN_SUMS),
        Row(trained(), ValueError, f"{TRAINED} grad_output.detach()", IN_SUMS),
        Row(torch.ones(()), ValueError, "got one without accumulate_into, expected None"),
        Row(
            torch.ones(()),
            ValueError,
            """got one with reduction='none', expected "mean" or "sum\"""",
            IN_SUMS | {"reduction": "none"},
        ),
        Row(
            torch.ones(()),
            ValueError,
            """got one with reduction='outputs', expected "mean" or "sum\"""",
            IN_SUMS,
            on=("operator of log_probs",),
        ),
    ],
    "z_los": [
        Row(0.1, TypeError, "got 0.1 (float), expected no such argument", on=REFUSING),
    ],
    "reduction": [
        Row(None, TypeError, f"got None (NoneType), {STRING}"),
        Row("avg", ValueError, "got 'avg', expected one of ('mean', 'sum', 'none')"),
        Row("batchmean", ValueError, "got 'batchmean', expected one of ('mean', 'sum', 'none')"),
    ],
    "ignore_index": [
        Row(
            -1,
            ValueError,
            "got -1 without a target, expected None: all tokens count",
            also={"target": None, "outputs": ["lse"]},
            on=("log_probs",),
        ),
        Row("3", TypeError, f"got '3' (str), {INTEGER}"),
        Row(True, TypeError, f"got True (bool), {INTEGER}"),
        Row(1.5, TypeError, f"got 1.5 (float), {INTEGER}"),
        Row(2**63, ValueError, f"got {2**63}, {INTEGER} of 64 bits", but=OPERATORS),
        Row(-(2**63) - 1, ValueError, f"got {-(2**63) - 1}, {INTEGER} of 64 bits", but=OPERATORS),
        Row(
            3,
            ValueError,
            "got 3 with target_indices, expected None: a token whose probabilities are all 0",
            on=(SOFT_LOSS,),
        ),
        Row(
            3,
            ValueError,
            "got 3 with probabilities, which have none, expected None; a token whose "
            "token_weights are 0 is ignored",
            also={"target": DENSE},
            on=LOSSES,
        ),
    ],
    "label_smoothing": [
        Row(None, TypeError, f"got None (NoneType), {NUMBER}"),
        Row("x", TypeError, f"got 'x' (str), {NUMBER}"),
        Row(np.zeros(3), TypeError, f"got array([0., 0., 0.]) (ndarray), {NUMBER}"),
        Row(True, TypeError, f"got True (bool), {NUMBER}"),
        Row(-0.1, ValueError, f"got -0.1, {NUMBER} from 0 to 1"),
        Row(1.1, ValueError, f"got 1.1, {NUMBER} from 0 to 1"),
        Row(NAN, ValueError, f"got nan, {NUMBER} from 0 to 1"),
        Row(
            0.1,
            NotImplementedError,
            "got 0.1 with softcap=3.0, which cutefce does not serve together; expected one of them",
            also={"softcap": 3.0},
        ),
    ],
    "z_loss": [
        Row(None, TypeError, f"got None (NoneType), {NUMBER}"),
        Row("0", TypeError, f"got '0' (str), {NUMBER}"),
        Row(True, TypeError, f"got True (bool), {NUMBER}"),
        Row(-1.0, ValueError, "got -1.0, expected a finite number, 0 or more"),
        Row(INF, ValueError, "got inf, expected a finite number, 0 or more"),
        Row(10**400, ValueError, f"{LARGE_INTEGER}, 0 or more", but=OPERATORS),
    ],
    "logit_scale": [
        Row(None, TypeError, f"got None (NoneType), {NUMBER}"),
        Row("x", TypeError, f"got 'x' (str), {NUMBER}"),
        Row(True, TypeError, f"got True (bool), {NUMBER}"),
        Row(0.0, ValueError, "got 0.0, expected a finite number other than 0"),
        Row(NAN, ValueError, "got nan, expected a finite number other than 0"),
        Row(10**400, ValueError, f"{LARGE_INTEGER} other than 0", but=OPERATORS),
        Row(
            (1, 2, 3),
            ValueError,
            "got a sequence of 3, expected a number, or two",
            on=("divergence",),
        ),
        Row((1.0, 0.0), ValueError, "got 0.0, expected a finite number other", on=("divergence",)),
    ],
    "softcap": [
        Row("x", TypeError, f"got 'x' (str), {NUMBER} or None"),
        Row(True, TypeError, f"got True (bool), {NUMBER} or None"),
        Row(0.0, ValueError, "got 0.0, expected a finite number above 0, or None"),
        Row(-1.0, ValueError, "got -1.0, expected a finite number above 0, or None"),
        Row(INF, ValueError, "got inf, expected a finite number above 0, or None"),
        Row(10**400, ValueError, f"{LARGE_INTEGER} above 0, or None", but=OPERATORS),
        Row(
            (None, -1.0), ValueError, "got -1.0, expected a finite number above", on=("divergence",)
        ),
    ],
    "gradient": [
        Row(
            "sampled",
            NotImplementedError,
            f"got 'sampled' with {OF_ALL}",
            also={"target": DENSE},
            on=LOSSES,
        ),
        Row(3, TypeError, f"got 3 (int), {STRING}"),
        Row("some", ValueError, "got 'some', expected one of ('exact', 'sampled')"),
    ],
    "samples": [
        Row(20.0, TypeError, f"got 20.0 (float), {INTEGER}"),
        Row("many", TypeError, f"got 'many' (str), {INTEGER}"),
        Row(True, TypeError, f"got True (bool), {INTEGER}"),
        Row(15, ValueError, f"got 15, {INTEGER} from 16 to 4096"),
        Row(4097, ValueError, f"got 4097, {INTEGER} from 16 to 4096"),
    ],
    "workspace": [
        Row(2.5, TypeError, f"got 2.5 (float), {BYTES}"),
        Row(True, TypeError, f"got True (bool), {BYTES}"),
        Row([1], TypeError, f"got [1] (list), {BYTES}"),
        Row({}, TypeError, f"got {{}} (dict), {BYTES}"),
        Row(b"max", TypeError, f"got b'max' (bytes), {BYTES}"),
        Row("huge", ValueError, f"got 'huge', {SOME_BYTES}"),
        Row("m" * 41, ValueError, f"got {reprlib.repr('m' * 41)}, {SOME_BYTES}"),
        Row(-1, ValueError, f"got -1, {SOME_BYTES}"),
        *(
            Row(size, ValueError, f"got {said}, {SOME_BYTES}", but=OPERATORS)
            for size, said in {
                2**63: "9223372036854775808",
                2**70: "1180591620717411303424",
                10**400: reprlib.repr(10**400),
            }.items()
        ),
    ],
    "return_lse": BOOLS,
    "return_overlap": BOOLS,
    "options": [
        Row(
            {"chunk": 4},
            NotImplementedError,
            "got {'chunk': 4} (dict), expected None: `workspace` bounds the memory",
        ),
    ],
    "outputs": [
        Row(None, TypeError, "got None (NoneType), expected a sequence of strings"),
        Row("entropy", TypeError, "got 'entropy' (str), expected a sequence of strings"),
        Row(
            ["perplexity"],
            ValueError,
            "got 'perplexity', expected some of ('lse', 'entropy', ",
            but=OPERATORS,
        ),
        Row(
            ["is_top1"],
            NotImplementedError,
            "got 'is_top1' with target_indices, which is about one target; expected 'argmax'",
            on=(CLASSES,),
        ),
        Row(
            ["rank"],
            NotImplementedError,
            "got 'rank' with target_indices, which is about one target; expected 'argmax'",
            on=(CLASSES,),
        ),
        Row(
            ["mean_logit"],
            NotImplementedError,
            "got 'mean_logit' with softcap=3.0, which cutefce does not serve together; expected "
            "one of them",
            also={"softcap": 3.0},
            but=OPERATORS,
        ),
        Row(
            ["lse", "rank"],
            ValueError,
            "got 'rank' without a target, expected some of ('lse', 'entropy', 'sum_p_squared', "
            "'mean_logit', 'argmax')",
            also={"target": None},
            on=("log_probs",),
        ),
        Row(
            ["argmax"],
            ValueError,
            f"got 'argmax' with {2**24 + 1} classes, expected at most 2^24",
            also={"linear_weight": torch.empty(2**24 + 1, 8, device="meta")},
            but=OPERATORS,
        ),
    ],
    "group": [
        Row(
            "a name", TypeError, "got 'a name' (str), expected a ProcessGroup that this rank is in"
        ),
        Row(
            GroupMember.NON_GROUP_MEMBER,
            TypeError,
            "got -100 (int), expected a ProcessGroup that this rank is in",
        ),
        Row(
            "nobody",
            ValueError,
            "got 'nobody', expected the name of a process group that this rank is in",
            on=OPERATORS,
        ),
    ],
    "shards": [
        Row(
            [5, 5],
            NotImplementedError,
            f"got [5, 5] with {OF_ALL}",
            also={"target": DENSE},
            on=("loss", "loss without gradients", "operator"),
        ),
        Row(3, TypeError, "got 3 (int), expected a sequence of integers or None"),
        Row(
            [5.0, 5.0],
            TypeError,
            "got 5.0 (float) among them, expected integers",
            but=DIVERGENCES,
        ),
        Row([5, 5], ValueError, "got [5, 5] without a group, expected a group"),
    ],
    "sequence_parallel": [
        Row(
            True,
            NotImplementedError,
            f"got True with {OF_ALL}",
            also={"target": DENSE},
            on=("loss", "loss without gradients", "operator"),
        ),
        Row(1, TypeError, "got 1 (int), expected a bool"),
        Row(True, ValueError, "got True without a group, expected a group"),
    ],
    # those of the module
    "in_features": [
        Row(2.5, TypeError, f"got 2.5 (float), {INTEGER}"),
        Row(0, ValueError, "got 0, expected 1 or more"),
    ],
    "num_classes": [
        Row(2.5, TypeError, f"got 2.5 (float), {INTEGER}"),
        Row(True, TypeError, f"got True (bool), {INTEGER}"),
        Row(-3, ValueError, "got -3, expected 1 or more"),
    ],
    "out_features": [
        Row(3, TypeError, "got 3 (int), expected a tuple of integers"),
        Row((3, "4"), TypeError, "got '4' (str) among them, expected integers"),
        Row((3, 0), ValueError, "got (3, 0), expected sizes of 1 or more"),
    ],
    "bias": [
        Row(
            torch.ones(10),
            TypeError,
            f"got {reprlib.repr(torch.ones(10))} (Tensor), expected a bool",
        ),
        *BOOLS,
    ],
    # those of other functions
    "enabled": BOOLS,
    "evaluation": BOOLS,
    "divergence": [
        Row(None, TypeError, f"got None (NoneType), {STRING}"),
        Row(
            "kl", ValueError, "got 'kl', expected one of ('forward_kl', 'reverse_kl', 'jsd', 'tv')"
        ),
    ],
    "beta": [
        Row("0.5", TypeError, f"got '0.5' (str), {NUMBER} or None", also={"divergence": "jsd"}),
        Row(1.5, ValueError, f"got 1.5, {NUMBER} from 0 to 1"),
        Row(NAN, ValueError, f"got nan, {NUMBER} from 0 to 1"),
        Row(
            0.5,
            ValueError,
            "got 0.5 with divergence='forward_kl', expected None, or divergence='jsd'",
        ),
        Row(
            0,
            ValueError,
            "got 0 with divergence='reverse_kl', expected None, or divergence='jsd'",
            also={"divergence": "reverse_kl"},
        ),
        Row(
            0.5,
            ValueError,
            "got 0.5 with divergence='tv', expected None, or divergence='jsd'",
            also={"divergence": "tv"},
        ),
    ],
    "student_input": [
        Row([1.0], TypeError, f"got [1.0] (list), {TENSOR}"),
        Row(H.long(), TypeError, f"got dtype torch.int64, {FLOATS}"),
        Row(H.to_sparse(), TypeError, SPARSE),
        Row(
            H[:, :7],
            ValueError,
            "got shape (4, 7), expected (..., 8) to match student_weight of shape (10, 8)",
        ),
    ],
    "student_weight": [
        Row(None, TypeError, f"got None (NoneType), {TENSOR}"),
        Row(W.to_sparse(), TypeError, SPARSE),
        Row(W[:0], ValueError, f"got shape (0, 8), {ROWS}"),
        Row(W.to("meta"), ValueError, NOT_OF_STUDENT),
    ],
    "teacher_input": [
        Row(None, TypeError, f"got None (NoneType), {TENSOR}"),
        Row(
            H,
            ValueError,
            "got shape (4, 8), expected (..., 6) to match teacher_weight of shape (10, 6)",
        ),
        Row(
            H[:3, :6],
            ValueError,
            "got shape (3, 6), expected (4, 6) to match student_input of shape (4, 8)",
        ),
        Row(
            H[:, :6].double(),
            TypeError,
            "got dtype torch.float64 beside a student_input of torch.float32, expected both or "
            "none to be float64",
            also={"teacher_weight": W[:, :6].double()},
        ),
        Row(
            H[:, :6].to("meta"),
            ValueError,
            NOT_OF_STUDENT,
            also={"teacher_weight": W[:, :6].to("meta")},
        ),
    ],
    "teacher_weight": [
        Row(None, TypeError, f"got None (NoneType), {TENSOR}"),
        Row(
            W[:, :6].bfloat16(),
            TypeError,
            "got dtype torch.bfloat16, expected that of teacher_input, torch.float32; cast one of "
            "them, or call under torch.autocast",
        ),
        Row(W[0], ValueError, f"got shape (8,), {ROWS}"),
        Row(W[:9, :6], ValueError, "got 9 rows, expected 10, the classes of student_weight"),
        Row(W[:, :6].to("meta"), ValueError, NOT_OF_STUDENT),
    ],
    "student_bias": [
        Row([1.0], TypeError, f"got [1.0] (list), {OPTIONAL}"),
        Row(torch.ones(10).long(), TypeError, f"got dtype torch.int64, {FLOATS}"),
        Row(torch.ones(10, device="meta"), ValueError, NOT_OF_STUDENT),
    ],
    "teacher_bias": [
        Row(
            eight_bits(10),
            TypeError,
            f"got dtype torch.float8_e4m3fn, {FLOATS}",
        ),
        Row(torch.ones(10).to_sparse(), TypeError, SPARSE),
        Row(torch.ones(9), ValueError, "got shape (9,), expected (10,)"),
    ],
}
"""The rows of each argument, which begin the message."""

WRONG_VALUES: dict[str, list[Row]] = {
    "target": [
        Row(Y + 8, IndexError, "got 10 at token 2, expected 0 <= target < 10", on=INDEXED),
        Row(
            Y + 8,
            IndexError,
            "got 10, expected 0 <= target < 10",
            also={"kept_classes": INDICES},
            on=FLOORED,
        ),
        Row(
            Y - 1,
            IndexError,
            "got -1 at token 0, expected 0 <= target < 10 or ignore_index=-100",
            on=INDEXED,
        ),
    ],
    "kept_classes": [
        Row(
            INDICES + 10,
            IndexError,
            "got 10, expected -1 or 0 <= class < 10",
            on=FLOORED,
        ),
    ],
    "target_indices": [
        Row(
            INDICES + 10,
            IndexError,
            "got 10 at token 0, k = 0 with probability 1.0, expected 0 <= index < 10",
            also={"target_probs": PROBS},
            on=(SOFT_LOSS,),
        ),
        Row(
            INDICES - 100,
            IndexError,
            "got -100 at token 0, k = 0 with probability 1.0, expected 0 <= index < 10",
            also={"target_probs": PROBS},
            on=(SOFT_LOSS,),
        ),
        Row(
            INDICES + 10,
            IndexError,
            "got 10 at token 0, k = 0, expected 0 <= index < 10 or ignore_index=-100",
            on=(CLASSES,),
        ),
        Row(
            INDICES[:, :1] - 1,
            IndexError,
            "got -1 at token 0, k = 0, expected 0 <= index < 10 or ignore_index=-100",
            on=(CLASSES,),
        ),
    ],
    "target_probs": [
        Row(
            -PROBS,
            ValueError,
            "got -1.0 at token 0, k = 0, expected numbers from 0 to ",
            on=(SOFT_LOSS,),
        ),
        Row(
            PROBS * NAN,
            ValueError,
            "got nan at token 0, k = 0, expected numbers from 0 to ",
            on=(SOFT_LOSS,),
        ),
        Row(
            PROBS * INF,
            ValueError,
            "got inf at token 0, k = 0, expected numbers from 0 to ",
            on=(SOFT_LOSS,),
        ),
        Row(
            PROBS.double() * 1e300,
            ValueError,
            "got 1e+300 at token 0, k = 0, expected numbers from 0 to ",
            on=(SOFT_LOSS,),
        ),
        Row(
            PROBS.index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(-2.0)),
            ValueError,
            "got -2.0 at token 3, k = 2, expected numbers from 0 to ",
            also={"token_weights": torch.tensor([0.0, 0, 1, 1])},
            on=(SOFT_LOSS,),
        ),
    ],
}
"""Those whose values are looked at on a CPU alone, as a GPU is not synchronized."""
