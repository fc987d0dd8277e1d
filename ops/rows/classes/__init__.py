"""Several classes of each token.

output_classes.py   those whose log-probabilities are outputs
"""
