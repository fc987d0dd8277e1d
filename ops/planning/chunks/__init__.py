"""Gradients in forward: how a call is cut into chunks of tokens.

windows.py   the columns of windows inside a chunk
plans.py     the plans that are tried
"""
