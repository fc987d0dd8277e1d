"""One tuning run: shapes, candidates, trials in subprocesses, table."""
