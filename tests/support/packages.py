"""Modules of frameworks that need more for their packages than for themselves."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


def module_without(module: str, *packages: str) -> Any:
    """Return a module of an installed framework, without running the `__init__` of `packages`.

    Skips the file of tests if the framework is not installed.
    """
    pytest.importorskip(module.partition(".")[0])
    for name in packages:
        spec = find_spec(name)
        assert spec is not None and spec.submodule_search_locations is not None
        bare = ModuleType(name)
        bare.__path__ = [*spec.submodule_search_locations]
        sys.modules.setdefault(name, bare)
    return import_module(module)
