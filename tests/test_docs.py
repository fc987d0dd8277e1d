"""The documentation is true: its links, paths, commands, snippets and numbers."""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import cutefce
from bench.__main__ import main as bench
from cutefce.__main__ import main as command
from cutefce.ops.divergence.steps import TileKind
from cutefce.ops.interface.arguments import OPTIONS
from cutefce.ops.interface.arguments import Kind as OptionKind
from cutefce.ops.program.steps import Kind
from cutefce.ops.sampling.steps import SampleKind
from cutefce.ops.schema import OperatorRecord
from tests.lines import lines_by_feature
from tests.support.package import FOLDERS as PACKAGE
from tests.support.package import ROOT, modules

README = ROOT / "README.md"
DOCS = ROOT / "docs"
INTERNALS = DOCS / "internals"
ARCHITECTURE = INTERNALS / "architecture.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
USER_PAGES = [page for page in sorted(DOCS.glob("*.md")) if page.name != "api.md"]
FOLDERS = (*PACKAGE, "bench", "docs", "examples", "tests", ".ci", ".github")
COMMAND_SOURCES = [
    *PAGES,
    ROOT / "Makefile",
    *sorted((ROOT / ".github").rglob("*.yml")),
    *sorted((ROOT / "examples").glob("*.py")),
]
PACKAGE_FOLDERS = sorted(
    path.parent for layer in (*PACKAGE, "bench") for path in (ROOT / layer).rglob("__init__.py")
)
README_LINES = 100
USER_PAGE_LINES = 120
QUESTIONS = ["What you set", "What it costs", "How you see it"]
"""What a page for users answers, in this order."""


def names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def sources() -> str:
    """Return the text of the package."""
    return "\n".join(path.read_text() for path in modules().values())


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """Yield what each fence of a page says it is, and its text."""
    for match in re.finditer(r"^```(\w[^\n]*)\n(.*?)^```", page.read_text(), re.M | re.S):
        yield match[1], match[2]


def inline_code(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"(?<!`)`([^`]+)`", text)
    return [" ".join(code.split()) for code in found]


def section(page: Path, heading: str) -> str:
    return page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """Return the cells of a table's rows, without its header."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def anchors(page: Path) -> set[str]:
    """Return what links to the headings of a page end with."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_paths_exist(page: Path) -> None:
    for code in inline_code(page):
        first, slash, _ = code.partition("/")
        if slash and first in FOLDERS and re.fullmatch(r"[\w./<>-]+", code):
            assert (ROOT / code.split("<")[0]).exists(), code
        elif re.fullmatch(r"[\w-]+\.(md|toml|txt)", code):
            assert (ROOT / code).exists(), code


def test_the_site_has_every_page() -> None:
    """`make site` finds broken links, but needs mkdocs."""
    listed = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    own = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert {path for path in listed if not path.startswith("repository/")} == own | {"index.md"}
    outside = [path.removeprefix("repository/") for path in listed if path not in own]
    assert all((ROOT / path).exists() for path in outside if path != "index.md")


def test_the_tree_lists_every_module() -> None:
    (tree,) = (text for kind, text in fences(ARCHITECTURE) if kind == "text")
    listed = [line.split()[0] for line in tree.splitlines() if line]
    every = [*modules().values(), *(ROOT / "bench").rglob("*.py")]
    found = {names(path) for path in every if path.name != "__init__.py"}
    assert sorted(listed) == sorted(found | {"cutefce/__init__.py"})


@pytest.mark.parametrize("folder", PACKAGE_FOLDERS, ids=names)
def test_docstrings_of_folders_list_their_files(folder: Path) -> None:
    """A list in a folder's docstring is that of its files; other files are of its subfolders."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    mentioned = set(re.findall(r"\b(\w+\.py)\b", text))
    listed = set(re.findall(r"^(\w+\.py)\b", text, re.M))
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert listed <= files
    assert mentioned <= {path.name for path in folder.rglob("*.py")}
    assert not listed or files <= mentioned


def test_lines_by_feature_are_those_of_the_files() -> None:
    *rows, total = table(section(ARCHITECTURE, "Lines by feature"))
    found = lines_by_feature()
    assert [name for name, _ in rows] == [*found]
    for name, lines in (*rows, total):
        counted = found.get(name) or sum(found.values())
        assert int(lines.replace(",", "")) == pytest.approx(counted, rel=0.05), name


def test_every_kind_of_step_is_listed() -> None:
    listed = re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", section(ARCHITECTURE, "One call, step by step"))
    kinds = (*Kind, *TileKind, *SampleKind)
    assert {kind.name for kind in kinds} <= set(listed)


def written_commands(path: Path) -> list[str]:
    """Return the lines, and pieces of inline code, of a file that may be commands."""
    text = path.read_text()
    if path.suffix == ".md":
        blocks = [*re.findall(r"^    (.*)$", text, re.M), *(block for _, block in fences(path))]
        return [*"\n".join(blocks).splitlines(), *inline_code(path)]
    return [*(line.strip() for line in text.splitlines()), *re.findall(r"`([^`]+)`", text)]


def arguments_of(line: str) -> tuple[str, list[str]] | None:
    """Return which program of this project a command runs and its arguments, None if none."""
    line = re.sub(r"^(- )?(run: )?(\w+=\S+ )*", "", re.sub(r"\$\([^)]*\)", "", line))
    match = re.match(
        r"(?:\S*python3? -m |torchrun .*?-m |\S*/python -m )(cutefce|bench|examples\.\w+)(?= |$)"
        r"|(cutefce|make) (?=[a-z])",
        line,
    )
    if match is None:
        return None
    words = shlex.split(line[match.end() :], comments=True)
    ends = [i for i, word in enumerate(words) if word in ("||", "&&", ";") or word.endswith(";")]
    words = words[: min(ends, default=len(words))]
    return match[1] or match[2], [word for word in words if "$" not in word]


def check(group: click.Command, arguments: list[str]) -> None:
    """Raise click's error unless the command has these subcommands and options."""
    context = click.Context(group)
    _, rest, _ = group.make_parser(context).parse_args(list(arguments))
    if isinstance(group, click.Group) and rest:
        found = group.get_command(context, rest[0])
        assert found is not None, f"{group.name} has no command {rest[0]}"
        check(found, rest[1:])


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("path", COMMAND_SOURCES, ids=names)
def test_commands_exist(path: Path) -> None:
    for line in written_commands(path):
        found = arguments_of(line)
        if found is None:
            continue
        program, arguments = found
        if program == "make":
            targets = {word for word in arguments if "=" not in word and word[0] != "."}
            assert targets <= make_targets(), line
        elif program.startswith("examples."):
            assert (ROOT / program.replace(".", "/")).with_suffix(".py").exists(), line
        else:
            check({"cutefce": command, "bench": bench}[program], arguments)


def subcommands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command below `group` with what is typed to run it."""
    for name, found in group.commands.items():
        if isinstance(found, click.Group):
            yield from subcommands(found, f"{path} {name}")
        else:
            yield f"{path} {name}", found


def test_every_subcommand_and_option_is_documented() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for typed, found in subcommands(command, "cutefce"):
        assert typed in text
        for option in (name for param in found.params for name in param.opts if name[:2] == "--"):
            assert re.search(rf"{typed}[^\n]* {option}\b|^\| `{option}`", text, re.M), option


def test_every_benchmark_is_documented() -> None:
    text = (INTERNALS / "benchmarks.md").read_text()
    documented = set(re.findall(r"`[^`]*-m bench ([\w-]+)", text)) | {"report"}
    assert documented == set(bench.commands)


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_snippets_compile(page: Path) -> None:
    for kind, text in fences(page):
        if kind.startswith("python"):
            compile(text, names(page), "exec")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python run" in page.read_text()], ids=names
)
def test_runnable_snippets_run(page: Path) -> None:
    for kind, text in fences(page):
        if kind == "python run":
            exec(compile(text, names(page), "exec"), {})


@pytest.mark.gpu
def test_a_replayed_step_has_the_results_of_its_data() -> None:
    (text,) = (text for kind, text in fences(DOCS / "gpu.md") if kind == "python gpu")
    found: dict[str, Any] = {}
    exec(compile(text, "docs/gpu.md", "exec"), found)
    want = found["step"]()
    for name, x in zip(("loss", "dx", "dw"), want, strict=True):
        assert torch.equal(found[name], x), name


def signatures() -> Iterator[tuple[str, ast.arguments]]:
    """Yield name and arguments of each function whose signature the API page shows."""
    for kind, text in fences(DOCS / "api.md"):
        if kind == "text" or text.startswith("def "):
            source = text.removeprefix("def ").strip().removesuffix(": ...")
            (function,) = ast.parse(f"def {source}: ...").body
            assert isinstance(function, ast.FunctionDef)
            yield function.name, function.args


def real_signature(name: str) -> tuple[list[str], dict[str, object]]:
    """Return the positional arguments of a function of the API, and the others' defaults."""
    if name == "loss":
        arguments = torch.ops.cutefce.loss.default._schema.arguments
        positional = [arg.name for arg in arguments if not arg.kwarg_only]
        return positional, {arg.name: arg.default_value for arg in arguments if arg.kwarg_only}
    real = inspect.signature(getattr(cutefce, name)).parameters.values()
    positional = [p.name for p in real if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, {p.name: p.default for p in real if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize(("name", "documented"), [*signatures()])
def test_documented_signatures_are_the_real_ones(name: str, documented: ast.arguments) -> None:
    positional, defaults = real_signature(name)
    keywords = zip(documented.kwonlyargs, documented.kw_defaults, strict=True)
    shown = {arg.arg: ast.literal_eval(value) for arg, value in keywords if value is not None}
    assert shown == defaults
    assert [arg.arg for arg in documented.args] == positional


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", USER_PAGES, ids=names)
def test_pages_for_users_answer_three_questions(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= USER_PAGE_LINES
    if page.name != "troubleshooting.md":
        headings = re.findall(r"^## (.*)$", text, re.M)
        assert headings[: len(QUESTIONS)] == QUESTIONS


def test_warnings_of_the_docs_are_those_of_the_sources() -> None:
    text = sources()
    for row in table((DOCS / "troubleshooting.md").read_text()):
        for message in re.findall(r"`([^`]+)`", row[0]):
            parts = [part for part in re.split(r"\.\.\.|cutefce:", message) if len(part) > 1]
            assert parts
            assert all(part.strip() in text for part in parts), message


def test_every_environment_variable_is_documented() -> None:
    used = set(re.findall(r'"(CUTEFCE_[A-Z_]+)"', sources()))
    text = section(DOCS / "api.md", "Environment variables")
    assert set(re.findall(r"CUTEFCE_[A-Z_]+", text)) == used


def test_ci_runs_on_a_cpu_and_on_the_versions_of_the_readme() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: .ci/run" in workflow and "self-hosted" not in workflow
    oldest, pinned, newest = re.findall(r'"(.*?)"', re.findall(r"torch: \[(.*?)\]", workflow)[0])
    pythons = re.findall(r'"(.*?)"', re.findall(r"python: \[(.*?)\]", workflow)[0])
    readme = README.read_text()
    torches = f"torch {oldest}, {pinned} and {newest}"
    assert f"{torches} on Python {pythons[0]} to {pythons[-1]}" in readme
    assert f"You need Python ≥ {pythons[0]} and torch ≥ {oldest}" in readme
    assert f"torch=={pinned}." in (ROOT / "constraints.txt").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={oldest}"' in project and f'requires-python = ">={pythons[0]}"' in project


def cells_of_options() -> dict[str, list[str]]:
    """Return the cells of each argument of `linear_cross_entropy` in the API page, without code."""
    text = section(DOCS / "api.md", "`linear_cross_entropy`").replace("`", "")
    return {cells[0]: cells[1:] for cells in table(text)}


@pytest.mark.parametrize("record", OPTIONS, ids=lambda record: record.__name__)
def test_the_api_page_says_what_the_table_of_options_says(record: type[OperatorRecord]) -> None:
    documented = cells_of_options()
    for name in record.names(of="loss"):
        own, (kind, meaning) = record.arguments()[name], documented[name]
        assert meaning, name
        if own.type.schema in ("float", "float?") or name == "samples":
            assert kind == re.sub(r"^an? ", "", own.type.values), name


@pytest.mark.parametrize("kind", OptionKind)
def test_the_page_of_options_lists_them_by_kind(kind: OptionKind) -> None:
    rows = table(section(INTERNALS / "options.md", "Where options are in the code"))
    (listed,) = (cells[1] for cells in rows if cells[0].startswith(kind.value))
    for record in OPTIONS:
        own = {name: record.arguments()[name] for name in record.names(of="loss")}
        assert all(f"`{name}`" in listed for name, x in own.items() if x.kind is kind)
