"""Which calls of enabled integrations were fused, so that a user sees that they are in use.

    from cutefce.integrations.report import integration_report

    print(integration_report())  # {"liger_kernel...:forward": Calls(fused=20, own=0)}

`cutefce.deferral_report` counts what deferred heads did.
"""

from collections import defaultdict
from typing import NamedTuple

import torch


class Calls(NamedTuple):
    """Calls of one function of a framework, which cutefce has replaced in this process."""

    fused: int = 0
    own: int = 0
    """Those in which the framework's own function ran."""


_calls: defaultdict[str, Calls] = defaultdict(Calls)


def integration_report() -> dict[str, Calls]:
    """Return the calls of each replaced function so far, by its path; not those of a graph."""
    return dict(_calls)


def note_call(path: str, *, is_fused: bool) -> None:
    """Count a call of the function that was replaced at `path`."""
    if torch.compiler.is_compiling():  # a counter in a graph would compile it for each value
        return
    fused, own = _calls[path]
    _calls[path] = Calls(fused + is_fused, own + (not is_fused))
