"""Compiles kernels from their specs, and caches the libraries.

compiler.py    from a spec to a compiled function, which may have to be without spills
cache.py       where a compiled kernel is loaded: this process, the user's folder, the package
build.py       compiles several kernels at once, each in a process of its own
subprocess_worker.py  a subprocess that answers requests, each within a time limit
notices.py     what a process says, and shows on a terminal, while it compiles
canonical.py   the lines of a source file without its text, for fingerprints
"""
