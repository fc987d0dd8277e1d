"""What a call asks for beside its tensors: one frozen record a kind of option.

Each record has its checks, and its part of the operators' schemas.
A new option is a field here, and code in the one home of its kind:

    row coefficient    `ops.rows.loss_terms`: the loss of a token and its coefficients
    rank one           `ops.rows.loss_terms`: a term of the class row and its gradients
    logit transform    `ops.rows.logit_map`, and `cute_kernels.common.logit_transform`
    row reduction      `cute_kernels.variant.RowReductions` and `ops.rows.outputs`
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface import checks, option_checks
from cutefce.ops.interface.checks import OF_ALL, OF_OTHERS
from cutefce.ops.schema import OperatorRecord, argument


@dataclass(frozen=True)
class LossOptions(OperatorRecord):
    """Options that are constants of a compiled graph."""

    reduction: str = argument("str", default="mean")
    """"mean" over active tokens, "sum" or "none"."""
    ignore_index: int = argument("int", default=-100)
    """Tokens with this target have loss 0 and gradient 0; any integer will do."""

    label_smoothing: float = argument("float", default=0.0)
    """ε: part of the target's probability that all classes share."""
    z_loss: float = argument("float", default=0.0)
    """λ: factor of lse², which is added to the loss of a token."""
    logit_scale: float = argument("float", default=1.0)
    """a: factor of the products of hidden states and weight."""
    softcap: float | None = argument("float?", default=None)
    """c: bound of the logits, c tanh(x / c); None for no bound."""
    gradient: str = argument("str", default="exact")
    """"exact", or "sampled": unbiased estimates of the gradients."""
    samples: int = argument("int", default=256)
    """1/θ: entries of the softmax that a token's sampled gradients expect to keep, at most."""
    outputs: str = argument("str", is_public=False, default="")
    """What a call with reduction "outputs" returns, separated by commas."""

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
        """Whether they need the largest logit of all classes but the target."""
        return not OF_OTHERS.isdisjoint(self.output_names)

    @property
    def scales_exps(self) -> bool:
        """Whether each exponential has a factor that the backward alone knows."""
        return "entropy" in self.output_names

    @property
    def is_plain(self) -> bool:
        """Whether losses are plain cross entropies of the products of hidden states and weight."""
        return not (self.label_smoothing or self.z_loss or self.transforms_logits)

    @property
    def is_sampled(self) -> bool:
        """Whether gradients are unbiased estimates."""
        return self.gradient == "sampled"

    @property
    def scales_rows(self) -> bool:
        """Whether tokens' exponentials have factors beside upstream / T, of any sign."""
        return self.z_loss != 0

    @property
    def transforms_logits(self) -> bool:
        """Whether logits are not the products of hidden states and weight."""
        return self.logit_scale != 1 or self.softcap is not None

    def per_token(self) -> "LossOptions":
        """Return the same with a loss for each token."""
        return dataclasses.replace(self, reduction="none")

    def without_entropy(self) -> "LossOptions":
        """Return the options of a backward in which entropy has no gradient."""
        outputs = ",".join(name for name in self.output_names if name != "entropy")
        return dataclasses.replace(self, outputs=outputs)

    def check_entropy_gradient(self) -> None:
        """Raise NotImplementedError unless entropy, as an output, has a gradient."""
        option_checks.check_entropy_gradient(self.softcap, self.gradient)

    def check(self) -> None:
        """Raise ValueError for an argument out of its range."""
        if not self.outputs:
            checks.check_reduction(self.reduction)
        option_checks.check_outputs(self.output_names, self.softcap)
        option_checks.check_sampling(self.gradient, self.samples)
        option_checks.check_numbers(
            self.label_smoothing, self.z_loss, self.logit_scale, self.softcap
        )


@dataclass(frozen=True)
class TensorOptions(OperatorRecord):
    """Options that are tensors, on the device of the hidden states."""

    OF_CLASSES: ClassVar[tuple[str, ...]] = "linear_bias", "accumulate_into"
    """Those of which a rank of a group has the rows of its own classes."""

    linear_bias: Tensor | None = argument("Tensor?", default=None)
    """(V,) addend of the logits, before the softcap."""
    weight: Tensor | None = argument("Tensor?", default=None)
    """(V,) factor of each class's losses; of all ranks' classes."""
    token_weights: Tensor | None = argument("Tensor?", default=None)
    """(N,) factor of each token's loss; a token with 0 is ignored."""
    temperature: Tensor | None = argument("Tensor?", default=None)
    """() or (N,) divisor of the logits, after the softcap."""
    denominator: Tensor | None = argument("Tensor?", default=None)
    """() divisor of "mean"; None for the sum of the active tokens' weights."""
    accumulate_into: Tensor | None = argument("Tensor?", default=None)
    """(V, D) buffer to which dW is added; dW is not returned then."""
    grad_output: Tensor | None = argument("Tensor?", default=None)
    """() gradient that the loss's backward will get, so that a forward may add dW to the buffer."""
    target_indices: Tensor | None = argument("Tensor?", default=None)
    """(N, K) classes of each token's soft targets; without probabilities those of outputs."""
    target_probs: Tensor | None = argument("Tensor?", default=None)
    """(N, K) their probabilities, 0 of a class that does not count."""
    seed: Tensor | None = argument("Tensor?", is_public=False, default=None)
    """(2,) int32 seed of sampled gradients, drawn from torch's generator; None for exact ones."""
    weight_cast: Tensor | None = argument("Tensor?", is_public=False, default=None)
    """(V, D) a float32 weight in the dtype of 16-bit hidden states; its gradient is float32."""

    @cached_property
    def is_plain(self) -> bool:
        """Whether none is given."""
        return all(tensor is None for tensor in self.pack())

    def given(self) -> dict[str, Tensor]:
        """Return those that are given, by name."""
        if self.is_plain:
            return {}
        pairs = zip(self.names(), self.pack(), strict=True)
        return {name: x for name, x in pairs if x is not None}

    @property
    def scales_rows(self) -> bool:
        """Whether tokens differ in the factors of their losses or logits."""
        per_token = self.temperature is not None and self.temperature.ndim > 0
        factors = self.weight, self.token_weights, self.target_probs
        return per_token or any(x is not None for x in factors)

    @property
    def output_classes(self) -> int:
        """Classes of each token whose log-probabilities a call with reduction "outputs" returns."""
        return 1 if self.target_indices is None else self.target_indices.shape[-1]

    @property
    def soft_targets(self) -> dict[str, Tensor]:
        """The soft targets, by name; empty without any."""
        given = {"target_indices": self.target_indices, "target_probs": self.target_probs}
        return {name: x for name, x in given.items() if x is not None}

    def check(self, h: Tensor, w: Tensor, y: Tensor, options: LossOptions, vocab: int) -> None:
        """Raise TypeError or ValueError that names the argument; `vocab` is that of all ranks."""
        if self.denominator is not None:
            option_checks.check_denominator(self.denominator, h, options.reduction)
        if self.linear_bias is not None:
            option_checks.check_bias(self.linear_bias, h, w)
        if self.weight is not None:
            option_checks.check_factors("weight", self.weight, h, (vocab,))
        if self.token_weights is not None:
            option_checks.check_factors("token_weights", self.token_weights, h, y.shape)
        if self.temperature is not None:
            option_checks.check_temperature(self.temperature, h, y.shape)
        if self.accumulate_into is not None:
            option_checks.check_buffer(self.accumulate_into, h, w, self.linear_bias)
        if self.grad_output is not None:
            adds = self.accumulate_into is not None
            option_checks.check_grad_output(self.grad_output, h, options.reduction, adds)

    def computed_weight(self, w: Tensor) -> Tensor:
        """Return the weight that products are computed with, where w (V, D) was given."""
        return w if self.weight_cast is None else self.weight_cast

    def prepared(self, h: Tensor) -> "TensorOptions":
        """Return the same with tokens' values as vectors (N,), scalars as () on h's device."""
        weights, temperature = self.token_weights, self.temperature
        if weights is not None:
            weights = weights.reshape(-1)
        if temperature is not None and temperature.ndim:
            temperature = temperature.reshape(-1)
        scalars = {"denominator": self.denominator, "grad_output": self.grad_output}
        for name, x in scalars.items():
            if x is not None and (x.ndim or x.device != h.device):
                scalars[name] = scalar_beside(x, h)
        soft = {name: x.reshape(-1, x.shape[-1]) for name, x in self.soft_targets.items()}
        if "target_indices" in soft:  # of any integers; kernels read contiguous rows
            soft = {name: x.contiguous() for name, x in soft.items()}
            soft["target_indices"] = soft["target_indices"].long()
        return dataclasses.replace(
            self,
            token_weights=weights,
            temperature=temperature,
            **scalars,
            **soft,
        )


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

    group: str | None = argument("str?", default=None)
    """Name of the process group; None on one device."""
    shards: list[int] | None = argument("int[]?", default=None)
    """Rows of every rank's weight; None if they are equal."""
    sequence_parallel: bool = argument("bool", default=False)
    """Whether h holds this rank's equal share of the tokens."""

    def ranks(self) -> int:
        """Return the number of ranks that share the call; raise for what needs a group."""
        return checks.rank_count(self.group, self.shards, self.sequence_parallel)

    def vocab(self, w: Tensor) -> int:
        """Return the classes of all ranks' weights, w (V, D) being here."""
        return sum(self.shards) if self.shards else w.shape[0] * self.ranks()

    def check(self, w: Tensor) -> None:
        """Raise ValueError unless `shards` are the rows of all ranks' weights, w being here."""
        checks.check_shards(self.group, self.shards, w)


@dataclass(frozen=True)
class StepOptions(OperatorRecord):
    """What the plan of a training step depends on, beside sizes and the options of the loss."""

    budget: int = argument("int")
    """Bytes that the step may take beyond inputs and gradients."""
    grad_hidden: bool = argument("bool")
    """Whether dX is computed."""
    grad_weight: bool = argument("bool")
    """Whether dW is computed."""
    grad_bias: bool = argument("bool")
    """Whether the gradient of the bias is computed."""
    copied_hidden: int = argument("int", default=0)
    """Bytes per element of the hidden states of which the operator gets a copy; 0 if of none."""
    copied_weight: int = argument("int", default=0)
    """The same of the weight."""


OPTIONS = LossOptions, TensorOptions, Sharding
"""The records of a call, in the order of the operators' arguments."""
