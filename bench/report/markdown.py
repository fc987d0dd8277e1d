"""The report of one GPU model, report.md, made from its recorded results alone."""

from collections.abc import Sequence
from pathlib import Path

import click

from bench.harness.cli import Output
from bench.harness.records import Row, read
from bench.report.sections import GPU_ONLY, SECTIONS


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
    for name, section in SECTIONS.items():
        files = sorted(folder.glob(f"{name}*.jsonl"))
        run = f"python -m bench {name.replace('_', '-')}"
        if not files and name not in GPU_ONLY:
            parts.append(f"## {name}\n\nNot measured: `{run}`.")
        for path in files:
            header, rows = read(path)
            parts += [f"## {path.stem}", f"`{run}` {_origin(header)}", "\n".join(section(rows))]
            if path.with_suffix(".png") in pictures:
                parts.append(f"![{path.stem}]({path.stem}.png)")
    report = folder / "report.md"
    report.write_text("\n\n".join(parts) + "\n")
    return report


def _origin(header: Row) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in header["versions"].items())
    return f"on {header['device']}, {header['date']}: {versions}."
