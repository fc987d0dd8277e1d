"""Kernels and what describes them to the layers above: problems, tile configurations.

This folder never imports `cutefce.ops`.
"""
