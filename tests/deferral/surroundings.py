"""What surrounds a model in training: the table of docs/defer.md, and comparing its cells.

Cells that need torch alone are tests of `test_surroundings.py` beside this file, and those that
need a framework of `tests/integrations/test_surroundings.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cutefce

D, V = 16, 24
LR = 0.5
DOCS = Path(__file__).parents[2] / "docs" / "defer.md"
FRAMEWORKS = ("DeepSpeed", "PEFT", "`device_map`")
"""How rows of the table begin that need more than torch."""


class Model(nn.Module):
    """A model whose loss is in its forward, or in the loop."""

    def __init__(self, inside: bool, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.reentrant = inside, reentrant
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
        self.norm = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.embedding(tokens)
        if self.reentrant is None:
            x = self.layers(x)
        else:
            x = checkpoint(self.layers, x, use_reentrant=self.reentrant)
        logits = self.lm_head(self.norm(x.tanh()))
        return loss_of(logits, targets) if self.inside else logits


def loss_of(logits: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, V), targets.view(-1))


def data() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(V, (4, 6), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


class Run(NamedTuple):
    """What a few steps of SGD end in."""

    losses: list[float]
    parameters: dict[str, Tensor]
    report: Any = None


def whole_parameters(model: nn.Module, wrapped: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters, on every rank."""
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped):
            named = [(name, x.detach().clone()) for name, x in wrapped.named_parameters()]
        return {name.replace("_fsdp_wrapped_module.", ""): x for name, x in named}
    named = [(name, x.detach()) for name, x in model.named_parameters()]
    return {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in named}


def steps(model: Any, wrapped: Any, rows: slice = slice(None), whole: bool = False) -> list[float]:
    """Return the losses of three steps of SGD."""
    tokens, targets = (x if whole else x[rows] for x in data())
    optimizer, losses = torch.optim.SGD(wrapped.parameters(), LR), []
    for _ in range(3):
        result = wrapped(tokens, targets)
        loss = result if model.inside else loss_of(result, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def table() -> dict[str, tuple[str, str]]:
    """Return the table: what losses in the forward and of the logits do in each surrounding."""
    text = DOCS.read_text().split("### What surrounds a model")[1].split("\n\n| ")[1]
    lines = text.split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return {name: (inside, outside) for name, inside, outside in rows}


def cells(
    forms: Mapping[str, Sequence[str]],
    *,
    frameworks: bool,
    is_default: Callable[[str, str, bool], bool],
) -> pytest.MarkDecorator:
    """Parametrize by each cell of rows with or without `frameworks`, in each of its row's `forms`.

    `is_default` says of row, form, and whether the loss is inside, that a test is not slow.
    """
    chosen = {row: x for row, x in table().items() if row.startswith(FRAMEWORKS) == frameworks}
    assert chosen.keys() == forms.keys()
    params = [
        pytest.param(
            *(row, name, where == "inside", outcome),
            id=f"{row}-{name}-{where}",
            marks=[] if is_default(row, name, where == "inside") else [pytest.mark.slow],
        )
        for row, outcomes in chosen.items()
        for where, outcome in zip(("inside", "outside"), outcomes, strict=True)
        for name in forms[row]
        if outcome != "-"
    ]
    return pytest.mark.parametrize(("row", "name", "inside", "outcome"), params)


Outcome = tuple[bool, Any]
"""Whether a rank failed, and its run or the error."""


def train_here(wrap: Callable[[Model, bool], nn.Module], inside: bool, deferred: bool) -> Outcome:
    """Return the run of a model in one process."""
    model = Model(inside)
    wrapped = wrap(model, deferred)
    losses = steps(model, wrapped)
    report = cutefce.deferral_report(model) if deferred else None
    return False, Run(losses, whole_parameters(model, wrapped), report)


def assert_cell(train: Callable[[bool], list[Outcome]], inside: bool, outcome: str) -> None:
    """Assert that what `train` returns with a deferred head and without is what the table says."""
    results = train(True)
    if outcome == "refused":
        for failed, text in results:
            assert failed and "RuntimeError: logits: got a use of them" in text
        return
    for (failed, ours), (_, theirs) in zip(results, train(False), strict=True):
        assert not failed, ours
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        start = dict(Model(inside).named_parameters())
        assert ours.parameters.keys() == theirs.parameters.keys()
        for key, x in theirs.parameters.items():
            moved = (x - start.get(key, torch.zeros(()))).abs().max()
            assert (ours.parameters[key] - x).abs().max() <= 1e-5 * moved, key
        if ours.report is not None:
            assert bool(ours.report.fused) == (outcome == "fused"), ours.report
            assert bool(ours.report.fallbacks) == (outcome == "full logits"), ours.report
