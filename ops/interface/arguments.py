"""What a call asks for beside its tensors: the table of arguments, one frozen record a group.

An entry has the name, the type and the default of an option, its values or the check of a tensor,
and the part of the loss that it changes; `linear_cross_entropy` says what it is.  From it come the
errors of arguments, the schemas of the operators, the keys of caches, and what the module keeps;
the public signatures and `docs/api.md` are compared with it.  A new option is an entry, and code in
the home of its kind:

    Kind.ROW         `ops.rows.loss_terms`: the loss of a token and its coefficients
    Kind.RANK_ONE    `ops.rows.loss_terms`: a term of the class row and its gradients
    Kind.LOGITS      `ops.rows.logit_map`, and `cute_kernels.common.logit_transform`
    Kind.REDUCTION   `cute_kernels.variant.RowReductions` and `ops.outputs.reductions`
"""

import dataclasses
import difflib
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from cutefce.ops import torch_compat
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface import checks
from cutefce.ops.interface.checks import (
    BOOL,
    INTEGER,
    TENSOR,
    TENSOR_OR_NONE,
    Operands,
    one_of,
)
from cutefce.ops.sampling.sample_sizes import MAX_SAMPLES, MIN_SAMPLES
from cutefce.ops.schema import Argument, OperatorRecord, argument

REDUCTIONS = ("mean", "sum", "none")
REDUCTION, GRADIENT = one_of(REDUCTIONS), one_of(("exact", "sampled"))
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tv")
SAMPLES = INTEGER.of(
    lambda x: MIN_SAMPLES <= x <= MAX_SAMPLES, f"an integer from {MIN_SAMPLES} to {MAX_SAMPLES}"
)
OUTPUTS = ("lse", "entropy", "sum_p_squared", "mean_logit", "is_top1", "argmax", "rank")
"""What `linear_log_probs` can return beside the log-probabilities."""
NO_OUTPUTS = {"log_probs": "; a target has them always", "top_log_probs": "; pass top_k="}
"""How to get other results."""
OF_ALL = {"entropy", "sum_p_squared"}
"""Those of sums over all classes."""
OF_OTHERS = {"is_top1", "argmax", "rank"}
"""Those of reductions over all classes but the target."""
OF_TARGET = {"is_top1", "rank"}
"""Those about one target."""
MAX_TOP = 32
"""Largest classes of a token that are returned, at most."""


class Kind(enum.Enum):
    """The part of the loss that an option changes, if it changes one."""

    ROW = "row coefficients"
    RANK_ONE = "rank one"
    LOGITS = "logit transform"
    REDUCTION = "row reductions"


@dataclass(frozen=True)
class LossOptions(OperatorRecord):
    """Options that are constants of a compiled graph."""

    reduction: str = argument(REDUCTION, "mean")
    ignore_index: int = argument(checks.INTEGER_OR_NONE, -100)
    label_smoothing: float = argument(checks.FROM_0_TO_1, 0.0, Kind.RANK_ONE)
    z_loss: float = argument(checks.NOT_NEGATIVE, 0.0, Kind.ROW)
    logit_scale: float = argument(checks.NOT_ZERO, 1.0, Kind.LOGITS)
    softcap: float | None = argument(checks.POSITIVE_OR_NONE, None, Kind.LOGITS)
    gradient: str = argument(GRADIENT, "exact")
    samples: int = argument(SAMPLES, 256)
    outputs: str = argument(checks.STRINGS, "", Kind.REDUCTION, of="values")
    """Names, of reduction "outputs"."""
    top_k: int = argument(
        INTEGER.of(lambda x: 0 <= x <= MAX_TOP, f"an integer from 0 to {MAX_TOP}"),
        0,
        Kind.REDUCTION,
        of="values",
    )
    """How many of the largest classes of a token are returned, with reduction "outputs"."""

    @property
    def is_scalar(self) -> bool:
        """Whether the loss is a scalar, so that every token's loss has one upstream gradient."""
        return self.reduction in ("mean", "sum")

    @property
    def output_names(self) -> list[str]:
        """The names in `outputs`."""
        return self.outputs.split(",") if self.outputs else []

    @property
    def reduces_rows(self) -> bool:
        """Whether outputs need reductions of the logits beside their log-sum-exp."""
        return self.reduces_all or self.reduces_others

    @property
    def reduces_all(self) -> bool:
        """Whether they need sums over all classes."""
        return not OF_ALL.isdisjoint(self.output_names)

    @property
    def reduces_others(self) -> bool:
        """Whether they need reductions over all classes but the target."""
        return not OF_OTHERS.isdisjoint(self.output_names)

    @property
    def searches_classes(self) -> bool:
        """Whether the classes of the largest logits are results."""
        return self.top_k > 0

    @property
    def keeps_largest(self) -> bool:
        """Whether results need the largest logit of each block of classes."""
        return self.searches_classes or self.reduces_others

    @property
    def scales_exps(self) -> bool:
        """Whether each exponential has a factor that the backward alone knows."""
        return "entropy" in self.output_names

    @property
    def is_sampled(self) -> bool:
        """Whether gradients are unbiased estimates."""
        return self.gradient == "sampled"

    @property
    def scales_rows(self) -> bool:
        """Whether tokens' exponentials have factors beside upstream / T, of any sign."""
        return Kind.ROW in self.kinds

    @property
    def transforms_logits(self) -> bool:
        """Whether logits are not the products of hidden states and weight."""
        return Kind.LOGITS in self.kinds

    def per_token(self) -> "LossOptions":
        """Return the same with a loss for each token."""
        return dataclasses.replace(self, reduction="none")

    def without_entropy(self) -> "LossOptions":
        """Return the options of a backward in which entropy has no gradient."""
        outputs = ",".join(name for name in self.output_names if name != "entropy")
        return dataclasses.replace(self, outputs=outputs)

    def check_entropy_gradient(self) -> None:
        """Raise NotImplementedError unless entropy, as an output, has a gradient."""
        for name, got, expected in (
            ("softcap", "one" if self.softcap is not None else None, None),
            ("gradient", self.gradient, "exact"),
        ):
            if got != expected:
                raise NotImplementedError(
                    f"{name}: got {got} with 'entropy' in outputs, which has no gradient then; "
                    f"expected {name}={expected!r}, or entropy.detach()"
                )

    def check(self) -> None:
        """Raise ValueError for a value out of its range, NotImplementedError for a combination."""
        own = self.arguments()
        for name, value in self.given.items():
            if not (name == "reduction" and self.outputs):
                checks.check_value(name, value, own[name].type)
        check_outputs(self.output_names)
        if self.softcap is None:
            return
        together = f"with softcap={self.softcap}, which cutefce does not serve together"
        if "mean_logit" in self.output_names:
            raise NotImplementedError(f"outputs: got 'mean_logit' {together}; expected one of them")
        if self.label_smoothing:
            raise NotImplementedError(
                f"label_smoothing: got {self.label_smoothing} {together}; expected one of them"
            )


@dataclass(frozen=True)
class TensorOptions(OperatorRecord):
    """Options that are tensors, on the device of the hidden states.

    Operators take those of tokens as (N,) or (N, K), those of classes as (V,), and scalars as ().
    """

    OF_CLASSES: ClassVar[tuple[str, ...]] = "linear_bias", "accumulate_into"
    """Those of which a rank of a group has the rows of its own classes."""
    OF_TOKENS: ClassVar[tuple[str, ...]] = "token_weights", "temperature", "logit_floor"
    """Those with a number of each token; a temperature may be one number."""

    linear_bias: Tensor | None = argument(checks.BIAS, None, Kind.LOGITS)
    weight: Tensor | None = argument(checks.OF_CLASSES, None, Kind.ROW)
    token_weights: Tensor | None = argument(checks.OF_TOKENS, None, Kind.ROW)
    temperature: Tensor | None = argument(checks.TEMPERATURE, None, Kind.LOGITS)
    denominator: Tensor | None = argument(checks.DIVISOR, None)
    accumulate_into: Tensor | None = argument(checks.BUFFER, None)
    grad_output: Tensor | None = argument(checks.UPSTREAM, None)
    target_indices: Tensor | None = argument(TENSOR_OR_NONE, None)
    target_probs: Tensor | None = argument(TENSOR_OR_NONE, None, Kind.ROW)
    logit_floor: Tensor | None = argument(checks.OF_TOKENS, None, Kind.LOGITS, of="values")
    """Logits below which classes but the target are left out of the softmax."""
    seed: Tensor | None = argument(TENSOR_OR_NONE, None, of="")
    """(2,) int32 seed of sampled gradients."""
    weight_cast: Tensor | None = argument(TENSOR_OR_NONE, None, of="")
    """(V, D) a float32 weight in 16 bits."""

    @property
    def scales_rows(self) -> bool:
        """Whether tokens differ in the factors of their losses or logits."""
        per_token = self.temperature is not None and self.temperature.ndim > 0
        return per_token or Kind.ROW in self.kinds

    @property
    def output_classes(self) -> int:
        """Classes of each token whose log-probabilities a call with reduction "outputs" returns."""
        return 1 if self.target_indices is None else self.target_indices.shape[-1]

    @cached_property
    def soft_targets(self) -> dict[str, Tensor]:
        """The soft targets, by name; empty without any."""
        given = {"target_indices": self.target_indices, "target_probs": self.target_probs}
        return {name: x for name, x in given.items() if x is not None}

    def check(self, of: Operands, reduction: str) -> None:
        """Raise TypeError or ValueError that names the argument."""
        check_tensors(self.given, of)
        if self.logit_floor is not None and self.target_indices is not None:
            raise NotImplementedError(
                "logit_floor: got one with target_indices, expected None, or a target"
            )
        if self.denominator is not None:
            check_divides(reduction)
        buffer = self.accumulate_into
        if buffer is not None:
            others = {name: x for name, x in self.given.items() if x is not buffer}
            checks.check_apart("accumulate_into", buffer, **others)
        if self.grad_output is None:
            return
        if buffer is None:
            raise ValueError("grad_output: got one without accumulate_into, expected None")
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f'grad_output: got one with reduction={reduction!r}, expected "mean" or "sum"'
            )

    def prepared(self, h: Tensor) -> "TensorOptions":
        """Return the same with tokens' values as vectors (N,), scalars as () on h's device.

        A temperature () is one of all tokens.
        """
        given: dict[str, Any] = dict(self.soft_targets)
        for name, x in given.items():
            given[name] = x.reshape(-1, x.shape[-1])
        if "target_indices" in given:  # of any integers; kernels read contiguous rows
            given = {name: x.contiguous() for name, x in given.items()}
            given["target_indices"] = given["target_indices"].long()
        for name in self.OF_TOKENS:
            x = getattr(self, name)
            if x is not None and (x.ndim or name != "temperature"):
                given[name] = x.reshape(-1)
        for name in ("denominator", "grad_output"):
            x = getattr(self, name)
            if x is not None and (x.ndim or x.device != h.device):
                given[name] = scalar_beside(x, h)
        return dataclasses.replace(self, **given)


def scalar_beside(x: Tensor, h: Tensor) -> Tensor:
    """Return a scalar x, () or (1,), as () on h's device, a CPU's in the dtype of h's sums.

    Some devices have no float64, so that a number is rounded before it gets there.
    """
    if x.device != h.device:
        x = x.to(sum_dtype(h.dtype)).to(h.device)
    return x.reshape(())


@dataclass(frozen=True)
class Sharding(OperatorRecord):
    """How a vocabulary, and tokens, are sharded over the ranks of a group."""

    group: str | None = argument(checks.GROUP, None)
    shards: list[int] | None = argument(checks.SIZES_OR_NONE, None)
    sequence_parallel: bool = argument(BOOL, False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Sharding":
        """Return that of the arguments of a public function, which has the group itself."""
        group, shards = given.get("group"), given.get("shards")
        return cls(
            None if group is None else group.group_name,
            None if shards is None else list(shards),
            given.get("sequence_parallel", False),
        )

    def ranks(self) -> int:
        """Return the number of ranks that share the call; raise ValueError if it lacks a group."""
        if self.group is not None:
            return torch_compat.place_in_group(self.group)[1]
        for name in ("shards", "sequence_parallel"):
            if value := getattr(self, name):
                raise ValueError(f"{name}: got {value} without a group, expected a group")
        return 1

    def parts(self, h: Tensor) -> int:
        """Return how many ranks have the tokens of h (..., D), one after another.

        It is 1 for a DTensor, which has those of all.
        """
        return self.ranks() if self.sequence_parallel and not torch_compat.is_dtensor(h) else 1

    def vocab(self, w: Tensor) -> int:
        """Return the classes of all ranks' weights, w (V, ...) being here, or a DTensor of all."""
        if torch_compat.is_dtensor(w):
            return w.shape[0]
        ranks = self.ranks()  # shards without a group are an error
        return sum(self.shards) if self.shards else w.shape[0] * ranks

    def check(self, w: Tensor) -> None:
        """Raise ValueError unless `shards` are the rows of all ranks' weights, w being here."""
        if self.group is None or self.shards is None:
            return
        rank, ranks = torch_compat.place_in_group(self.group)
        if len(self.shards) != ranks or min(self.shards) < 1 or self.shards[rank] != w.shape[0]:
            raise ValueError(
                f"shards: got {list(self.shards)}, expected the rows of linear_weight of {ranks} "
                f"ranks, each at least 1, and {w.shape[0]} for rank {rank}"
            )


@dataclass(frozen=True)
class StepOptions(OperatorRecord):
    """What the plan of a training step depends on, beside sizes and the options of the loss."""

    budget: int = argument(INTEGER)
    """Bytes that the step may take beyond inputs and gradients."""
    grad_hidden: bool = argument(BOOL)
    """Whether dX is computed."""
    grad_weight: bool = argument(BOOL)
    """Whether dW is computed."""
    grad_bias: bool = argument(BOOL)
    """Whether the gradient of the bias is computed."""
    copied_hidden: int = argument(INTEGER, 0)
    """Bytes per element of hidden states that the operator copies."""
    copied_weight: int = argument(INTEGER, 0)
    """The same of the weight."""

    @property
    def gradients(self) -> tuple[bool, bool, bool]:
        """Whether dX, dW and the gradient of the bias are computed."""
        return self.grad_hidden, self.grad_weight, self.grad_bias


class LossCall(NamedTuple):
    """A call of a loss whose arguments are right, as its operators take them."""

    h: Tensor
    """(N, D)"""
    w: Tensor
    """(V, D) of h's dtype, or float32 beside the `weight_cast` of the tensors."""
    y: Tensor
    """(N,) integers; (...) before the operators."""
    step: StepOptions
    options: LossOptions
    tensors: TensorOptions
    sharding: Sharding

    def computed(self) -> "LossCall":
        """Return the same with the weight that products are computed with."""
        cast = self.tensors.weight_cast
        return self if cast is None else self._replace(w=cast)


OPTIONS = LossOptions, TensorOptions, Sharding
"""The records of a call, in the order of the operators' arguments."""

OTHERS = {
    **dict.fromkeys(("input", "linear_weight", "target"), Argument(TENSOR)),
    **dict.fromkeys(("student_input", "student_weight"), Argument(TENSOR)),
    **dict.fromkeys(("teacher_input", "teacher_weight"), Argument(TENSOR)),
    **dict.fromkeys(("student_bias", "teacher_bias"), Argument(checks.BIAS)),
    **dict.fromkeys(("bias", "return_lse", "return_overlap"), Argument(BOOL)),
    **dict.fromkeys(("enabled", "evaluation"), Argument(BOOL)),
    **dict.fromkeys(("in_features", "num_classes"), Argument(checks.SIZE)),
    "out_features": Argument(checks.SIZES),
    "workspace": Argument(checks.BYTES),
    "divergence": Argument(one_of(DIVERGENCES)),
    "kept_classes": Argument(TENSOR_OR_NONE),
    "beta": Argument(checks.FROM_0_TO_1_OR_NONE),
}
"""Arguments of public functions that are no options of the loss."""

ARGUMENTS: dict[str, Argument] = OTHERS | {
    name: own for record in OPTIONS for name, own in record.arguments().items()
}
"""The arguments of all public functions, by name."""

LOSS_OPTIONS = [name for record in OPTIONS for name in record.names(of="loss")]
"""Options of the loss that its callers know."""


def check_types(**arguments: Any) -> None:
    """Raise TypeError for the first argument that is not of its type in `ARGUMENTS`."""
    for name, value in arguments.items():
        if name in ARGUMENTS:  # others are of any type
            checks.check_type(name, value, ARGUMENTS[name].type)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for the first argument of a wrong type or value.

    What a tensor has to fit, its check in the table says.
    """
    check_types(**arguments)
    for name, value in arguments.items():
        if name in ARGUMENTS and not isinstance(value, Tensor):
            checks.check_value(name, value, ARGUMENTS[name].type)


def check_tensors(given: Mapping[str, Any], of: Operands) -> None:
    """Raise TypeError or ValueError for the first tensor among arguments that does not fit."""
    for name, x in given.items():
        check = ARGUMENTS[name].type.check
        if check is not None and isinstance(x, Tensor):
            check(name, x, of)


def check_divides(reduction: str) -> None:
    """Raise ValueError unless a reduction has a denominator."""
    if reduction != "mean":
        raise ValueError(f'denominator: got one with reduction={reduction!r}, expected "mean"')


def check_outputs(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown output."""
    for name in names:
        if name not in OUTPUTS:
            hint = NO_OUTPUTS.get(name, "")
            raise ValueError(f"outputs: got {name!r}, expected some of {OUTPUTS}{hint}")


def refuse(arguments: Mapping[str, Any], known: Iterable[str] = (), where: str = "") -> None:
    """Raise TypeError for the first of `arguments`, which a function does not have.

    `known` are those that it has; `where` says what has the refused one.
    """
    for name, value in arguments.items():
        inside = (x for x in known if x in name or name in x)
        similar = [*inside, *difflib.get_close_matches(name, known, cutoff=0.8)][:1]
        hint = where or "".join(f"; did you mean `{x}`?" for x in similar)
        raise TypeError(f"{name}: got {checks.shown(value)}, expected no such argument{hint}")
