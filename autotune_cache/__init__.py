"""Which configuration serves a problem, and how it is found.

defaults.py   windows and tiles where nothing was tuned
lookup.py     where a tuned configuration is looked up: the user's table, then the shipped one
tables.py     tuned tables: keys, entries, and their JSON files
verdicts.py   whether the kernels were verified on a GPU model
tuning/       verification, and one tuning run; builds on `ops`
"""
