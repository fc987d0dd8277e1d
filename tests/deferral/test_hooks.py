"""hooks: a framework's function is replaced once, and only if it is the expected one."""

import warnings
from typing import Any

import pytest

from cutefce.integrations.support import hooks

PATH, PARAMETERS = "click.utils:echo", ("message", "file", "nl", "err", "color")


def ours(*_: object) -> None:
    pass


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    import click.utils

    monkeypatch.setattr(click.utils, "echo", click.utils.echo)


def installed() -> str:
    from importlib.metadata import version

    return f"click {version('click')}"


def test_a_function_is_replaced_once() -> None:
    import click.utils

    before = click.utils.echo
    assert hooks.replace(PATH, ours, parameters=PARAMETERS, tested=installed()) is before
    assert click.utils.echo is ours
    with pytest.raises(RuntimeError, match="enabled already"):
        hooks.replace(PATH, ours, parameters=PARAMETERS, tested=installed())


def test_other_parameters_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"got parameters \(message, file, nl, err, color\)"):
        hooks.replace(PATH, ours, parameters=("message",), tested=installed())


def test_parameters_may_be_those_of_another_function() -> None:
    given: dict[str, Any] = {"parameters": ("text",), "tested": installed()}
    hooks.replace(PATH, ours, **given, signature="click:unstyle")
    with pytest.raises(RuntimeError, match=r"click:style: got parameters \(text, fg"):
        hooks.replace("click.utils:get_app_dir", ours, **given, signature="click:style")


def test_a_missing_function_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"click\.utils:gone: not found"):
        hooks.replace("click.utils:gone", ours, parameters=(), tested=installed())


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
