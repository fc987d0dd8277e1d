"""Gradients in forward: how a call is cut into chunks of tokens.

sizes.py     the tokens of each chunk, and where their exponentials lie
windows.py   the columns of windows inside a chunk
plans.py     the plans that are tried
"""
