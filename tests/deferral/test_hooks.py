"""hooks: a framework's function is replaced once, and only if it is the expected one."""

import inspect
import sys
import warnings
from collections import defaultdict
from types import ModuleType
from typing import Any

import pytest
import torch

from cutefce.integrations import report
from cutefce.integrations.support import hooks

PATH = "click.utils:echo"


def ours(message: Any, file: Any, nl: Any, err: Any, color: Any) -> Any:
    if message == "theirs":
        raise hooks.NotServedError
    return "ours", message


def others(message: Any, *, own: Any) -> Any:
    return own(message=message * 2) if message == "theirs" else message


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    import click.utils

    monkeypatch.setattr(click.utils, "echo", click.utils.echo)
    monkeypatch.setattr(report, "_calls", defaultdict(report.Calls))


def installed() -> str:
    from importlib.metadata import version

    return f"click {version('click')}"


def test_a_function_is_replaced_once() -> None:
    import click.utils

    hooks.replace(PATH, ours, tested=installed())
    assert vars(click.utils.echo)["__wrapped__"] is ours
    hooks.replace(PATH, others, tested=installed(), unused=None)
    assert vars(click.utils.echo)["__wrapped__"] is ours


def test_copies_by_other_names_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    import click.utils

    importer, other = ModuleType("ClickUser"), ModuleType("other")
    for module in (importer, other):
        vars(module)["say"] = click.utils.echo
        monkeypatch.setitem(sys.modules, module.__name__, module)
    own = click.utils.echo
    hooks.replace(PATH, ours, tested=installed(), importers="clickuser")
    assert vars(importer)["say"] is click.utils.echo
    assert vars(other)["say"] is own


def test_what_is_not_served_is_left_to_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    import click.utils

    def echo(message: Any, file: Any, nl: Any, err: Any, color: Any) -> Any:
        return "theirs", message, file, color

    monkeypatch.setattr(click.utils, "echo", echo)
    hooks.replace(PATH, ours, tested=installed())
    run: Any = click.utils.echo
    assert run("x", 1, 2, 3, color=4) == ("ours", "x")
    assert run("theirs", 1, 2, 3, color=4) == ("theirs", "theirs", 1, 4)
    assert report.integration_report() == {PATH: (1, 1)}


def test_a_function_that_only_prepares_is_not_counted() -> None:
    import click.utils

    def prepare(*, own: Any) -> Any:
        return own()

    hooks.replace(PATH, prepare, tested=installed(), unused=None, is_counted=False)
    click.utils.echo("x", nl=False)
    assert report.integration_report() == {}


def test_calls_of_a_graph_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import click.utils

    def twice(message: Any, file: Any, nl: Any, err: Any, color: Any) -> Any:
        return 2 * message

    hooks.replace(PATH, twice, tested=installed())
    given: Any = 1, 2, 3, 4

    def call(x: Any) -> Any:
        return click.utils.echo(x, *given)

    run: Any = torch.compile(call, backend="eager")
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))
    assert report.integration_report() == {}


@pytest.mark.parametrize("unused", [["file", "nl", "err", "color"], None])
def test_a_replacement_gets_what_it_uses_and_the_function_that_was_there(
    unused: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import click.utils

    def echo(message: Any, file: Any, nl: Any, err: Any, color: Any = 5) -> Any:
        return message, file, nl, err, color

    monkeypatch.setattr(click.utils, "echo", echo)
    hooks.replace(PATH, others, tested=installed(), unused=unused)
    run: Any = click.utils.echo
    assert [*inspect.signature(run).parameters] == ["message", "file", "nl", "err", "color"]
    assert run("x", 1, 2, err=3) == "x" and report.integration_report() == {PATH: (1, 0)}
    for given, named in ((("theirs", 1, 2), {"err": 3}), ((), {"message": "theirs"})):
        rest = {} if given else {"file": 1, "nl": 2, "err": 3}
        assert run(*given, **named, **rest) == ("theirstheirs", 1, 2, 3, 5)
    assert report.integration_report() == {PATH: (1, 2)}  # what its own function did


@pytest.mark.parametrize(
    ("given", "named"),
    [(("x", 1, 2, 3), {"colour": 4}), (("x", 1, 2, 3, 4, 5), {}), (("x",), {"message": "y"})],
    ids=["misspelled", "too many", "twice"],
)
def test_wrong_calls_are_refused_as_by_the_framework(given: Any, named: dict[str, Any]) -> None:
    import click.utils

    hooks.replace(PATH, others, tested=installed(), unused=["file", "nl", "err", "color"])
    run: Any = click.utils.echo
    with pytest.raises(TypeError, match=r"unexpected|too many|multiple"):
        run(*given, **named)


def test_other_parameters_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"got parameters \(message, file, nl, err, color\)"):
        hooks.replace(PATH, others, tested=installed())
    with pytest.raises(RuntimeError, match=r"expected those of click .*, \(message, gone\)"):
        hooks.replace(PATH, others, tested=installed(), unused=["gone"])


class Double(torch.autograd.Function):
    """Twice a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return 2 * x


@pytest.mark.parametrize("name", ["Double.apply", "double"])
def test_an_autograd_function_has_the_parameters_of_its_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import click.utils

    monkeypatch.setattr(click.utils, "Double", type("Double", (Double,), {}), raising=False)
    monkeypatch.setattr(click.utils, "double", Double.apply, raising=False)
    hooks.replace(f"click.utils:{name}", lambda x: x, tested=installed())
    monkeypatch.setattr(click.utils, "double", Double.apply)
    with pytest.raises(RuntimeError, match=r":double: got parameters \(x\)"):
        hooks.replace("click.utils:double", ours, tested=installed())


def test_a_missing_function_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"click\.utils:gone: not found"):
        hooks.replace("click.utils:gone", ours, tested=installed())


def test_an_untested_version_warns() -> None:
    with pytest.warns(UserWarning, match=r"click: got version .* tested with 0\.1"):
        hooks.check_version("click 0.1")


def test_several_versions_and_a_source_tree() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hooks.check_version(f"{installed()} 9.9")
        hooks.check_version("no-such-package 1.0 1.1", found="1.1")
    with pytest.warns(UserWarning, match=r"got version 2\.0; .* tested with 1\.0, 1\.1"):
        hooks.check_version("no-such-package 1.0 1.1", found="2.0")


def test_a_commit_is_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.2.3+abc1234")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hooks.check_version("nemo-rl 1.2.3")


def test_a_missing_package_is_named() -> None:
    message = r"^no_such_package: not installed, expected no-such-package 1\.0$"
    with pytest.raises(ImportError, match=message):
        hooks.replace("no_such_package.module:call", ours, tested="no-such-package 1.0")


def test_sources_without_an_installation_are_of_an_unknown_version() -> None:
    with pytest.warns(UserWarning, match=r"no-such-package: got version unknown; .* with 1\.0"):
        hooks.check_version("no-such-package 1.0")


def test_a_module_that_cannot_be_imported_is_named() -> None:
    """Such as one that needs a package which the framework does not install by itself."""
    with pytest.raises(ImportError, match=r"No module named 'click\.no_such_module'"):
        hooks.replace("click.no_such_module:call", lambda x: x, tested=installed())
