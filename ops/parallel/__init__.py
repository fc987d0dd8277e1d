"""Across ranks: a vocabulary, and tokens, sharded over a process group."""
