"""Tuned and default configurations: defaults, lookup, tables, verdicts; `tuning` makes the tables."""
