"""The example's trainings are that of one process, and the benchmark's step is that of one rank."""

import sys

import pytest
import torch

from bench.experiments import parallel as bench
from bench.harness.problems import Shape
from tests.support.ranks import Ranks, mesh

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")

from examples import parallel
from examples.corpus import Corpus
from examples.training import SEED, Sizes, Training, Transformer, sample_batches

SIZES = Sizes(hidden=16, layers=2, heads=4, context=8, batch=4, steps=8, learning_rate=1e-2)


def losses(mode: str) -> tuple[list[float], float, list[float]]:
    """Return losses of the steps and of the validation, and the steps' of one process."""
    torch.manual_seed(0)
    corpus = Corpus(torch.randint(50, (400,)), torch.randint(50, (100,)), 50)
    torch.set_default_dtype(torch.float64)
    try:
        got, validation = parallel.train(mode, corpus, SIZES, mesh()["tp"])
        torch.manual_seed(SEED)
        alone = Training("", torch_loss, Transformer(50, SIZES), SIZES)
        for batch in sample_batches(corpus.train, SIZES, SIZES.steps, torch.device("cpu")):
            alone.step(batch)
    finally:
        torch.set_default_dtype(torch.float32)
    return got, validation, alone.losses


def torch_loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.t()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("mode", parallel.MODES)
def test_every_mode_trains_as_one_process_does(mode: str, ranks: Ranks) -> None:
    for got, validation, want in ranks.run(4, losses, mode):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
        assert got[-1] < got[0] and 0 < validation < 10


@pytest.mark.slow
def test_the_benchmark_measures_what_is_equal(ranks: Ranks) -> None:
    shape = Shape(tokens=64, hidden=16, vocab=336, dtype="float64")
    for rows in ranks.run(4, bench.run, shape, "cpu", 2, None):
        assert [row.implementation for row in rows] == ["unsharded", "tp", "sp"]
        for row in rows:
            differences = row.loss_difference, row.dx_difference, row.dw_difference
            # the bench compares in float32, in which equal float64 values are equal
            assert max(differences) <= torch.finfo(torch.float32).eps
            assert row.median_ms > 0


def test_a_start_without_ranks_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["parallel", "sp"])
    with pytest.raises(SystemExit):
        parallel.main()
    assert "torchrun --nproc-per-node 2 -m examples.parallel sp" in capsys.readouterr().err
