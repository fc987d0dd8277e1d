"""Recorded results as plots and tables, and their comparison with committed ones."""
