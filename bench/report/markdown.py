"""The report of one GPU model, report.md, made from its recorded results alone."""

from collections.abc import Sequence
from pathlib import Path

import click

from bench.harness.cli import Output
from bench.harness.records import Row, read
from bench.report.sections import GPU_ONLY, SECTIONS
from bench.report.tables import fields

SECTIONS_OF_FIELDS = (
    "accumulation",
    "causal_lms",
    "compiled_step",
    "divergence",
    "options",
    "parallel",
    "sampled",
)
"""Experiments whose sections have a column for each field."""
WRITERS = SECTIONS | dict.fromkeys(SECTIONS_OF_FIELDS, fields)


@click.command("report")
@click.argument(
    "folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.pass_obj
def command(output: Output, /, folder: Path | None) -> None:
    """Draw the results and write report.md, in FOLDER such as bench/results/nvidia_h200."""
    from bench.report import plots  # needs matplotlib, a dependency of the demo

    folder = folder or output.folder
    pictures = plots.draw(folder)
    for path in (*pictures, write(folder, pictures)):
        click.echo(f"written: {path}")


def write(folder: Path, pictures: Sequence[Path]) -> Path:
    """Write report.md beside the results in `folder`, with the pictures named like them."""
    parts = [f"# {folder.name}"]
    if folder / "overview.png" in pictures:
        parts.append("![overview](overview.png)")
    missing = []
    for name, section in WRITERS.items():
        paths = _results(folder, name)
        run = f"python -m bench {name.replace('_', '-')}"
        if not paths and name not in GPU_ONLY:
            missing.append(f"`{run}`")
        for path in paths:
            header, rows = read(path)
            parts += [f"## {path.stem}", f"`{run}` {_origin(header)}", "\n".join(section(rows))]
            if path.with_suffix(".png") in pictures:
                parts.append(f"![{path.stem}]({path.stem}.png)")
    if missing:
        parts.append(f"## Not measured\n\n{', '.join(missing)}.")
    report = folder / "report.md"
    report.write_text("\n\n".join(parts) + "\n")
    return report


def _results(folder: Path, experiment: str) -> list[Path]:
    """Return the results of an experiment, whose names begin with its name."""

    def is_of(name: str, path: Path) -> bool:
        return path.stem == name or path.stem.startswith(f"{name}_")

    paths = sorted(folder.glob("*.jsonl"))
    longer = [name for name in WRITERS if name.startswith(f"{experiment}_")]
    return [
        path
        for path in paths
        if is_of(experiment, path) and not any(is_of(name, path) for name in longer)
    ]


def _origin(header: Row) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in header["versions"].items())
    return f"on {header['device']}, {header['date']}: {versions}."
