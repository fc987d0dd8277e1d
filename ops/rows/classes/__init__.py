"""Several classes of each token.

soft_targets.py     those with probabilities
output_classes.py   those whose log-probabilities are outputs
"""
