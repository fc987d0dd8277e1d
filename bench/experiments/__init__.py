"""One experiment per file: what is measured, its rows, and its command."""
