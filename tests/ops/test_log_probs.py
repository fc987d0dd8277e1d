"""Log-probabilities and other values of tokens: as accurate as from all logits."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.backends import Backend, on_backends
from tests.support.layouts import WINDOWS, Layout, pinned, several_tiles, tiles_of
from tests.support.options import OptionsCase, options_case
from tests.support.outputs import (
    OUTPUTS,
    UPSTREAMS,
    ValuesCase,
    row_values,
    values_case,
)
from tests.support.reference import are_same, logits_case, random_case
from tests.support.tiers import pairwise, rest_slow

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FACTORS = ["linear_bias", "logit_scale", "temperature (N,)"]
TRANSFORMS: dict[str, list[str]] = {
    "plain": [],
    "linear_bias": ["linear_bias"],
    "logit_scale": ["logit_scale"],
    "negative logit_scale": ["negative logit_scale"],
    "temperature": ["temperature"],
    "temperature (N,)": ["temperature (N,)"],
    "softcap": ["softcap"],
    "factors": FACTORS,
    "all": [*FACTORS, "softcap"],
    "logit_floor": ["logit_floor"],
    "factors and logit_floor": [*FACTORS, "logit_floor"],
    "kept_classes": ["kept_classes"],
    "all and kept_classes": [*FACTORS, "softcap", "kept_classes"],
    "all and logit_floor": [*FACTORS, "softcap", "logit_floor"],
}
ASKED = {"nothing": (), "all": OUTPUTS, "lse and entropy": ("lse", "entropy")}
ASKED |= {name: (name,) for name in OUTPUTS}
CLASSES = {"a class": None, "2 classes": 2, "7 classes": 7}
OR_NONE = CLASSES | {"no class": 0}


@pairwise(
    names=TRANSFORMS,
    classes=OR_NONE,
    outputs=ASKED,
    kind=UPSTREAMS,
    dtype=DTYPES,
    workspace=["max", "min", 100_000],
)
def test_each_output(
    names: list[str],
    classes: int | None,
    outputs: tuple[str, ...],
    kind: str,
    dtype: torch.dtype,
    workspace: int | str,
    small_tiles: PortableTiles,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    more: dict[str, Any] = {"dtype": dtype, "device": device, "kind": kind, "outputs": outputs}
    # few classes are kept, whose roundings are average ones of many tokens alone
    sizes = several_tiles("cuda") if "kept_classes" in names else tiles_of(request, device)
    x = values_case(names, classes, *sizes, **more)
    values, gradients = x.ours(workspace=workspace)
    x.check((values, gradients))
    asked = {name for name in OUTPUTS if getattr(values, name) is not None}
    assert asked == set(x.outputs)
    with torch.no_grad():
        for a, b in zip(values, x.values(x.own.leaves), strict=True):
            assert a is b is None or not b.requires_grad
            torch.testing.assert_close(a if a is None else a.detach(), b)


@on_backends(
    float32=True,
    emulated=1,
    layout=WINDOWS,
    names={name: TRANSFORMS[name] for name in ("plain", "factors", "all", "all and logit_floor")},
    outputs=[("lse",), ("entropy",), OUTPUTS],
    classes=OR_NONE,
)
def test_every_layout(
    layout: Layout,
    names: list[str],
    outputs: tuple[str, ...],
    classes: int | None,
    backend: Backend,
) -> None:
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    x = values_case(names, classes, backend.tokens, 64, 333, outputs=outputs, **how)
    with pinned(layout):
        got = x.ours()
    x.check(got)
    if backend.selects:
        backend.hide(x.own.case.h, x.ignored)
        with pinned(layout):
            again = x.ours()
        for a, b in zip((*again[0], *again[1]), (*got[0], *got[1]), strict=True):
            assert a is b is None or torch.equal(a, b), "what ignored rows hold does not matter"


SIZE = st.integers(1, 70)
CALLS = st.fixed_dictionaries(
    {
        "names": st.sampled_from(list(TRANSFORMS.values())),
        "classes": st.sampled_from([None, 0, 3]),
        "outputs": st.sets(st.sampled_from(OUTPUTS)),
        "sizes": st.tuples(SIZE, SIZE, SIZE | st.just(1030)),
        "ignored": st.sampled_from([0.0, 0.5, 1.0]),
        "workspace": st.one_of(st.sampled_from(["min", "max", None]), st.integers(0, 1 << 20)),
        "seed": st.integers(0, 2**31),
    }
)


@given(CALLS)
def test_any_call(call: dict[str, Any]) -> None:
    more = {name: call[name] for name in ("ignored", "seed")}
    more |= {"outputs": (*call["outputs"],), "dtype": torch.float64}
    x = values_case(call["names"], call["classes"], *call["sizes"], **more)
    x.check(x.ours(workspace=call["workspace"]))


@pairwise(
    given=[(False, 0.1), (False, 2), (False, 8), (True, 2), (True, 8)], workspace=["min", "max"]
)
def test_gradients_that_cancel(
    given: tuple[bool, float], workspace: str, small_tiles: PortableTiles, device: str
) -> None:
    """Of a divergence whose teacher is close to the student p - q is smaller than a rounding."""
    entropy, logit_std = given
    for dtype in (torch.bfloat16, torch.float16):
        case = random_case(200, 40, 61, dtype=dtype, device=device, logit_std=logit_std, ignored=0)
        logits = case.h.float() @ case.w.float().t()
        teacher = (logits + 0.1 * torch.randn_like(logits)).softmax(1).topk(40, 1)
        upstream = {"log_probs": -teacher.values.double()}
        if entropy:
            upstream["entropy"] = 0.01 * torch.randn(200, dtype=torch.float64, device=device)
        outputs = (*(name for name in upstream if name != "log_probs"),)
        x = ValuesCase(OptionsCase(case, {}), teacher.indices, outputs, upstream)
        x.check(x.ours(workspace=workspace))


@pairwise(
    height=[33.0, 110.0, 1e4],
    dtype=[torch.float32, torch.bfloat16],
    workspace=["max", "min"],
    place=[None, 0, 2, -1],
)
def test_rows_with_a_class_far_above(
    height: float,
    dtype: torch.dtype,
    workspace: str,
    place: int | None,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    """Be it the first of a token's classes, another one, or none of them."""
    torch.manual_seed(1)
    classes = torch.rand(40, 96).topk(5, 1).indices
    index = classes[:, 0] if place is None else classes
    at = torch.full((40,), 96) if place in (None, -1) else classes[:, place]
    logits = torch.randn(40, 97).to(dtype)
    rows = torch.arange(0, 40, 2 if place is None else 1)
    logits[rows, at[rows]] = torch.tensor(height, dtype=dtype)
    outputs = OUTPUTS if place is None else ("lse",)
    upstream = {"log_probs": torch.randn(index.shape), "lse": torch.randn(40)}
    upstream |= {"entropy": torch.randn(40)} if place is None else {}
    upstream = {name: up.double().to(device) for name, up in upstream.items()}
    own = OptionsCase(logits_case(logits, classes[:, 0], device), {})
    x = ValuesCase(own, index.to(device), outputs, upstream)
    (values, gradients), (wanted, exact) = x.ours(workspace=workspace), x.exact()
    assert bool((values.log_probs <= 0).all())
    for name in ("log_probs", *outputs):
        got, want = getattr(values, name), getattr(wanted, name)
        torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-5, atol=1e-5)
    # of stored exponentials and rounded results, and of the rounding of a logit's distance
    limit = 2 * torch.finfo(dtype).eps
    limit += height / 2 * torch.finfo(torch.float32).eps if place is None else 0
    for a, b in zip(gradients, exact, strict=True):
        assert float((a.double() - b).norm() / b.norm()) <= limit


def test_equal_logits_have_the_lowest_class_or_the_target(device: str) -> None:
    logits = torch.zeros(4, 70)
    logits[1, [9, 40]] = 2.0
    logits[2, [9, 40]] = 2.0
    case = logits_case(logits, torch.tensor([69, 40, 3, -100]), device)
    values = cutefce.linear_log_probs(
        case.h, case.w, case.y, outputs=("is_top1", "argmax"), workspace="min"
    )
    assert values.is_top1 is not None and values.argmax is not None
    assert values.argmax.tolist() == [69, 40, 9, 0]
    assert values.is_top1.tolist() == [True, True, False, False]


@pytest.mark.parametrize("classes", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_tokens_or_none_that_count(dtype: torch.dtype, classes: int | None, device: str) -> None:
    more: dict[str, Any] = {"dtype": dtype, "device": device, "outputs": OUTPUTS}
    for tokens in (0, 5):
        x = values_case(["linear_bias"], classes, tokens, 8, 40, **more)
        x.index.fill_(-100)
        values, gradients = x.ours()
        assert not any(value is not None and bool(value.any()) for value in values)
        assert not any(bool(gradient.any()) for gradient in gradients)


def test_shapes_and_dtypes(device: str) -> None:
    """Values have target's shape; float32, or float64 for float64 inputs."""
    for classes, ignored in ((None, -100), (5, -100), (5, -1), (5, 7)):
        x = values_case([], classes, 60, 16, 100, device=device)
        h, w, index = x.own.case.h, x.own.case.w, x.index
        index[(index == 7) | (index == -100)] = ignored
        name = "target" if classes is None else "target_indices"
        more: dict[str, Any] = {"outputs": (*OUTPUTS[:4], "argmax"), "ignore_index": ignored}
        flat = cutefce.linear_log_probs(h, w, **more | {name: index})
        index = index.reshape(3, 4, 5, *index.shape[1:]).short()
        shaped = cutefce.linear_log_probs(h.reshape(3, 4, 5, 16), w, **more | {name: index})
        assert shaped.log_probs.shape == index.shape
        for a, b in zip(shaped, flat, strict=True):
            if a is not None and b is not None:
                assert are_same(a.flatten(), b.flatten())
        assert flat.lse is not None and flat.lse.shape == (60,)
    for dtype in DTYPES:
        values = cutefce.linear_log_probs(h.to(dtype), w.to(dtype), x.own.case.y, outputs=OUTPUTS)
        wide = torch.promote_types(dtype, torch.float32)
        kinds = [value.dtype for value in values if value is not None]
        assert kinds == [*[wide] * 5, torch.bool, torch.long, torch.long]


def test_one_class_is_the_plain_call_and_the_loss(device: str) -> None:
    case = random_case(150, 64, 333, dtype=torch.bfloat16, device=device)
    results = []
    kinds: list[dict[str, Any]] = [{"target": case.y}, {"target_indices": case.y[:, None]}]
    for target in kinds:
        h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
        found = cutefce.linear_log_probs(h, w, outputs=("entropy",), **target)
        assert found.entropy is not None
        values = found.log_probs.flatten(), found.entropy
        total = (values[0] * case.upstream).sum() + values[1].sum()
        results.append([*values, *torch.autograd.grad(total, (h, w))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    loss = cutefce.linear_cross_entropy(case.h, case.w, case.y, reduction="none")
    torch.testing.assert_close(results[0][0].detach(), -loss)


def test_a_class_that_cannot_be(device: str) -> None:
    """A logit of -inf is log p = -inf, be it the first class or not."""
    bias = torch.zeros(5, device=device)
    bias[0] = -torch.inf
    h, w = torch.randn(2, 8, device=device), torch.randn(5, 8, device=device)
    index = torch.tensor([[0, 1], [1, 0]], device=device)
    found = cutefce.linear_log_probs(h, w, target_indices=index, linear_bias=bias).log_probs
    torch.testing.assert_close(found, (h @ w.t() + bias).log_softmax(1).gather(1, index))


POLICY: dict[str, Callable[[Any], Tensor]] = {
    "policy gradient": lambda v: -(v.log_probs - v.log_probs.detach()).exp().sum(),
    "entropy bonus": lambda v: -(v.log_probs.sum() + 0.01 * v.entropy.sum()),
    "z-loss": lambda v: -v.log_probs.mean() + 1e-3 * v.lse.square().mean(),
}


@pairwise(
    objective=POLICY,
    train=[p for p in itertools.product([True, False], repeat=3) if any(p)],
    classes=CLASSES,
)
def test_objectives_and_frozen_inputs(
    train: tuple[bool, ...],
    objective: Callable[[Any], Tensor],
    classes: int | None,
    device: str,
) -> None:
    names = ["linear_bias", "temperature"]
    more: dict[str, Any] = {"dtype": torch.float64, "device": device}
    x = values_case(names, classes, 60, 16, 100, outputs=("lse", "entropy"), **more)
    leaves = (*(leaf.requires_grad_(on) for leaf, on in zip(x.own.leaves, train, strict=True)),)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    logits = x.own.logits(leaves)
    torch.testing.assert_close(
        torch.autograd.grad(objective(x.values(leaves)), trained),
        torch.autograd.grad(objective(row_values(logits, x.index)), trained),
    )


@pairwise(classes=CLASSES, gradient=["exact", "sampled"], use_reentrant=[False, True])
def test_outputs_are_checkpointed(
    classes: int | None, gradient: str, use_reentrant: bool, device: str
) -> None:
    outputs = ("lse",) if gradient == "sampled" else ("lse", "entropy")
    x = values_case([], classes, 20, 8, 50, outputs=outputs, device=device)

    def total(*leaves: Tensor) -> Tensor:
        found = x.values(leaves, gradient=gradient)
        return torch.stack([value.sum() for value in found if value is not None]).sum()

    results = []
    for evaluate in (total, functools.partial(checkpoint, total, use_reentrant=use_reentrant)):
        leaves = x.own.leaves
        torch.manual_seed(1)
        evaluate(*leaves).backward()
        results.append([leaf.grad for leaf in leaves])
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and are_same(a, b)


def test_hooks_unpack_what_is_saved_once(device: str) -> None:
    case, unpacked = options_case([], 20, 8, 50, device=device), list[int]()
    h, w = case.leaves

    def unpack(saved: tuple[int, Tensor]) -> Tensor:
        unpacked.append(saved[0])
        return saved[1]

    numbers = itertools.count()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (next(numbers), x), unpack):
        found = cutefce.linear_log_probs(h, w, case.case.y, outputs=("entropy",))
    torch.autograd.grad(found.log_probs.sum(), (h, w))
    assert unpacked and len(set(unpacked)) == len(unpacked)


def test_compiled_entropy_with_softcap_is_detached(device: str) -> None:
    """A graph has gradients of all its outputs; that of this one is refused."""
    x = options_case(["softcap"], 30, 16, 100, device=device)

    def step(h: Tensor, w: Tensor, y: Tensor, detaches: bool) -> tuple[Tensor, Tensor]:
        values = cutefce.linear_log_probs(h * 2, w, y, outputs=("entropy",), softcap=2.5)
        entropy = values.entropy
        assert entropy is not None
        return values.log_probs, entropy.detach() if detaches else entropy

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, step, compiled):
        h, w = x.leaves
        log_probs, entropy = function(h, w, x.case.y, True)
        results.append([log_probs, entropy, *torch.autograd.grad(log_probs.sum(), (h, w))])
    for fast, eager in zip(results[2], results[1], strict=True):
        assert are_same(fast, eager)
    with pytest.raises(Exception, match="softcap: got one with 'entropy' in outputs"):
        compiled(x.leaves[0], x.leaves[1], x.case.y, False)


@pytest.mark.parametrize("outputs", rest_slow([",".join(OUTPUTS), "lse", "entropy"]))
@pytest.mark.parametrize("classes", [None, 5])
def test_opcheck(classes: int | None, outputs: str, device: str) -> None:
    x = values_case(FACTORS, classes, 20, 8, 50, device=device)
    leaves = x.own.leaves
    options = {"outputs": outputs, **x.own.with_leaves(leaves)}
    if classes:
        outputs = outputs.replace("is_top1,", "").replace(",rank", "")
        options |= {"target_indices": x.index, "outputs": outputs}
    given = leaves[0], leaves[1], None if classes else x.index
    torch.library.opcheck(torch.ops.cutefce.loss_and_stats.default, given, options)


def counted(run: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return run(h)


def checkpointed(run: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, [])
    return cast(Tensor, checkpoint(run, h, use_reentrant=False, context_fn=contexts))


def compiled(run: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    torch.compiler.reset()
    return torch.compile(run, fullgraph=True, backend="aot_eager")(h)


WATCHED = {"counted": counted, "checkpointed": checkpointed, "compiled": compiled}


@pytest.mark.parametrize("watched", rest_slow(WATCHED, default=2))
def test_kept_classes_are_checked_wherever_they_have_values(
    watched: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
) -> None:
    x = random_case(4, 8, 5, dtype=torch.float32)
    x.y[:] = torch.tensor([0, 1, 2, 3])

    def of(kept: int) -> Callable[[Tensor], Tensor]:
        classes = torch.tensor([[0, 1], [1, 2], [2, -1], [3, kept]])

        def run(h: Tensor) -> Tensor:
            return cutefce.linear_log_probs(h, x.w, x.y, kept_classes=classes).log_probs

        return run

    h = x.h.requires_grad_()
    assert are_same(watched(of(4), h), of(4)(h))
    for wrong in (5, -2):
        message = f"kept_classes: got {wrong} at token 3, expected -1 or 0 <= class < 5"
        with pytest.raises(IndexError, match=message):
            watched(of(wrong), h)


def test_opcheck_of_kept_classes(device: str) -> None:
    y = torch.tensor([3, -100], device=device)
    kept = torch.tensor([[4, 4, -1], [9, 2, 1]], device=device)
    operands = y, kept, -100, 5
    torch.library.opcheck(torch.ops.cutefce.listed_classes.default, operands)
    want = torch.tensor([[3, -100, 4, -100], [-100, -100, -100, -100]], device=device)
    assert torch.equal(torch.ops.cutefce.listed_classes(*operands), want)


@pytest.mark.gpu
def test_bad_values_are_nan_rows_on_a_gpu() -> None:
    x = values_case([], 5, 40, 16, 50, device="cuda")
    good = x.ours()[0].log_probs.detach()
    x.index[3, 1], x.index[5, 0] = 50, -7
    values, (dx, _) = x.ours()
    bad = torch.zeros(40, dtype=torch.bool, device="cuda")
    bad[[3, 5]] = True
    assert values.log_probs[bad][x.index[bad] != -100].isnan().all()
    assert dx[bad].isnan().all()
    assert torch.equal(values.log_probs[~bad], good[~bad])
