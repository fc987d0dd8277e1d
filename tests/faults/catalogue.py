"""Faults: each undoes a past fix, or puts its equivalent into the code of today.

`catalogue.txt` has them under headings: a line of a name and the commit that mended it, a sentence
of what goes wrong, the edits, and after `!` the tests that should notice, the likeliest first.  An
edit is a path after `@`, lines of it after `-`, and the faulty ones after `+`.  The text before
occurs exactly once in its file, so that an edit that no longer fits is an error;
`test_catalogue.py` says so.

Past fixes that are none of these: predictions that were wrong by less than what is promised of
them, and races between launches, which a GPU alone can show, and not each time.  Four faults were
never here: races and deadlocks that an emulator has to see, with the commit that tested it first.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """One replaced place."""

    path: str
    """Of a file, relative to the repository and not through the links of `cutefce/`."""
    before: str
    """Text that occurs exactly once in that file."""
    after: str
    """The faulty text."""

    def applied(self, source: str) -> str:
        """Return the faulty text of the file's `source`.

        Raises:
            ValueError: if the text before does not occur exactly once.
        """
        count = source.count(self.before)
        if count != 1:
            raise ValueError(f"{self.path}: found {count} times, expected once:\n{self.before}")
        return source.replace(self.before, self.after)


@dataclass(frozen=True)
class Fault:
    """A past bug as edits of today's sources."""

    name: str
    """A short unique name."""
    fixed_in: str
    """The short hash of the commit that mended it."""
    what: str
    """What goes wrong, in a sentence."""
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    """Files or tests, as pytest names them."""

    @property
    def sha(self) -> str:
        """A short hash of the edits."""
        return hashlib.sha256(repr([*map(tuple, self.edits)]).encode()).hexdigest()[:12]


def _fault(text: str) -> Fault:
    """Return the fault of a paragraph of the catalogue."""
    head, what, *lines = text.strip("\n").split("\n")
    name, fixed_in = head.split()
    tests = tuple(line[2:] for line in lines if line[0] == "!")
    edits = []
    for edit in "\n".join(line for line in ["", *lines] if line[:1] != "!").split("\n@ ")[1:]:
        path, *changed = edit.split("\n")
        before, after = ("\n".join(x[2:] for x in changed if x[0] == sign) for sign in "-+")
        edits.append(Edit(path, before, after))
    return Fault(name, fixed_in, what, tuple(edits), tests)


def _read(text: str) -> tuple[Fault, ...]:
    paragraphs = text.strip("\n").split("\n\n")
    return tuple(_fault(paragraph) for paragraph in paragraphs if paragraph[0] != "#")


FAULTS = _read(Path(__file__).with_name("catalogue.txt").read_text())
