"""Compile a kernel from its specification, and cache it."""
