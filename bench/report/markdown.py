"""The report of one GPU model, report.md, made from its recorded results alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from bench.experiments.peers import README_SHAPES
from bench.harness.cli import Output
from bench.harness.records import OUT_OF_MEMORY, read
from bench.report.figures import results
from bench.report.sections import GPU_ONLY, SECTIONS

NOT_OF_ONE_GPU = "parallel", "causal_lms"
"""Experiments that `python -m bench all` does not run."""


@click.command("report")
@click.argument("folders", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.pass_obj
def command(output: Output, /, folders: tuple[Path, ...]) -> None:
    """Draw the results and write report.md, in FOLDERS such as bench/results/nvidia_h200."""
    from bench.report import plots  # needs matplotlib, a dependency of the demo

    for folder in folders or (output.folder,):
        pictures = plots.draw(folder)
        for path in (*pictures, write(folder, pictures)):
            click.echo(f"written: {path}")
        for text in origins(folder)[1:]:
            click.echo(text)


def write(folder: Path, pictures: Sequence[Path]) -> Path:
    """Write report.md beside the results in `folder`, with the pictures named like them."""
    report = folder / "report.md"
    report.write_text(text_of(folder, pictures))
    return report


def text_of(folder: Path, pictures: Sequence[Path]) -> str:
    """Return the text of report.md."""
    parts = [f"# {folder.name}", *origins(folder)]
    if folder / "overview.png" in pictures:
        parts.append("![overview](overview.png)")
        parts.append("\n".join(results(folder, README_SHAPES["cuda"])))
    missing = []
    for name, section in SECTIONS.items():
        paths = _results(folder, name)
        run = f"python -m bench {name.replace('_', '-')}"
        if not paths and name not in (*GPU_ONLY, *NOT_OF_ONE_GPU):
            missing.append(f"`{run}`")
        for path in paths:
            header, rows = read(path)
            parts += [f"## {path.stem}", f"`{run}`, {header['date']}."]
            parts += ["\n".join(section(rows))] if rows else []
            for key in header.get(OUT_OF_MEMORY, ()):
                parts.append(f"Out of memory: {', '.join(f'{k} {v}' for k, v in key.items())}.")
            if path.with_suffix(".png") in pictures:
                parts.append(f"![{path.stem}]({path.stem}.png)")
    if missing:
        parts.append(f"## Not measured\n\n{', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def origins(folder: Path) -> list[str]:
    """Return lines that say which versions the records of a folder are of.

    Of one version that is one line, with the device, the fingerprint of the sources as `sources`,
    and the packages.  Otherwise that line is about most records, and more lines say what differs
    for which others.
    """
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        header, _ = read(path)
        versions = {"device": header["device"], **header["versions"]}
        groups.setdefault(tuple(versions.items()), []).append(f"`{path.stem}`")
    if not groups:
        return []
    ranked = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    (most, names), *others = ranked
    if not others:
        return [f"All records are of one version: {_listed(most)}."]
    first = f"**The records are of {len(groups)} versions.** {', '.join(names)}: {_listed(most)}."
    differ = [
        f"- {', '.join(stems)}: {_listed(pair for pair in versions if pair not in most)}"
        for versions, stems in others
    ]
    return [first, "The others differ in:", "\n".join(differ)]


def _listed(versions: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions)


def _results(folder: Path, experiment: str) -> list[Path]:
    """Return the results of an experiment, whose names begin with its name."""

    def is_of(name: str, path: Path) -> bool:
        return path.stem == name or path.stem.startswith(f"{name}_")

    paths = sorted(folder.glob("*.jsonl"))
    longer = [name for name in SECTIONS if name.startswith(f"{experiment}_")]
    return [
        path
        for path in paths
        if is_of(experiment, path) and not any(is_of(name, path) for name in longer)
    ]
