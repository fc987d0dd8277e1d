"""Compiles kernels from their specs, and caches the libraries.

compiler.py    from a spec to a compiled function; what the assembler reports
cache.py       where a compiled kernel is loaded: this process, the user's folder, the package
canonical.py   the code of a source file without its text, for fingerprints
"""
