"""Which configuration serves a problem: defaults, tuned tables, verdicts."""
