"""`python -m tests.faults`: puts faults into copies of the checkout and runs tests there.

A copy has what git would add of the working tree, links included, and comes first among the paths
that Python imports from.  Of each fault run, until a test fails,

1. the fault's own tests of the default tier (`-m "not slow"`), then those that are slow,
2. all tests of the default tier, then all that are slow,
3. the tests of integrations, where their frameworks are installed.

A test that fails without the fault, too, is left out.  A run that takes too long counts as a
failure, since it hangs.  `noticed.json` is written after each fault.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.faults.catalogue import FAULTS, Fault

ROOT = Path(__file__).parents[2]
NOTICED = Path(__file__).with_name("noticed.json")
INTEGRATIONS = "tests/integrations"
FRAMEWORKS = "accelerate", "peft", "trl"
"""What the tests of integrations need least."""
OWN_SECONDS, TIER_SECONDS = 600, 7200
"""Time limits of a run of a fault's own tests, and of a tier."""
PASSED, NO_TESTS = 0, 5
"""Exit statuses of pytest; with others and no test that failed, a run broke."""
DEFAULT, SLOW = "not slow", "slow"


@dataclass(frozen=True)
class Noticed:
    """Which test noticed a fault."""

    name: str
    sha: str
    """Of the fault's edits when it was run."""
    tier: str | None
    """"default", "full" or "integrations"; None if no test noticed."""
    test: str | None
    """The first test that failed, or how the run ended."""
    seconds: float
    """Of the run that noticed it, or of the last one."""


class Runner:
    """Runs faults in copies of the checkout as it is now."""

    def __init__(self, folder: Path, jobs: int) -> None:
        """Copy the checkout into `folder`; pytest has `jobs` processes."""
        self.folder, self.jobs, self.original = folder, jobs, folder / "original"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, names.stdout.split("\0")):
            if os.path.lexists(ROOT / name):
                (self.original / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.original / name, follow_symlinks=False)
        (folder / "build").mkdir()  # compiled kernels, by their sources: one for all copies
        (self.original / "build").symlink_to(folder / "build")

    def notice(self, fault: Fault, tiers: str) -> Noticed:
        """Return what notices a fault; `tiers` are "own", "default" or "all"."""
        own = [test for test in fault.tests if has_test(self.original, test)]
        stages = [("default", own, DEFAULT), ("full", own, SLOW)]
        stages += [("default", [], DEFAULT), ("full", [], SLOW)]
        if has_frameworks():
            stages += [("integrations", [INTEGRATIONS], f"{DEFAULT} or {SLOW}")]
        seconds = 0.0
        with self.copy(fault) as copy:
            for tier, tests, marks in stages[: {"own": 2, "default": 3, "all": len(stages)}[tiers]]:
                begin = time.monotonic()
                found = self.first_failure(copy, tests, marks)
                seconds = round(time.monotonic() - begin, 1)
                if found is not None:
                    tier = "integrations" if found.startswith(INTEGRATIONS) else tier
                    return Noticed(fault.name, fault.sha, tier, found, seconds)
        return Noticed(fault.name, fault.sha, None, None, seconds)

    @contextlib.contextmanager
    def copy(self, fault: Fault) -> Iterator[Path]:
        """Yield a copy of the checkout that has this fault."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            copy = Path(name, "copy")
            shutil.copytree(self.original, copy, symlinks=True)
            for edit in fault.edits:
                path = copy / edit.path
                path.write_text(edit.applied(path.read_text()))
            yield copy

    def first_failure(self, copy: Path, tests: Sequence[str], marks: str) -> str | None:
        """Return the first test that fails in `copy` alone, or how the run broke."""
        left_out: list[str] = []
        while True:
            found = self.run(copy, tests, marks, left_out)
            is_test = found is not None and found.startswith("tests/")
            if found is None or not is_test or self.run(self.original, [found], "") is None:
                return found
            print(f"fails without a fault: {found}", flush=True)
            left_out.append(found)

    def run(
        self, copy: Path, tests: Sequence[str], marks: str, left_out: Sequence[str] = ()
    ) -> str | None:
        """Run tests in `copy`, all if none are named, up to one that fails, which is returned.

        A run without any such may hang or break: then return how.
        """
        report, cache = self.folder / "report.xml", self.folder / "cache"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *tests, "-m", marks, "-q", "--tb=no", "-x"]
        command += ["-p", "no:cacheprovider", f"--numprocesses={self.jobs if self.jobs > 1 else 0}"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "--ignore=tests/faults"]
        command += [f"--deselect={test}" for test in left_out]
        if not tests:
            command += [f"--ignore={INTEGRATIONS}"]
        is_own = tests and INTEGRATIONS not in tests
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy), "CUTEFCE_CACHE_DIR": str(cache)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(OWN_SECONDS if is_own else TIER_SECONDS)
            except subprocess.TimeoutExpired:
                return f"hangs: {' '.join(tests) or marks}"
            finally:
                end_session(process)
            found = failures(report)
            if status in (PASSED, NO_TESTS) or found:
                return found[0] if found else None
            output.seek(0)
            errors = [x for x in output.read().splitlines() if x.startswith("ERROR")]
            return f"exit status {status}: {' '.join(errors[:1])}"


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a process and of those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def has_test(folder: Path, test: str) -> bool:
    """Whether a file or test, as pytest names it, is in the checkout in `folder`."""
    name, _, function = test.partition("::")
    path, function = folder / name, function.partition("[")[0]
    return path.exists() and (not function or f"def {function}(" in path.read_text())


def failures(report: Path) -> list[str]:
    """Return the tests that failed, as pytest names them, of a JUnit report."""
    if not report.exists():
        return []
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            path, name = case.get("file"), case.get("name")
            found.append(f"{path}::{name}" if path else f"{case.get('classname')}::{name}")
    return found


def has_frameworks() -> bool:
    """Whether the tests of integrations can run."""
    return all(importlib.util.find_spec(name) for name in FRAMEWORKS)


def read_noticed() -> dict[str, Noticed]:
    """Return what was recorded, by the names of faults."""
    if not NOTICED.exists():
        return {}
    return {item["name"]: Noticed(**item) for item in json.loads(NOTICED.read_text())}


def write_noticed(found: dict[str, Noticed]) -> None:
    """Write the records of faults in the catalogue, sorted by name, one a line."""
    known = {fault.name for fault in FAULTS}
    items = [json.dumps(asdict(found[name])) for name in sorted(found) if name in known]
    part = NOTICED.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(items) + "\n]\n")
    part.replace(NOTICED)


def main() -> None:
    """Run the faults that are named, or all, and record what noticed them."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults; all if none is given")
    parser.add_argument("--tier", choices=("own", "default", "all"), default="all")
    parser.add_argument("--jobs", type=int, default=1, help="processes of pytest")
    parser.add_argument("--resume", action="store_true", help="skip what is recorded")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if not has_frameworks():
        print(f"{INTEGRATIONS} is skipped: it needs {', '.join(FRAMEWORKS)}")
    found = read_noticed()
    chosen = [fault for fault in FAULTS if not arguments.names or fault.name in arguments.names]
    if arguments.resume:
        chosen = [x for x in chosen if x.name not in found or found[x.name].sha != x.sha]
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), arguments.jobs)
        for fault in chosen:
            found[fault.name] = one = runner.notice(fault, arguments.tier)
            write_noticed(found)
            tier = one.tier or "nothing"
            print(f"{one.name}: {tier}, {one.seconds:.0f} s, {one.test}", flush=True)


if __name__ == "__main__":
    main()
