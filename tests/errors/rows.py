"""Every wrong argument of the public functions, and what its error says: a row for each kind."""

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import GroupMember

from cutefce.ops.interface.arguments import OUTPUTS
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
REFUSING = "loss", "loss without gradients", K, SOFT_LOSS, "plan", "module"
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
BOOL, INTEGERS = "expected a bool", "expected integers"
REAL = f"{NUMBER}, a tensor or None"
BYTES = 'expected bytes as an integer, "min", "max" or None'
SOME_BYTES = 'expected bytes from 0 to 2**63 - 1, "min", "max" or None'
POSITIVE = "expected a finite number above 0"
FLOATS = "expected one of bfloat16, float16, float32, float64"
ROWS = "expected (V, D) with V >= 1 and D >= 1"
SPARSE = "got layout torch.sparse_coo, expected torch.strided"
NESTED = "got a nested tensor, expected a plain one"
TRAINED = "got one that requires grad, expected"
ELSEWHERE = "got device meta, expected that of input, "
NOT_OF_STUDENT = "got device meta, expected that of student_input, "
LARGE_INTEGER = f"got {reprlib.repr(10**400)}, expected a finite number"
OF_WEIGHT = "got the memory of linear_weight, expected its own"
BEYOND_FLOATS = "got an integer beyond the range of a float, expected a finite number"
TOGETHER = "which cutefce does not serve together; expected one of them"


def nested(x: Tensor) -> Tensor:
    """Return a nested tensor of x, twice."""
    return torch.nested.nested_tensor([x, x])


def trained(*size: int) -> Tensor:
    """Return a tensor that requires grad."""
    return torch.ones(size, requires_grad=True)


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


def of_type(expected: str, *values: Any, **how: Any) -> list[Row]:
    """Return rows of values of another type than is `expected`."""
    kinds = [type(x).__name__ for x in values]
    return [
        Row(x, TypeError, f"got {x!r} ({kind}), {expected}", **how)
        for x, kind in zip(values, kinds, strict=True)
    ]


def among(expected: str, *values: Any, **how: Any) -> list[Row]:
    """Return rows of values of the right type that are not among those `expected`."""
    return [Row(x, ValueError, f"got {x!r}, {expected}", **how) for x in values]


def misplaced(x: Tensor, elsewhere: str = ELSEWHERE, **how: Any) -> list[Row]:
    """Return the rows of a sparse tensor, and of one on another device."""
    away = Row(x.to("meta"), ValueError, elsewhere, **how)
    return [Row(x.to_sparse(), TypeError, SPARSE, **how), away]


def floats(size: int, elsewhere: str = ELSEWHERE, trains: bool = False, **how: Any) -> list[Row]:
    """Return the rows of tensors (size,) of other dtypes or places, or that may not be trained."""
    x, rows = torch.ones(size), list[Row]()
    for dtype in (torch.int64, torch.float8_e4m3fn):
        rows.append(Row(x.to(dtype), TypeError, f"got dtype {dtype}, {FLOATS}", **how))
    if not trains:
        rows.append(Row(trained(size), ValueError, TRAINED, **how))
    return rows + misplaced(x, elsewhere, **how)


def shapes(size: int, or_scalar: str = "") -> list[Row]:
    """Return the rows of shapes other than (size,), and (size, 2) with two positions."""
    also = {"linear_weight": PAIR, "target": torch.stack([Y, Y], 1)}
    of_two = f"expected {or_scalar}({size}, 2)"
    return [
        Row(torch.ones(3), ValueError, f"got shape (3,), expected {or_scalar}({size},)", but=(K,)),
        Row(torch.ones(3), ValueError, f"got shape (3, 2), {of_two}", on=(K,)),
        *(
            Row(torch.ones(shape), ValueError, f"got shape {shape}, {of_two}", also, ["loss"])
            for shape in ((size,), (size, 3))
        ),
    ]


def of_all(value: Any, shown: str) -> Row:
    """Return the row of an option that a loss of probabilities of all classes has not."""
    said = f"got {shown} with probabilities of all classes as the target, expected "
    on = [name for name in LOSSES if name != "module" or shown in ("one", "'sampled'")]
    return Row(value, NotImplementedError, said, {"target": DENSE}, on)


def without_target(value: Any, shown: str) -> Row:
    """Return the row of an option that outputs of no target have not."""
    also = {"target": None, "outputs": ["lse"]}
    return Row(value, ValueError, f"got {shown} without a target, expected None", also, FLOORED)


def with_mean_logit(value: Any, shown: str) -> Row:
    """Return the row of an option that leaves out classes beside their mean logit."""
    said = f"got {shown} with 'mean_logit' in outputs, expected one of them"
    return Row(value, NotImplementedError, said, {"outputs": ["mean_logit"]}, FLOORED)


WRONG: dict[str, list[Row]] = {
    "input": [
        *of_type(TENSOR, None),
        Row(H.numpy(), TypeError, f"got {reprlib.repr(H.numpy())} (ndarray), {TENSOR}"),
        Row(H.long(), TypeError, f"got dtype torch.int64, {FLOATS}"),
        Row(H > 0, TypeError, f"got dtype torch.bool, {FLOATS}; pass input.float()"),
        Row(H.to_sparse(), TypeError, SPARSE),
        Row(nested(H), TypeError, NESTED),
        Row(H[:, :7], ValueError, "got shape (4, 7), expected (..., 8)"),
        Row(H[0, 0], ValueError, "got shape (), expected (..., 8)", but=(K, *SOFT)),
    ],
    "linear_weight": [
        *of_type(TENSOR, None, [1.0]),
        *(
            Row(x, TypeError, f"got dtype {x.dtype}, expected that of input, torch.float32{advice}")
            for x, advice in (
                (W.long(), ""),
                (W.double(), ""),
                (W.bfloat16(), "; cast one of them, or call under torch.autocast"),
            )
        ),
        *misplaced(W),
        Row(nested(W), TypeError, NESTED),
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
            f"got shape (8,), {ROWS}; gather it first if it is a sharded parameter",
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
        *of_type("expected a tensor, or target_indices", None, on=INDEXED),
        *of_type("expected a tensor, or target_indices, or `outputs` alone", None, on=FLOORED),
        Row([[0, 1], [2]], TypeError, "got [[...], [...]] (list), expected a tensor"),
        *of_type(TENSOR, [0, 1]),
        *misplaced(Y, on=INDEXED),
        *misplaced(Y, NOT_OF_STUDENT, on=DIVERGENCES),
        Row(nested(Y), TypeError, NESTED, on=(*INDEXED, *DIVERGENCES)),
        Row(Y > 0, TypeError, f"got dtype torch.bool, {INTEGERS}", on=INDEXED),
        Row(
            DENSE.to(torch.complex64),
            TypeError,
            f"got dtype torch.complex64, {INTEGERS}",
            on=(*LOSSES, *LOG_PROBS, *DIVERGENCES),
        ),
        Row(
            DENSE,
            TypeError,
            f"got dtype torch.float32, {INTEGERS} (class indices)",
            on=LOG_PROBS,
        ),
        Row(
            Y.float(),
            TypeError,
            f"got dtype torch.float32, {INTEGERS}, ignore_index where a token does not count, or "
            "a mask of booleans",
            on=DIVERGENCES,
        ),
        *(
            Row(
                x,
                error,
                f"got dtype torch.float32 of shape {tuple(x.shape)}, {INTEGERS} (class indices) of "
                "shape (4,), or probabilities of shape (4, 10)",
                on=LOSSES,
            )
            for x, error in ((Y.float(), TypeError), (DENSE[:, :9], ValueError))
        ),
        Row(
            Y[:3],
            ValueError,
            "got shape (3,), expected (4,) to match",
            on=(*LOSSES, *LOG_PROBS, *DIVERGENCES),
        ),
        *(
            Row(
                x,
                ValueError,
                f"got shape {shape} with input of shape {of}, expected (N, 2) with (N, D), to "
                "match linear_weight of shape (10, 2, 8)",
                also,
                on,
            )
            for x, shape, of, also, on in (
                (Y[:3], "(3, 2)", "(4, 8)", {}, [K]),
                (Y, "(4, 2)", "(1, 4, 8)", {"input": H[None]}, [K]),
                (Y, "(4,)", "(4, 8)", {"linear_weight": PAIR}, LOSSES[:2]),
            )
        ),
        # probabilities of all classes
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
            {"linear_weight": PAIR},
            LOSSES[:2],
        ),
        # beside others
        *(
            Row(
                x,
                ValueError,
                "got one beside target_indices, expected None beside it",
                {"target_indices": INDICES, "target_probs": PROBS},
                on,
            )
            for x, on in ((Y, [SOFT_LOSS]), (DENSE, LOSSES))
        ),
        Row(
            Y,
            ValueError,
            "got one beside target_indices, expected None beside it",
            on=(CLASSES,),
        ),
    ],
    "target_indices": [
        *of_type(OPTIONAL, 7, on=(*SOFT, "log_probs", "plan")),
        *misplaced(INDICES, on=SOFT),
        Row(nested(INDICES), TypeError, NESTED, on=SOFT),
        Row(INDICES.float(), TypeError, f"got dtype torch.float32, {INTEGERS}", on=SOFT),
        Row(INDICES > 0, TypeError, f"got dtype torch.bool, {INTEGERS}", on=SOFT),
        Row(INDICES[:3], ValueError, "got shape (3, 3), expected (4, K) to match input", on=SOFT),
        Row(
            INDICES[0, 0], ValueError, "got shape (), expected a tensor of shape (..., K)", on=SOFT
        ),
        *(
            Row(
                INDICES[:, :1].expand(4, count),
                ValueError,
                f"got {count} classes a token, expected 1 to 256",
                also,
                on,
            )
            for count in (0, 257)
            for also, on in (
                ({}, [CLASSES]),
                ({"target_probs": PROBS[:, :1].expand(4, count)}, [SOFT_LOSS]),
            )
        ),
        Row(
            None,
            ValueError,
            "got None, expected a tensor of shape (..., K)",
            {"target": None, "target_probs": PROBS},
            LOSSES,
        ),
        Row(
            INDICES,
            NotImplementedError,
            "got soft targets with linear_weight of shape (10, 2, 8), expected target with losses "
            "of K dimensions",
            {"target": None, "target_probs": PROBS},
            [K],
        ),
    ],
    "target_probs": [
        *of_type(OPTIONAL, [1.0], on=(SOFT_LOSS,)),
        *misplaced(PROBS, on=(SOFT_LOSS,)),
        Row(PROBS.int(), TypeError, f"got dtype torch.int32, {FLOATS}", on=(SOFT_LOSS,)),
        Row(nested(PROBS), TypeError, NESTED, on=(SOFT_LOSS,)),
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
            {"target": None, "target_indices": INDICES},
            (*LOSSES, "plan"),
        ),
        Row(
            PROBS,
            ValueError,
            "got probabilities with log-probabilities, expected None",
            {"target": None, "target_indices": INDICES},
            ["operator of log_probs"],
        ),
    ],
    "linear_bias": [*of_type(OPTIONAL, [1.0]), *floats(10, trains=True), *shapes(10)],
    "weight": [
        *of_type(OPTIONAL, [1.0]),
        *floats(10, but=("module",)),
        Row(torch.ones(3), ValueError, "got shape (3,), expected (10,)"),
        Row(trained(10), ValueError, f"{TRAINED} weight.detach()"),
    ],
    "token_weights": [
        *of_type(OPTIONAL, [1.0]),
        *floats(4),
        *shapes(4),
        Row(
            torch.ones(4) > 0,
            TypeError,
            f"got dtype torch.bool, {FLOATS}; pass token_weights.float()",
        ),
        Row(INDICES, TypeError, f"got dtype torch.int64, {FLOATS}; pass token_weights.float()"),
    ],
    "temperature": [
        *of_type(f"{NUMBER} or a tensor", None, "1", True),
        Row(np.ones(2), TypeError, f"got array([1., 1.]) (ndarray), {NUMBER} or a tensor"),
        *among(POSITIVE, 0.0, -1.0, INF, but=OPERATORS),
        Row(10**400, ValueError, BEYOND_FLOATS, but=OPERATORS),
        Row((1.0, 0.0), ValueError, f"got 0.0, {POSITIVE}", on=DIVERGENCES),
        Row(
            (1, 2, 3), ValueError, "got a sequence of 3, expected a number, or two", on=DIVERGENCES
        ),
        *floats(4, but=(K, *DIVERGENCES)),
        *floats(4, NOT_OF_STUDENT, on=DIVERGENCES),
        *shapes(4, "() or "),
        Row(trained(), ValueError, f"{TRAINED} temperature.detach()"),
    ],
    "logit_floor": [
        *of_type(OPTIONAL, 1.0),
        *floats(4, on=FLOORED),
        Row(torch.ones(3), ValueError, "got shape (3,), expected (4,)", on=FLOORED),
        Row(
            torch.ones(4),
            NotImplementedError,
            "got one with target_indices, expected None, or a target",
            on=(CLASSES,),
        ),
        with_mean_logit(torch.ones(4), "one"),
        without_target(torch.ones(4), "one"),
    ],
    "top_k": [
        *of_type(INTEGER, 1.0, True, on=(*FLOORED, CLASSES)),
        *among(f"{INTEGER} from 0 to 32", -1, 33, on=(*FLOORED, CLASSES)),
        Row(32, ValueError, "got 32 with 10 classes, expected at most 10", on=FLOORED),
        Row(
            1,
            NotImplementedError,
            "got 1 with kept_classes, expected 0, or no kept_classes",
            {"kept_classes": INDICES},
            FLOORED,
        ),
    ],
    "kept_classes": [
        *of_type(OPTIONAL, 1),
        Row(INDICES.float(), TypeError, f"got dtype torch.float32, {INTEGERS}", on=FLOORED),
        *misplaced(INDICES, "got device meta, expected that of target, ", on=FLOORED),
        *(
            Row(x, ValueError, f"got shape {shape}, expected (4, K), K from 1 to 255", on=FLOORED)
            for x, shape in (
                (INDICES[0], "(3,)"),
                (INDICES[:, :0], "(4, 0)"),
                (torch.zeros(4, 256).long(), "(4, 256)"),
            )
        ),
        *(
            Row(
                INDICES,
                NotImplementedError,
                f"got some with {other}, expected one of them",
                also,
                on,
            )
            for other, also, on in (
                ("target_indices", {}, [CLASSES]),
                ("logit_floor", {"logit_floor": torch.ones(4)}, FLOORED),
            )
        ),
        with_mean_logit(INDICES, "some"),
        without_target(INDICES, "some"),
    ],
    "denominator": [
        *of_type(REAL, "x", True, 2 + 1j),
        *among("expected a finite number, 0 or more", -1, NAN, but=OPERATORS),
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
            {"reduction": "sum"},
        ),
    ],
    "accumulate_into": [
        of_all(SUMS, "one"),
        *of_type(OPTIONAL, 3),
        *misplaced(SUMS),
        Row(SUMS.half(), TypeError, "got dtype torch.float16, expected torch.float32"),
        Row(nested(SUMS), TypeError, NESTED),
        Row(SUMS[:5], ValueError, "got shape (5, 8), expected (10, 8)"),
        Row(
            torch.zeros(8, 10).t(),
            ValueError,
            "got strides (1, 10), expected a contiguous tensor",
        ),
        Row(trained(10, 8), ValueError, f"{TRAINED} accumulate_into.detach()"),
        *(Row(x, ValueError, OF_WEIGHT, but=("module",)) for x in (weight, memory, later_rows)),
        Row(
            SUMS,
            ValueError,
            "got a buffer for a linear_weight that does not require grad, expected None",
            {"linear_weight": W},
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
        *of_type(REAL, "1", also=IN_SUMS),
        *among("expected a finite number", NAN, also=IN_SUMS, but=OPERATORS),
        Row(10**400, ValueError, BEYOND_FLOATS, IN_SUMS, but=OPERATORS),
        Row(torch.tensor(True), TypeError, "got dtype torch.bool, expected a real one", IN_SUMS),
        Row(torch.ones(2), ValueError, "got shape (2,), expected () or (1,)", IN_SUMS),
        Row(torch.ones((), device="meta"), ValueError, ELSEWHERE, IN_SUMS),
        Row(trained(), ValueError, f"{TRAINED} grad_output.detach()", IN_SUMS),
        Row(torch.ones(()), ValueError, "got one without accumulate_into, expected None"),
        *(
            Row(
                torch.ones(()),
                ValueError,
                f"""got one with reduction='{name}', expected "mean" or "sum\"""",
                IN_SUMS | also,
                on,
            )
            for name, also, on in (
                ("none", {"reduction": "none"}, ()),
                ("outputs", {}, ["operator of log_probs"]),
            )
        ),
    ],
    "z_los": [
        *of_type("expected no such argument", 0.1, on=["defer"]),
        *of_type("expected no such argument; did you mean `z_loss`?", 0.1, on=REFUSING),
    ],
    "logit_softcap": of_type(
        "expected no such argument; did you mean `softcap`?", 3.0, on=REFUSING
    ),
    "reduction": [
        *of_type(STRING, None),
        *among("expected one of ('mean', 'sum', 'none')", "avg", "batchmean"),
    ],
    "ignore_index": [
        Row(
            -1,
            ValueError,
            "got -1 without a target, expected None: all tokens count",
            {"target": None, "outputs": ["lse"]},
            ["log_probs"],
        ),
        *of_type(INTEGER, "3", True, 1.5),
        *among(f"{INTEGER} of 64 bits", 2**63, -(2**63) - 1, but=OPERATORS),
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
            {"target": DENSE},
            LOSSES,
        ),
    ],
    "label_smoothing": [
        *of_type(NUMBER, None, "x", True),
        Row(np.zeros(3), TypeError, f"got array([0., 0., 0.]) (ndarray), {NUMBER}"),
        *among(f"{NUMBER} from 0 to 1", -0.1, 1.1, NAN),
        Row(0.1, NotImplementedError, f"got 0.1 with softcap=3.0, {TOGETHER}", {"softcap": 3.0}),
    ],
    "z_loss": [
        *of_type(NUMBER, None, "0", True),
        *among("expected a finite number, 0 or more", -1.0, INF),
        Row(10**400, ValueError, f"{LARGE_INTEGER}, 0 or more", but=OPERATORS),
    ],
    "logit_scale": [
        *of_type(NUMBER, None, "x", True),
        *among("expected a finite number other than 0", 0.0, NAN),
        Row(10**400, ValueError, f"{LARGE_INTEGER} other than 0", but=OPERATORS),
        Row((1.0, 0.0), ValueError, "got 0.0, expected a finite number other", on=("divergence",)),
    ],
    "softcap": [
        *of_type(f"{NUMBER} or None", "x", True),
        *among(f"{POSITIVE}, or None", 0.0, -1.0, INF),
        Row(10**400, ValueError, f"{LARGE_INTEGER} above 0, or None", but=OPERATORS),
        Row((None, -1.0), ValueError, f"got -1.0, {POSITIVE}", on=("divergence",)),
    ],
    "gradient": [
        of_all("sampled", "'sampled'"),
        *of_type(STRING, 3),
        *among("expected one of ('exact', 'sampled')", "some"),
    ],
    "samples": [
        *of_type(INTEGER, 20.0, "many", True),
        *among(f"{INTEGER} from 16 to 4096", 15, 4097),
    ],
    "workspace": [
        *of_type(BYTES, 2.5, True, [1], {}, b"max"),
        *among(SOME_BYTES, "huge", -1),
        *among(SOME_BYTES, 2**63, 2**70, but=OPERATORS),
        Row("m" * 41, ValueError, f"got {reprlib.repr('m' * 41)}, {SOME_BYTES}"),
        Row(10**400, ValueError, f"got {reprlib.repr(10**400)}, {SOME_BYTES}", but=OPERATORS),
    ],
    "return_lse": of_type(BOOL, "yes", 1, None),
    "return_overlap": of_type(BOOL, None),
    "options": [
        Row(
            {"chunk": 4},
            NotImplementedError,
            "got {'chunk': 4} (dict), expected None: `workspace` bounds the memory",
        ),
    ],
    "outputs": [
        *of_type("expected a sequence of strings", None, "entropy"),
        Row(
            ["perplexity"],
            ValueError,
            "got 'perplexity', expected some of ('lse', 'entropy', ",
            but=OPERATORS,
        ),
        *(
            Row([name], ValueError, f"got '{name}', expected some of {OUTPUTS}; {hint}", on=FLOORED)
            for name, hint in (
                ("log_probs", "a target has them always"),
                ("top_log_probs", "pass top_k="),
            )
        ),
        *(
            Row(
                [name],
                NotImplementedError,
                f"got '{name}' with target_indices, which is about one target; expected 'argmax'",
                on=(CLASSES,),
            )
            for name in ("is_top1", "rank")
        ),
        Row(
            ["mean_logit"],
            NotImplementedError,
            f"got 'mean_logit' with softcap=3.0, {TOGETHER}",
            {"softcap": 3.0},
            but=OPERATORS,
        ),
        Row(
            ["lse", "rank"],
            ValueError,
            "got 'rank' without a target, expected some of ('lse', 'entropy', 'sum_p_squared', "
            "'mean_logit', 'argmax')",
            {"target": None},
            ["log_probs"],
        ),
        Row(
            ["argmax"],
            ValueError,
            f"got 'argmax' with {2**24 + 1} classes, expected at most 2^24",
            {"linear_weight": torch.empty(2**24 + 1, 8, device="meta")},
            but=OPERATORS,
        ),
    ],
    "group": [
        *of_type("expected a ProcessGroup that this rank is in", "a name"),
        Row(
            GroupMember.NON_GROUP_MEMBER,
            TypeError,
            "got -100 (int), expected a ProcessGroup that this rank is in",
        ),
        *among("expected the name of a process group that this rank is in", "nobody", on=OPERATORS),
    ],
    "shards": [
        of_all([5, 5], "[5, 5]"),
        *of_type("expected a sequence of integers or None", 3),
        Row(
            [5.0, 5.0],
            TypeError,
            f"got 5.0 (float) among them, {INTEGERS}",
            but=DIVERGENCES,
        ),
        Row([5, 5], ValueError, "got [5, 5] without a group, expected a group"),
    ],
    "sequence_parallel": [
        of_all(True, "True"),
        *of_type(BOOL, 1),
        Row(True, ValueError, "got True without a group, expected a group"),
    ],
    # those of the module
    "in_features": [*of_type(INTEGER, 2.5), *among("expected 1 or more", 0)],
    "num_classes": [*of_type(INTEGER, 2.5, True), *among("expected 1 or more", -3)],
    "out_features": [
        *of_type("expected a tuple of integers", 3),
        Row((3, "4"), TypeError, f"got '4' (str) among them, {INTEGERS}"),
        Row((3, 0), ValueError, "got (3, 0), expected sizes of 1 or more"),
    ],
    "bias": [
        Row(torch.ones(10), TypeError, f"got a value of type Tensor, {BOOL}"),
        *of_type(BOOL, None),
    ],
    # those of other functions
    "enabled": of_type(BOOL, None),
    "evaluation": of_type(BOOL, None),
    "divergence": [
        *of_type(STRING, None),
        *among("expected one of ('forward_kl', 'reverse_kl', 'jsd', 'tv')", "kl"),
    ],
    "beta": [
        *of_type(f"{NUMBER} or None", "0.5", also={"divergence": "jsd"}),
        *among(f"{NUMBER} from 0 to 1", 1.5, NAN),
        *(
            Row(
                beta,
                ValueError,
                f"got {beta} with divergence='{name}', expected None, or divergence='jsd'",
                {"divergence": name},
            )
            for beta, name in ((0.5, "forward_kl"), (0, "reverse_kl"), (0.5, "tv"))
        ),
    ],
    "student_input": [
        *of_type(TENSOR, [1.0]),
        Row(H.long(), TypeError, f"got dtype torch.int64, {FLOATS}"),
        Row(H.to_sparse(), TypeError, SPARSE),
        Row(
            H[:, :7],
            ValueError,
            "got shape (4, 7), expected (..., 8) to match student_weight of shape (10, 8)",
        ),
    ],
    "student_weight": [
        *of_type(TENSOR, None),
        *misplaced(W, NOT_OF_STUDENT),
        Row(W[:0], ValueError, f"got shape (0, 8), {ROWS}"),
    ],
    "teacher_input": [
        *of_type(TENSOR, None),
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
            {"teacher_weight": W[:, :6].double()},
        ),
        Row(
            H[:, :6].to("meta"),
            ValueError,
            NOT_OF_STUDENT,
            {"teacher_weight": W[:, :6].to("meta")},
        ),
    ],
    "teacher_weight": [
        *of_type(TENSOR, None),
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
    "student_bias": [*of_type(OPTIONAL, [1.0]), *floats(10, NOT_OF_STUDENT, trains=True)],
    "teacher_bias": [
        *floats(10, NOT_OF_STUDENT, trains=True),
        Row(torch.ones(9), ValueError, "got shape (9,), expected (10,)"),
    ],
}
"""The rows of each argument, which begin the message."""


def outside(x: Tensor, said: str, *on: str, **also: Any) -> Row:
    """Return the row of classes of which one is none."""
    return Row(x, IndexError, f"got {said}", also, on)


PROBABILITY = "expected numbers from 0 to "
WRONG_VALUES: dict[str, list[Row]] = {
    "target": [
        outside(Y + 8, "10 at token 2, expected 0 <= target < 10", *INDEXED),
        outside(Y + 8, "10 at token 2, expected 0 <= target < 10", *FLOORED, kept_classes=INDICES),
        outside(Y - 1, "-1 at token 0, expected 0 <= target < 10 or ignore_index=-100", *INDEXED),
    ],
    "kept_classes": [
        outside(
            INDICES + torch.tensor([0, 0, 10, 0])[:, None],
            "10 at token 2, expected -1 or 0 <= class < 10",
            *FLOORED,
        )
    ],
    "target_indices": [
        *(
            outside(
                INDICES + index,
                f"{index} at token 0, k = 0 with probability 1.0, expected 0 <= index < 10",
                SOFT_LOSS,
                target_probs=PROBS,
            )
            for index in (10, -100)
        ),
        *(
            outside(
                INDICES[:, :1] + index,
                f"{index} at token 0, k = 0, expected 0 <= index < 10 or ignore_index=-100",
                CLASSES,
            )
            for index in (10, -1)
        ),
    ],
    "target_probs": [
        *(
            Row(
                PROBS.double() * number,
                ValueError,
                f"got {number} at token 0, k = 0, {PROBABILITY}",
                on=(SOFT_LOSS,),
            )
            for number in (-1.0, NAN, INF, 1e300)
        ),
        Row(
            PROBS.index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(-2.0)),
            ValueError,
            f"got -2.0 at token 3, k = 2, {PROBABILITY}",
            {"token_weights": torch.tensor([0.0, 0, 1, 1])},
            [SOFT_LOSS],
        ),
    ],
}
"""Those whose values are looked at on a CPU alone, as a GPU is not synchronized."""
