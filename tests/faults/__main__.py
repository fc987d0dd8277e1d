"""`python -m tests.faults`: puts faults into copies of the checkout and runs tests there.

A copy has what git would add of the working tree, links included, and comes first among the paths
that Python imports from.  Of each fault run, until a test fails,

1. the fault's own tests of the default tier (`-m "not slow"`), then those that are slow,
2. all tests of the default tier, then all that are slow,
3. the tests of integrations, where their frameworks are installed.

All tests run of many faults at once, in one copy: hardly any are left then, and where a test fails,
it runs again with each fault alone.  A test that fails without a fault is left out.  A run that
takes too long counts as a failure, since it hangs.  `noticed.json` is written after each fault.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.faults.catalogue import FAULTS, KINDS, Fault

ROOT = Path(__file__).parents[2]
NOTICED = Path(__file__).with_name("noticed.json")
INTEGRATIONS = "tests/integrations"
FRAMEWORKS = "accelerate", "peft", "trl"
"""What the tests of integrations need least."""
OWN_SECONDS, TIER_SECONDS = 600, 7200
"""Time limits of a run of a fault's own tests, and of a tier."""
PASSED, NO_TESTS = 0, 5
"""Exit statuses of pytest; with others and no test that failed, a run broke."""
MOST_AGAIN = 40
"""Tests that run again for each fault, of those that failed with several."""
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

    def __init__(self, folder: Path, jobs: int, faults: Sequence[Fault]) -> None:
        """Copy the checkout into `folder`, for these faults; pytest has `jobs` processes."""
        self.folder, self.jobs, self.original = folder, jobs, folder / "original"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, names.stdout.split("\0")):
            if os.path.lexists(ROOT / name):
                (self.original / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.original / name, follow_symlinks=False)
        (folder / "build").mkdir()  # compiled kernels, by their sources: one for all copies
        (self.original / "build").symlink_to(folder / "build")
        self.own_tests = tuple(dict.fromkeys(x for y in faults for x in self.tests_of(y)))
        """Those of all faults, which run once without a fault."""

    def tests_of(self, fault: Fault) -> list[str]:
        """Return the fault's own tests that exist."""
        return [test for test in fault.tests if has_test(self.original, test)]

    @contextlib.contextmanager
    def copy(self, faults: Iterable[Fault]) -> Iterator[Path]:
        """Yield a copy of the checkout that has these faults."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            copy = Path(name, "copy")
            shutil.copytree(self.original, copy, symlinks=True)
            for fault in faults:
                for path, text in edited(fault, copy, {}).items():
                    (copy / path).write_text(text)
            yield copy

    def own(self, fault: Fault, marks: str) -> str | None:
        """Return the first of the fault's own tests that notices it."""
        tests = self.tests_of(fault)
        if not tests:
            return None
        left_out = self.failing_anyway(self.own_tests, marks)
        with self.copy([fault]) as copy:
            found, how = self.run(copy, tests, marks, OWN_SECONDS, left_out, first=True)
        return found[0] if found else how

    def of_tier(self, faults: Sequence[Fault], tests: Sequence[str], marks: str) -> dict[str, str]:
        """Return which of a tier's tests notices each of `faults`, by name.

        All faults are in one copy, as hardly any is noticed; what fails runs once more with each
        fault alone.  This is repeated without the faults that were found, which may hide others.
        """
        left, noticed = [*faults], dict[str, str]()
        left_out = self.failing_anyway((*tests,), marks)
        while left:
            with self.copy(left) as copy:
                found, how = self.run(copy, tests, marks, TIER_SECONDS, left_out)
            if not found and how is None:
                break
            if len(left) == 1:
                noticed[left[0].name] = found[0] if found else str(how)
                break
            before = len(left)
            for fault in [*left]:
                # a run that hangs or breaks as a whole is one of some fault
                again = found[:MOST_AGAIN] if how is None else tests
                seconds = OWN_SECONDS if how is None else TIER_SECONDS
                with self.copy([fault]) as copy:
                    own, own_how = self.run(copy, again, marks, seconds, left_out, first=True)
                if own or own_how is not None:
                    noticed[fault.name] = own[0] if own else str(own_how)
                    left.remove(fault)
            if len(left) == before and how is not None:
                raise RuntimeError(f"with several faults alone: {how}")
            if len(left) == before:
                print(f"fail with several faults alone: {' '.join(found)}", flush=True)
                left_out = *left_out, *found
        return noticed

    @functools.cache  # noqa: B019  (lives as long as the process)
    def failing_anyway(self, tests: tuple[str, ...], marks: str) -> tuple[str, ...]:
        """Return the tests that fail without a fault."""
        found, how = self.run(self.original, tests, marks, TIER_SECONDS)
        if how is not None and not found:
            raise RuntimeError(f"{marks}, without a fault: {how}")
        for test in found:
            print(f"fails without a fault: {test}", flush=True)
        return (*found,)

    def run(
        self,
        copy: Path,
        tests: Sequence[str],
        marks: str,
        seconds: int,
        left_out: Iterable[str] = (),
        *,
        first: bool = False,
    ) -> tuple[list[str], str | None]:
        """Run tests in `copy`; return those that fail, and how a run without any such broke."""
        report, cache = self.folder / "report.xml", self.folder / "cache"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *tests, "-m", marks, "-q", "--tb=no"]
        command += ["-p", "no:cacheprovider", f"--numprocesses={self.jobs if self.jobs > 1 else 0}"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "--ignore=tests/faults"]
        command += [f"--deselect={test}" for test in left_out]
        if not tests:
            command += [f"--ignore={INTEGRATIONS}"]
        if first:
            command += ["-x"]
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
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return [], f"hangs: {' '.join(tests) or marks}"
            finally:
                end_session(process)
            found = failures(report)
            if status in (PASSED, NO_TESTS) or found:
                return found, None
            output.seek(0)
            errors = [x for x in output.read().splitlines() if x.startswith("ERROR")]
            return [], f"exit status {status}: {' '.join(errors[:1])}"


def notice(runner: Runner, faults: Sequence[Fault], tiers: str) -> Iterator[Noticed]:
    """Yield what notices each fault; `tiers` are "own", "default" or "all"."""
    left, begin = [*faults], time.monotonic()
    stages = [("default", True, DEFAULT), ("full", True, SLOW)]
    stages += [("default", False, DEFAULT), ("full", False, SLOW)]
    if has_frameworks():
        stages += [("integrations", False, f"{DEFAULT} or {SLOW}")]
    for tier, is_own, marks in stages[: {"own": 2, "default": 3, "all": len(stages)}[tiers]]:
        tests = (INTEGRATIONS,) if tier == "integrations" else ()
        if left:
            runner.failing_anyway(runner.own_tests if is_own else tests, marks)
        for run in [[x] for x in left] if is_own else batches(left, runner.original):
            begin = time.monotonic()
            if is_own:
                own = runner.own(run[0], marks)
                found = {} if own is None else {run[0].name: own}
            else:
                found = runner.of_tier(run, tests, marks)
            seconds = round(time.monotonic() - begin, 1)
            for fault in [x for x in run if x.name in found]:
                test = found[fault.name]
                name = "integrations" if test.startswith(INTEGRATIONS) else tier
                yield Noticed(fault.name, fault.sha, name, test, seconds)
            left = [fault for fault in left if fault.name not in found]
    for fault in left:
        yield Noticed(fault.name, fault.sha, None, None, round(time.monotonic() - begin, 1))


def batches(faults: Iterable[Fault], folder: Path) -> list[list[Fault]]:
    """Return lists of faults that fit into the same copy of the checkout in `folder`."""
    found = list[tuple[list[Fault], dict[str, str]]]()
    for fault in faults:
        for batch, sources in found:
            with contextlib.suppress(ValueError):
                sources.update(edited(fault, folder, sources))
                batch.append(fault)
                break
        else:
            found.append(([fault], edited(fault, folder, {})))
    return [batch for batch, _ in found]


def edited(fault: Fault, folder: Path, sources: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a fault's files, by path.

    They are those of a copy in `folder`, or of `sources`, which other faults have edited.

    Raises:
        ValueError: if an edit does not fit.
    """
    texts: dict[str, str] = {}
    for edit in fault.edits:
        known = {**sources, **texts}
        source = known.get(edit.path) or (folder / edit.path).read_text()
        texts[edit.path] = edit.applied(source)
    return texts


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


def print_summary(found: dict[str, Noticed]) -> None:
    """Print each fault with the test that noticed it, then counts of tiers by kind."""
    for fault in FAULTS:
        if fault.name in found:
            one = found[fault.name]
            tier, test = one.tier or "nothing", one.test or ""
            print(f"{fault.kind:9} {fault.name:46} {tier:13} {one.seconds:6.0f} s  {test}")
    tiers = "default", "full", "integrations", None
    print(f"\n{'kind':9}" + "".join(f"{tier or 'nothing':>14}" for tier in tiers))
    for kind in KINDS:
        own = [found[x.name].tier for x in FAULTS if x.kind == kind and x.name in found]
        print(f"{kind:9}" + "".join(f"{own.count(tier):14}" for tier in tiers))
    every = [found[x.name].tier for x in FAULTS if x.name in found]
    print(f"{'all':9}" + "".join(f"{every.count(tier):14}" for tier in tiers))


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
        for one in notice(Runner(Path(folder), arguments.jobs, chosen), chosen, arguments.tier):
            found[one.name] = one
            write_noticed(found)
            tier = one.tier or "nothing"
            print(f"{one.name}: {tier}, {one.seconds:.0f} s, {one.test}", flush=True)
    print_summary({fault.name: found[fault.name] for fault in FAULTS if fault.name in found})


if __name__ == "__main__":
    main()
