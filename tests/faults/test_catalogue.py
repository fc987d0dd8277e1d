"""The faults fit the sources of today, and what is recorded of them is of them as they are."""

import ast
import re
from pathlib import Path

import pytest

from tests.faults.__main__ import NOTICED, has_test, read_noticed
from tests.faults.catalogue import FAULTS, Fault

ROOT = Path(__file__).parents[2]

each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@each_fault
def test_a_fault_is_an_edit_of_todays_sources(fault: Fault) -> None:
    texts: dict[str, str] = {}
    for edit in fault.edits:
        assert edit.before != edit.after
        path = ROOT / edit.path
        assert path.resolve() == path, "not through a link"
        source = texts.get(edit.path) or path.read_text()
        texts[edit.path] = edit.applied(source)
    for text in texts.values():
        ast.parse(text)


@each_fault
def test_a_fault_says_what_it_is(fault: Fault) -> None:
    assert re.fullmatch(r"[a-z0-9-]+", fault.name)
    assert re.fullmatch(r"[0-9a-f]{7}", fault.fixed_in)
    assert re.fullmatch(r"(?:[A-Z]|dW|dX).*\w\.", fault.what)
    assert 1 <= len(fault.tests) <= 3
    assert all(has_test(ROOT, test) for test in fault.tests)


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_each_fault_is_recorded_as_it_is_and_noticed() -> None:
    """Nine in ten by the default tier, all by some tier."""
    noticed = read_noticed()
    recorded = {name: one.sha for name, one in noticed.items()}
    assert recorded == {fault.name: fault.sha for fault in FAULTS}, f"run them; see {NOTICED.name}"
    tiers = [one.tier for one in noticed.values()]
    assert None not in tiers and tiers.count("default") >= 0.9 * len(tiers)
