"""One reset for all process-wide caches, and warnings that are given once."""

import ast
import warnings

import pytest

from cutefce.cute_kernels import process_cache
from tests.support.package import modules


def test_a_reset_computes_again() -> None:
    calls: list[int] = []

    @process_cache.process_cache
    def double(x: int) -> int:
        calls.append(x)
        return 2 * x

    assert [double(3), double(3), double(4)] == [6, 6, 8]
    assert calls == [3, 4]
    process_cache.reset()
    assert double(3) == 6
    assert calls == [3, 4, 3]


def test_a_warning_is_given_once_however_often_caches_are_reset() -> None:
    with pytest.warns(UserWarning, match="cutefce: something") as warned:
        for _ in range(3):
            process_cache.warn_once("something")
            process_cache.reset()
    assert len(warned) == 1


def test_a_warning_that_is_an_error_is_one_each_time() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match="something else"):
                process_cache.warn_once("something else")


def test_no_cache_escapes_the_reset() -> None:
    """Caches of the schema and of files that no reset changes are the exceptions."""
    allowed = {"cutefce.ops.schema", "cutefce.cute_kernels.process_cache"}
    for module, path in modules().items():
        if module in allowed or module.startswith("cutefce.integrations"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "functools":
                names = {f"functools.{name.name}" for name in node.names}
            else:
                names = {ast.unparse(node)} if isinstance(node, ast.Attribute) else set()
            assert not names & {"functools.cache", "functools.lru_cache"}, path
