"""Configurations for problems: defaults, lookup, tables, verdicts; `tuning` makes the tables."""
