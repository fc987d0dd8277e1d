"""A valid call of each public function, of which `tests.errors.rows` makes wrong ones."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutefce

LOSS, LOG_PROBS = cutefce.linear_cross_entropy, cutefce.linear_log_probs
MODULE = cutefce.LinearCrossEntropyLoss
OPERATORS = torch.ops.cutefce


@dataclass(frozen=True)
class Call:
    """A function with valid arguments by name."""

    function: Callable[..., Any]
    valid: dict[str, Any]
    expected: Any
    """What it returns for them: of tensors, what torch does, with its graph."""
    leaves: tuple[Tensor, Tensor]
    """Those of the graph: hidden states and weight."""
    names: frozenset[str]
    """The arguments that it takes."""

    def __call__(self, **change: Any) -> Any:
        """Call the function with valid arguments but for `change`."""
        return self.function(**(self.valid | change))

    @functools.cached_property
    def right(self) -> tuple[Any, ...]:
        """What the valid call returned first, with its gradients."""
        return self.outcome()

    def outcome(self) -> tuple[Any, ...]:
        """Return what the valid call returns, and its gradients if it has any."""
        return with_gradients(self(), self.leaves)


def with_gradients(result: Any, leaves: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    """Return the result and the gradients of its sum, if it has any."""
    if not isinstance(result, Tensor) or not result.requires_grad:
        return (result,)
    gradients = torch.autograd.grad(result.sum(), leaves, retain_graph=True)
    return result.detach(), *gradients


@functools.cache
def calls_on(device: str) -> dict[str, Call]:
    """Return the calls by name, of 4 tokens, 8 features and 10 classes, on a device."""
    torch.manual_seed(0)
    h = torch.randn(4, 8).to(device).requires_grad_()
    w = nn.Parameter(torch.randn(12, 8).to(device)[1:11])
    y = torch.tensor([0, 1, 2, -100], device=device)
    indices, probs = torch.randint(10, (4, 3)).to(device), torch.rand(4, 3).to(device)
    teacher_h, teacher_w = torch.randn(4, 6).to(device), torch.randn(10, 6).to(device)

    logits, is_active = h @ w.t(), y >= 0
    log_p, log_q = logits.log_softmax(-1), (teacher_h @ teacher_w.t()).log_softmax(-1)
    loss = F.cross_entropy(logits, y)
    of_classes = log_p.gather(1, indices)
    of_targets = torch.where(is_active, log_p.gather(1, y.clamp(min=0)[:, None])[:, 0], 0)
    kl = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)[is_active].mean()

    head: dict[str, Any] = {"input": h, "linear_weight": w}
    hard, classes = head | {"target": y}, head | {"target_indices": indices}
    soft = classes | {"target_probs": probs}
    sides: dict[str, Any] = {"student_input": h, "student_weight": w, "target": y}
    sides |= {"teacher_input": teacher_h, "teacher_weight": teacher_w}
    of_module = {"in_features": 8, "num_classes": 10, "input": h, "target": y}
    of_loss, of_log_probs = _names(LOSS), _names(LOG_PROBS)
    of_operator = frozenset(x.name for x in OPERATORS.loss.default._schema.arguments)
    not_of_positions = {"target_indices", "target_probs", "accumulate_into", "grad_output"}

    def call(function: Any, valid: dict[str, Any], expected: Any, *names: frozenset[str]) -> Call:
        taken = names[0] if names else _names(function)
        return Call(function, valid, expected, (h, w), taken)

    return {
        "loss": call(LOSS, hard, loss),
        "loss without gradients": call(torch.no_grad()(LOSS), hard, loss),
        "loss of K dimensions": call(_of_positions, hard, loss, of_loss - not_of_positions),
        "loss of soft targets": call(LOSS, soft, -(of_classes * probs).sum() / 4),
        "module": call(
            functools.partial(_module, w), of_module, loss, _names(MODULE, MODULE.forward)
        ),
        "operator": call(OPERATORS.loss, hard, loss, of_operator),
        "log_probs": call(_log_probs, hard, of_targets, of_log_probs),
        "log_probs of classes": call(_log_probs, classes, of_classes, of_log_probs),
        "operator of log_probs": call(
            _operator_of_log_probs, hard, of_targets, of_operator & of_log_probs
        ),
        "divergence": call(cutefce.linear_divergence, sides, kl),
        "plan": call(cutefce.plan, head, cutefce.plan(**head)),
        "plan_divergence": call(cutefce.plan_divergence, sides, cutefce.plan_divergence(**sides)),
        "backend_for": call(cutefce.backend_for, head, cutefce.backend_for(**head)),
        "set_strict": call(cutefce.set_strict, {"enabled": False}, None),
        "defer": call(functools.partial(_deferred, h, w, y), {}, loss, _names(cutefce.defer)),
    }


def _names(*functions: Callable[..., Any]) -> frozenset[str]:
    parameters = [x for f in functions for x in inspect.signature(f).parameters.values()]
    names = {x.name for x in parameters if x.kind != x.VAR_KEYWORD}
    return frozenset(names - {"self"})


def _log_probs(**arguments: Any) -> Tensor:
    return LOG_PROBS(**arguments).log_probs


def _operator_of_log_probs(**arguments: Any) -> Any:
    return OPERATORS.loss_and_stats(outputs="lse", **arguments)[0]


def _of_positions(**arguments: Any) -> Any:
    """Return a loss of two positions, each of which has the tensors of a plain loss."""
    for name in ("linear_weight", "linear_bias", "target", "token_weights", "temperature"):
        x = arguments.get(name)
        if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested and x.ndim:
            arguments[name] = torch.stack([x, x], 1)
    return LOSS(**arguments)


def _module(head_weight: nn.Parameter, /, **arguments: Any) -> Any:
    """Return the loss of a module of this weight; it is made and called with `arguments`."""
    of_call = _names(MODULE.forward) & arguments.keys()
    given = {name: arguments.pop(name) for name in of_call}
    module = MODULE(**arguments, device=head_weight.device)
    module.linear.weight = head_weight
    return module(**given)


def _deferred(h: Tensor, w: nn.Parameter, y: Tensor, /, **options: Any) -> Any:
    """Return the loss of the logits of a deferred head."""
    head = nn.Linear(8, 10, bias=False, device=h.device)
    head.weight = w
    cutefce.defer(head, **options)
    return F.cross_entropy(head(h), y)
