"""Across ranks: a vocabulary, and tokens, sharded over a process group.

dtensor.py       placements of distributed tensors to a group and shards
consistency.py   whether the ranks make the same call
class_row.py     what label smoothing and the mean logit need of all classes
shard.py         one rank's part of a call, and what the ranks exchange
"""
