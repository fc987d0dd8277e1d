"""Probabilities of all classes as targets, as of `torch.nn.functional.cross_entropy`.

checks.py    errors of the argument
targets.py   DenseTargets: the formulas, and what the loss of a token is made of
tiles.py     probabilities beside a tile of logits
"""
