"""Train a masked diffusion language model: only masked tokens count, each with weight 1 / t.

    python -m examples.masked_diffusion

A sequence is masked at a rate t, drawn anew for each.  The loss (MDLM, arXiv 2406.07524; LLaDA,
arXiv 2502.09992) is the sum over masked tokens of their cross entropies over t, divided by the
number of all tokens.  A token with a weight of 0 is ignored: it is neither multiplied nor saved.
"""

import torch
from torch import Tensor, nn

import cutefce
from examples.training import fit

VOCAB, SIZE, LENGTH, BATCH, STEPS = 64, 64, 16, 32, 60


def diffusion_loss(
    hidden: Tensor, weight: Tensor, tokens: Tensor, is_masked: Tensor, rates: Tensor
) -> Tensor:
    """Return the loss () of B sequences, in nats a token.

    Args:
        hidden: (B, T, D) hidden states, of which those of masked tokens count.
        weight: (V, D) of the head.
        tokens: (B, T) the tokens before they were masked.
        is_masked: (B, T) bool.
        rates: (B,) the rate t at which a sequence was masked, above 0.
    """
    return cutefce.linear_cross_entropy(
        hidden,
        weight,
        tokens,
        token_weights=is_masked / rates[:, None],
        denominator=tokens.numel(),
    )


class Denoiser(nn.Module):
    """One layer of attention to both sides; the embedding's last row is that of a masked token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB + 1, SIZE)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, SIZE))
        self.layer = nn.TransformerEncoderLayer(
            SIZE, 4, 2 * SIZE, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(SIZE, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to the head's input (B, T, D)."""
        hidden: Tensor = self.layer(self.embedding(tokens) + self.places)
        return hidden


def train(steps: int = STEPS) -> list[float]:
    """Train on sequences that repeat one token, and return the losses."""
    torch.manual_seed(0)
    model = Denoiser()

    def loss() -> Tensor:
        tokens = torch.randint(VOCAB, (BATCH, 1)).expand(-1, LENGTH)
        rates = 0.1 + 0.9 * torch.rand(BATCH)
        is_masked = torch.rand(BATCH, LENGTH) < rates[:, None]
        hidden = model(tokens.masked_fill(is_masked, VOCAB))
        return diffusion_loss(hidden, model.head.weight, tokens, is_masked, rates)

    return fit(model.parameters(), loss, steps)


def main() -> None:
    """Train, and print losses."""
    train()


if __name__ == "__main__":
    main()
