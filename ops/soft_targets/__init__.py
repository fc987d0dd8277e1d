"""K classes of each token: with probabilities (soft targets), or with log-probabilities as outputs.

targets.py          SoftTargets: classes with probabilities, and their terms among exponentials
output_classes.py   OutputClasses: those whose log-probabilities are outputs
leads.py            what both are made of: the lead of each token, and the other classes sorted
kernels.py          launches of the kernels between the GEMMs
"""
