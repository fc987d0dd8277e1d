"""The examples measure memory as the benchmarks do, and survive interrupted runs."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.harness import timing
from examples.losses.topk_distillation import topk_divergence
from examples.training import peak_bytes


def test_peak_bytes_is_that_of_the_benchmarks() -> None:
    def call() -> None:
        x = torch.randn(1000)
        del x
        torch.randn(300).sum()

    call()
    assert peak_bytes(call, torch.device("cpu")) == timing.peak_bytes(call, "cpu") >= 4000


def test_a_damaged_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    from examples import corpus

    monkeypatch.setattr(corpus, "read_sources", lambda: ["x = 1"] * 20)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1')
    with pytest.raises(RuntimeError, match=r"tokenizer\.json: .*remove it to train it again"):
        corpus.load_corpus(path)


def test_a_tokenizer_appears_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from examples import corpus

    monkeypatch.setattr(corpus, "read_sources", lambda: ["x = 1"] * 20)
    monkeypatch.setattr(corpus, "VOCAB", 257)
    path = tmp_path / "tokenizer.json"
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        corpus.load_corpus(path)
    assert not path.exists(), "an interrupted run leaves nothing under this name"
    monkeypatch.undo()
    monkeypatch.setattr(corpus, "read_sources", lambda: ["x = 1"] * 20)
    monkeypatch.setattr(corpus, "VOCAB", 257)
    corpus.load_corpus(path)
    assert tokenizers.Tokenizer.from_file(str(path)).get_vocab_size() >= 257


def test_losses_are_short_enough_to_copy() -> None:
    files = sorted((Path(__file__).parent.parent / "examples" / "losses").glob("[a-z]*.py"))
    assert [path.stem for path in files] == ["dpo", "grpo", "orpo", "topk_distillation"]
    assert all(path.read_text().count("\n") < 40 for path in files)


@pytest.mark.parametrize("rest", ["dropped", "normalized", "corrected"])
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_divergences_from_a_top_k_are_those_of_all_logits(kind: str, rest: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 5, 50, dtype=torch.float64).log_softmax(-1).topk(6)
    ours = topk_divergence(hidden, weight, teacher.indices, teacher.values, kind, rest, 0.3)

    logits, other = hidden @ weight.T, teacher.values
    log_p = logits.log_softmax(-1)
    own = log_p.gather(-1, teacher.indices)
    if rest == "normalized":
        own = logits.gather(-1, teacher.indices).log_softmax(-1)
        other = other - other.logsumexp(-1, keepdim=True)
    forward = (other.exp() * (other - own)).sum(-1)
    reverse = (own.exp() * (own - other)).sum(-1)
    if rest == "corrected":
        outside = torch.ones_like(log_p).scatter(-1, teacher.indices, 0)
        reverse = reverse + (outside * log_p.exp() * (log_p + 100)).sum(-1)
    theirs = {"forward": forward, "reverse": reverse, "mixed": 0.3 * forward + 0.7 * reverse}[kind]
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn(2, 5, dtype=torch.float64)
    found = (torch.autograd.grad(x, (hidden, weight), upstream) for x in (ours, theirs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rest", ["dropped", "normalized", "corrected"])
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_padding_of_a_top_k_has_no_part(kind: str, rest: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 16).double(), torch.randn(50, 16).double()
    teacher = torch.randn(5, 50).double().log_softmax(-1).topk(3)
    padded = (F.pad(teacher.indices, (0, 2), value=-100), F.pad(teacher.values, (0, 2), value=-9.0))
    padded[1][:, -1] = -torch.inf
    found = [
        topk_divergence(hidden.requires_grad_(), weight, *each, kind, rest)
        for each in ((teacher.indices, teacher.values), padded)
    ]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), hidden)[0] for x in found))
