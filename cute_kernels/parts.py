"""Parts of what calls launch, which are verified apart from each other, with all configurations."""

FORWARD = "forward"
"""Losses without gradients."""
STEP = "step"
"""Exact gradients, by any plan; a plan that stores nothing has the forward of `FORWARD`."""
SOFT_TARGETS = "soft targets"
SAMPLES = "samples"
"""Sampled gradients."""
DIVERGENCES = "divergences"
"""Rows of two models' logits, and logits, whatever the configurations."""
PARTS = FORWARD, STEP, SOFT_TARGETS, SAMPLES, DIVERGENCES


def parts_of(part: str) -> tuple[str, ...]:
    """Return the part with those that calls of it launch too."""
    return (FORWARD, STEP) if part == STEP else (part,)
