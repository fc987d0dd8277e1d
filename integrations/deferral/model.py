"""`defer`, `undefer` and `deferral_report`: the heads of a model."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from types import MethodType
from typing import Any

import torch
from torch import nn

from cutefce.integrations.deferral.head import DeferringLinear
from cutefce.integrations.deferral.logits import DeferredLogits, make_outputs
from cutefce.integrations.deferral.report import Counts, DeferralReport
from cutefce.integrations.options import DEFAULTS, checked_options
from cutefce.ops import torch_compat
from cutefce.ops.interface.arguments import check_types, refuse
from cutefce.ops.interface.checks import DTYPES
from cutefce.ops.operators.context import PLAIN_TYPES

READ = (
    "logit_scale",
    "softcap",
    "linear_bias",
    "weight",
    "reduction",
    "ignore_index",
    "label_smoothing",
)
"""Options of the loss that a deferred head finds in what the model does."""
FORWARDS = nn.Linear.forward, DeferringLinear.forward


def defer(
    model: nn.Module,
    *,
    evaluation: bool = False,
    gradient: str = "exact",
    samples: int = 256,
    workspace: int | str | None = None,
    **removed: Any,
) -> None:
    """Have the head of a model answer with deferred logits, so that its own loss is fused.

    In training, the head returns an object that stands for its logits.  It records what the model
    does to them (scales, bounds, casts, views, slices of tokens and classes), and turns
    `torch.nn.functional.cross_entropy`, of the model or of the caller, into the fused call, with
    the same loss and dtype.  Anything else makes the logits and goes on as before.

    Call it before `fully_shard` wraps the model; before or after an adapter, DDP or torch.compile.

    Args:
        model: a model of transformers or another with `get_output_embeddings`, or the head itself,
            an `nn.Linear` with a floating-point weight (V, D), with or without bias.
        evaluation: whether logits are deferred in evaluation and without gradients too, for
            callers that use the loss alone, as `Trainer` without `compute_metrics`.
        gradient: "exact" or "sampled", as of `linear_cross_entropy`.
        samples: expected number of entries of a token, at most, with sampled gradients.
        workspace: peak memory in bytes, "min", "max" or None, as of `linear_cross_entropy`.
        **removed: other arguments, which are refused.

    Raises:
        ValueError: for another `gradient`, or `samples` or `workspace` out of their range.
        TypeError: for an argument of another type, or a head that is not a plain `nn.Linear`, as
            where it is quantized.
        RuntimeError: if it is deferred already.
    """
    check_types(evaluation=evaluation)
    of_model = {name: x for name, x in removed.items() if name in READ}
    refuse(of_model, where=": defer reads it from the model")
    refuse(removed, (*DEFAULTS, "evaluation"))
    loss_options = checked_options(gradient, samples, workspace)
    owner = _owner(model)
    heads = [*_heads(owner)]
    for head in heads:
        _check_head(head)
    with suppress(ImportError, AttributeError):
        from einops import _backends

        _backends._type2backend[DeferredLogits] = _backends.get_backend(torch.empty(0))
    for head in heads:
        _defer_head(head, evaluation, loss_options)
    if owner not in heads and make_outputs not in owner._forward_hooks.values():
        owner.register_forward_pre_hook(defer_copies)
        owner.register_forward_hook(make_outputs, prepend=True)


def undefer(model: nn.Module) -> None:
    """Have deferred heads return logits again.

    Raises:
        TypeError: for what is no module.
        RuntimeError: if the model has none.
    """
    for head in _deferred(model):
        del head.counts, head.in_evaluation, head.loss_options
        head.__dict__.pop("runner", None)
        _set_forward(head, nn.Linear)
        if type(head) is DeferringLinear:
            head.__class__ = nn.Linear  # type: ignore[assignment]
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in [*hooks.items()]:
                if hook in (defer_copies, make_outputs):
                    del hooks[key]


def deferral_report(model: nn.Module) -> DeferralReport:
    """Return how many losses were fused since `defer`, and what needed full logits instead.

    Raises:
        TypeError: for what is no module.
        RuntimeError: if no head of the model is deferred.
    """
    counts: Counter[str] = sum((head.counts.found for head in _deferred(model)), Counter())
    return DeferralReport(counts.pop("", 0), dict(counts))


def defer_copies(model: Any, arguments: Any) -> None:
    """Defer the copies of a deferred head that adapters of peft made since: a forward pre-hook.

    Most are copies of the head, and deferred as it is; one with a tied weight is made anew.
    """
    head = None if torch.compiler.is_compiling() else model.get_output_embeddings()
    copies, own = getattr(head, "modules_to_save", None), getattr(head, "original_module", None)
    if isinstance(copies, nn.ModuleDict) and isinstance(own, DeferringLinear) and own.is_deferring:
        for copy in copies.values():
            if type(copy) is nn.Linear:
                _defer_head(copy, own.in_evaluation, own.loss_options)


def _defer_head(head: Any, evaluation: bool, loss_options: dict[str, Any]) -> None:
    head.__class__ = DeferringLinear
    head.counts, head.in_evaluation, head.loss_options = Counts(), evaluation, loss_options
    _set_forward(head, DeferringLinear)


def _set_forward(head: Any, kind: type[nn.Linear]) -> None:
    """Have a head call the forward of `kind` where accelerate has kept the one of before.

    Its hooks keep the forward that they call; removed hooks leave it in the module's dictionary.
    """
    if "_old_forward" in head.__dict__:
        head._old_forward = MethodType(kind.forward, head)
    if getattr(head.__dict__.get("forward"), "__func__", None) in FORWARDS:
        del head.__dict__["forward"]


def _deferred(model: nn.Module) -> list[DeferringLinear]:
    _check_module(model)
    found = [m for m in model.modules() if isinstance(m, DeferringLinear) and m.is_deferring]
    if not found:
        raise RuntimeError(
            "model: got no deferred head, expected a call of cutefce.defer before, or an "
            "integration's enable() before the model was made; and again after its head was "
            "replaced, as by resize_token_embeddings"
        )
    return found


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {model!r}, expected an nn.Module")


def _owner(model: Any) -> Any:
    """Return the module with `get_output_embeddings` of a model, or the head that it is."""
    _check_module(model)
    owner = model
    while not isinstance(owner, nn.Linear) and not hasattr(type(owner), "get_output_embeddings"):
        inner = getattr(owner, "module", None)  # of DDP, DeepSpeed's engine and the like
        if isinstance(inner, nn.Module):
            owner = inner
        elif hasattr(owner, "get_output_embeddings"):
            break
        else:
            raise TypeError(
                f"model: got {type(model).__name__}, expected one with get_output_embeddings, or "
                "its head, an nn.Linear"
            )
    return owner


def _heads(owner: Any) -> Iterator[Any]:
    """Yield the output embeddings of a module, without their adapters."""
    head = owner if isinstance(owner, nn.Linear) else owner.get_output_embeddings()
    while isinstance(getattr(head, "base_layer", None), nn.Module):
        head = head.base_layer  # of an adapter of peft
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):  # one for each adapter of peft
        yield from copies.values()
        head = head.original_module
    yield head


def _check_head(head: Any) -> None:
    """Raise TypeError or RuntimeError unless logits of the module can be deferred."""
    if isinstance(head, DeferringLinear) and head.is_deferring:
        raise RuntimeError("model: got a head that is deferred already, expected one call of defer")
    if head is None:
        raise TypeError("model: got one without output embeddings, expected a language model")
    weight: Any = getattr(head, "weight", None)
    if type(head) not in (nn.Linear, DeferringLinear) or not _has_own_forward(head):
        got = f"{type(head).__module__}.{type(head).__name__}"
        got += " with another forward" * ("forward" in getattr(head, "__dict__", ()))
    elif not torch_compat.is_dtensor(weight) and type(weight) not in PLAIN_TYPES:
        got = f"a weight of {type(weight).__name__}"
    elif weight.dtype not in DTYPES:
        got = f"a weight of {weight.dtype}"
    else:
        return
    raise TypeError(
        f"head: got {got}, expected a plain torch.nn.Linear with a floating-point weight: not "
        "quantized, parametrized or wrapped, and not yet sharded"
    )


def _has_own_forward(head: nn.Linear) -> bool:
    """Whether the forward of a head is that of its class, between hooks of accelerate or not."""
    kept = "_old_forward" if hasattr(head, "_hf_hook") else "forward"
    forward = head.__dict__.get(kept)
    return forward is None or getattr(forward, "__func__", None) in FORWARDS
