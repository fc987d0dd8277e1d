"""Joining of records whose measurements were taken in parts, on GPUs of one model."""

from pathlib import Path

import click

from bench.harness.cli import Output
from bench.harness.records import OUT_OF_MEMORY, Row, conditions, read, write
from bench.report.compare import row_key


@click.command("merge")
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.pass_obj
def command(output: Output, /, folders: tuple[Path, ...]) -> None:
    """Join the results in FOLDERS, which are outputs of the same sources, file by file."""
    names = dict.fromkeys(
        path.relative_to(folder) for folder in folders for path in sorted(folder.glob("*/*.jsonl"))
    )
    for name in names:
        header, rows = joined([folder / name for folder in folders if (folder / name).exists()])
        write(output.root / name, header, rows)
        click.echo(f"written: {output.root / name}")


def joined(paths: list[Path]) -> tuple[Row, list[Row]]:
    """Return the header and the rows of several files of one experiment; the last has the date.

    Raises:
        click.ClickException: if they are of other versions, or two have the same measurement.
    """
    header, rows = read(paths[0])
    keys = set(map(row_key, rows))
    for path in paths[1:]:
        other, more = read(path)
        if conditions(header) != conditions(other):
            raise click.ClickException(
                f"{path}: got {other}, expected the versions of {paths[0]}: {header}"
            )
        for row in more:
            if row_key(row) in keys:
                raise click.ClickException(f"{path}: got a measurement twice: {row_key(row)}")
        too_large = [key for one in (header, other) for key in one.get(OUT_OF_MEMORY, ())]
        header, rows = {**other, OUT_OF_MEMORY: too_large}, rows + more
        keys.update(map(row_key, more))
    return header, rows
