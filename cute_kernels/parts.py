"""Parts of what calls launch, which are verified apart from each other."""

FORWARD = "forward"
"""Losses without gradients."""
STEP = "step"
"""Exact gradients, by any plan; a plan that stores nothing has the forward of `FORWARD`."""
OPTIONS = "options"
"""Mapped logits, other factors of tokens, and reductions of rows beside their sums."""
SOFT_TARGETS = "soft targets"
SAMPLES = "samples"
"""Sampled gradients."""
DIVERGENCES = "divergences"
"""Rows of two models' logits, and logits, whatever the configurations."""
PARTS = FORWARD, STEP, OPTIONS, SOFT_TARGETS, SAMPLES, DIVERGENCES
ONCE = OPTIONS, DIVERGENCES
"""Those whose own code is the same in every configuration: they are checked in one."""


def parts_of(part: str) -> tuple[str, ...]:
    """Return the part with those that calls of it launch too."""
    return (FORWARD, STEP) if part == STEP else (part,)
