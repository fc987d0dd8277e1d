"""A plain step whose forward and backward are one host call each.

step.py             both calls, and what the first leaves for the second
tables.py           the windows, in the tables that host functions read
hidden_product.py   dX's sums of a small step, which the forward forms
"""
