"""Train a recommender with a softmax over the items of a batch, corrected by logQ.

    python -m examples.recommender

The classes of a batch are its items, which are drawn by popularity: popular ones are negatives too
often.  The correction (Yi et al., RecSys 2019) subtracts log q from an item's logit, q being its
probability of being in the batch: a `linear_bias`.  All items as classes need no correction, and no
logits either: their loss is printed after a training with the correction, and one without.
"""

import torch
from torch import Tensor, nn

import cutefce
from examples.training import fit

USERS, ITEMS, SIZE, BATCH, STEPS = 400, 1000, 16, 512, 120


def in_batch_loss(users: Tensor, items: Tensor, target: Tensor, log_q: Tensor) -> Tensor:
    """Return the mean loss () of N pairs, whose classes are the items that occur in them.

    Args:
        users: (N, D) embeddings of the users.
        items: (V, D) embeddings of all items; others than those of the batch get no gradient.
        target: (N,) the items of the pairs; one that occurs twice is one class.
        log_q: (V,) logarithm of each item's probability of being in a batch, up to a constant.
    """
    classes, place = target.unique(return_inverse=True)
    return cutefce.linear_cross_entropy(users, items[classes], place, linear_bias=-log_q[classes])


def make_pairs() -> tuple[Tensor, Tensor]:
    """Return users and items (pairs,): items by popularity and by the user's taste."""
    generator = torch.Generator().manual_seed(0)
    popularity = -torch.arange(1, ITEMS + 1).log()
    tastes = torch.randn(USERS, 8, generator=generator)
    kinds = torch.randn(ITEMS, 8, generator=generator)
    probabilities = (popularity + tastes @ kinds.T).softmax(-1)
    items = probabilities.multinomial(50, replacement=True, generator=generator)
    return torch.arange(USERS).repeat_interleave(50), items.flatten()


def train(steps: int = STEPS, is_corrected: bool = True) -> tuple[list[float], float]:
    """Return the losses of the steps, and that of all items after them."""
    users, items = make_pairs()
    frequency = items.bincount(minlength=ITEMS) / len(items)
    log_q = (1 - (1 - frequency) ** BATCH).log() if is_corrected else torch.zeros(ITEMS)
    torch.manual_seed(0)
    user_table, item_table = nn.Embedding(USERS, SIZE), nn.Embedding(ITEMS, SIZE)
    for table in (user_table, item_table):
        nn.init.normal_(table.weight, std=0.3)

    def loss() -> Tensor:
        batch = torch.randint(len(users), (BATCH,))
        return in_batch_loss(user_table(users[batch]), item_table.weight, items[batch], log_q)

    losses = fit([user_table.weight, item_table.weight], loss, steps)
    with torch.no_grad():
        final = cutefce.linear_cross_entropy(user_table(users), item_table.weight, items)
    return losses, final.item()


def main() -> None:
    """Train with the correction and without, and print the losses with all items as classes."""
    (_, corrected), (_, other) = train(), train(is_corrected=False)
    print(f"loss of all items: {corrected:.4f} with the correction, {other:.4f} without")


if __name__ == "__main__":
    main()
