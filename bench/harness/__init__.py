"""Shared by the experiments: problems, references, timing, accuracy, records, command line."""
