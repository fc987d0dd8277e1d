"""hooks: a framework's function is replaced once, and only if it is the expected one."""

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
    return own, message


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
    with pytest.raises(RuntimeError, match="enabled already"):
        hooks.replace(PATH, ours, tested=installed())
    hooks.replace(PATH, ours, tested=installed(), is_repeated=True)
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


def test_a_replacement_may_get_the_function_that_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import click.utils

    def echo(message: Any) -> None:
        pass

    monkeypatch.setattr(click.utils, "echo", echo)
    hooks.replace(PATH, others, tested=installed())
    run: Any = click.utils.echo
    own, message = run("x")
    assert message == "x" and report.integration_report() == {PATH: (1, 0)}
    assert own("x") is None


def test_a_call_in_which_the_function_that_was_there_runs_is_not_fused() -> None:
    import click.utils

    def both(message: Any, file: Any, nl: Any, err: Any, color: Any, *, own: Any) -> Any:
        return own(message, file, nl, err, color)

    hooks.replace(PATH, both, tested=installed())
    click.utils.echo("", None, False, False, None)
    assert report.integration_report() == {PATH: (0, 1)}


def test_other_parameters_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"got parameters \(message, file, nl, err, color\)"):
        hooks.replace(PATH, others, tested=installed())


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
    with pytest.raises(RuntimeError, match=r":Double\.forward: got parameters \(ctx, x\)"):
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
    with pytest.raises(ImportError, match=r"no-such-package: not installed"):
        hooks.check_version("no-such-package 1.0")


def test_a_module_that_cannot_be_imported_is_named() -> None:
    """Such as one that needs a package which the framework does not install by itself."""
    expected = "click.no_such_module: cannot be imported, expected click .*: No module named"
    with pytest.raises(ImportError, match=expected):
        hooks.replace("click.no_such_module:call", lambda x: x, tested=installed())
