"""SkyRL's log-probabilities and entropies of hidden states, against its own functions."""

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cutefce.integrations import skyrl as integration
from tests.support.fused_calls import fused_calls, sampled_calls
from tests.support.packages import module_without
from tests.support.ranks import Ranks, group

pytest.importorskip("megatron.core")
model_utils = module_without(integration.MODULE, "skyrl.backends")
NAMES = "_fused_lm_head_logprob_apply", "_fused_vocab_parallel_entropy_from_hidden"
OWN = {name: getattr(model_utils, name) for name in NAMES}
importer: Any = ModuleType("skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper")
importer.entropy = OWN[NAMES[1]]
sys.modules[importer.__name__] = importer
integration.enable()

D, V, T = 16, 62, 0.7
LENGTHS = 7, 4, 5


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (S, 1, D) of all sequences, a weight (V, D) and token ids (S,)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sum(LENGTHS), 1, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    return hidden, weight, torch.randint(V, (sum(LENGTHS),), generator=generator)


def step(count: int, packed: bool, ours: bool) -> tuple[list[Tensor], int]:
    """Return values and gradients of this rank, and the number of fused calls."""
    from megatron.core.tensor_parallel import mappings

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    all_hidden, all_weight, tokens = inputs()
    tp, rank = group(count), group(count).rank()
    rows, weight = (x.chunk(count)[rank].clone().requires_grad_() for x in (all_hidden, all_weight))
    hidden = mappings.gather_from_sequence_parallel_region(
        rows, tensor_parallel_output_grad=True, group=tp
    )
    hidden = hidden.transpose(0, 1).contiguous()
    first = rank * len(weight)
    share = {"vocab_start_index": first, "vocab_end_index": first + len(weight)}
    options: dict[str, Any] = {"chunk_size": 3, "temperature": T}
    is_own = mock.patch.multiple(model_utils, **OWN)
    with nullcontext() if ours else is_own, fused_calls(integration, "linear_log_probs") as calls:
        if packed:
            ends = torch.tensor([0, *LENGTHS]).cumsum(0)
            mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
            values = model_utils.from_parallel_hidden_to_logprobs_packed_sequences(
                hidden,
                weight,
                tokens[None],
                ends,
                max(LENGTHS),
                group=tp,
                attention_mask=mask,
                **share,
                **options,
            )
            with torch.no_grad():
                entropy = model_utils.from_parallel_hidden_to_entropy_packed_sequences(
                    hidden, weight, ends, max(LENGTHS), 3, mask, None, None, tp, **options
                )[0]
        else:
            values = model_utils.from_parallel_hidden_to_logprobs(
                hidden, weight, tokens[None], tp_group=tp, **share, **options
            )
            with torch.no_grad():
                entropy = model_utils._fused_vocab_parallel_entropy_from_hidden(
                    hidden[:, 3:], weight, tp, **options
                )
    factors = torch.linspace(-1, 1, values.numel()).view_as(values)
    gradients = torch.autograd.grad((factors * values).sum(), [rows, weight])
    return [values.detach(), entropy, *gradients], len(calls)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_values_and_gradients_are_those_of_skyrl(count: int, packed: bool, two: Ranks) -> None:
    found = two.run(count, step, count, packed, True)
    expected = two.run(count, step, count, packed, False)
    for (ours, fused), (theirs, unfused) in zip(found, expected, strict=True):
        assert (fused, unfused) == (2, 0)
        for x, y in zip(ours, theirs, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * y.abs().max().item())


def not_gathered() -> None:
    hidden, weight, tokens = inputs()
    states = hidden.transpose(0, 1).requires_grad_()
    integration.log_probs(states, weight, tokens[None], group(2))


def test_states_that_were_not_gathered_are_named(two: Ranks) -> None:
    for failed, text in two.outcomes(2, not_gathered):
        assert failed and "hidden: got states that were not gathered" in text


def other_dtypes() -> list[Tensor]:
    """Return log-probabilities of a float32 weight beside states in bfloat16, ours and SkyRL's."""
    hidden, weight, tokens = inputs()
    states = hidden.transpose(0, 1).bfloat16()
    given = states, weight, tokens[None]
    own = OWN[NAMES[0]]("torch", *given, 0, V, 4, group(1), True)
    return [integration.log_probs(*given, group(1)), own]


def test_the_dtype_of_the_weight_decides(two: Ranks) -> None:
    ((found, expected),) = two.run(1, other_dtypes)
    torch.testing.assert_close(found, expected)


def sampled_on_a_rank() -> None:
    hidden, weight, tokens = inputs()
    given = hidden.transpose(0, 1), weight, tokens[None], group(1)
    with sampled_calls(integration, "linear_log_probs"):
        integration.log_probs(*given)


def test_gradients_are_sampled_if_the_setting_says_so(two: Ranks) -> None:
    two.run(1, sampled_on_a_rank)


def test_an_older_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, integration.MODULE)
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(RuntimeError, match=r"^Python: got 3\.11, expected 3\.12 or later"):
        integration.enable()


def test_modules_that_imported_a_function_get_ours() -> None:
    assert vars(importer.entropy)["__wrapped__"] is integration.entropies
