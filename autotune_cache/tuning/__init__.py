"""One tuning run: shapes, candidates, cost model, tuner, subprocess worker, worker, outputs.

`targets` holds what can be tuned, `verify` the check before a first launch, and `first_use` the
only functions that `cutefce.ops` calls.
"""
