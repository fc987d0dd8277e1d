"""Tests against real frameworks, on the CPU, which `make test-integrations` installs.

A file without its framework is reported as skipped.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
