"""The examples measure memory as the benchmarks do, and survive interrupted runs."""

import os
from pathlib import Path

import pytest
import torch

from bench.harness import timing
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
    assert [path.stem for path in files] == ["dpo", "grpo", "orpo"]
    assert all(path.read_text().count("\n") < 40 for path in files)
