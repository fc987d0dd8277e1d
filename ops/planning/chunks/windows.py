"""Windows inside a chunk: where they begin and end, and how wide they are.

All but the last have one width, a multiple of a unit.  The last one has the rest, and may be wider.
With units that fill waves of tiles, windows take as many waves as all columns at once.
"""

from collections.abc import Iterator

from cutefce.cute_kernels.integers import ceil_div, round_up


def split_columns(vocab: int, width: int, widest: int) -> Iterator[tuple[int, int]]:
    """Cut [0, vocab) into windows [start, end) of `width`, and a last one of at most `widest`."""
    start = 0
    while vocab - start > widest:
        yield start, start + width
        start += width
    yield start, vocab


def window_widths(vocab: int, most: int, unit: int) -> tuple[int, int]:
    """Return the width of all windows but the last, a multiple of `unit`, and that of the widest.

    Of at most `most` windows, the widest one is as narrow as possible; its width may be more than
    `vocab`.
    """
    narrow, wide = vocab // (most * unit) * unit, round_up(ceil_div(vocab, most), unit)
    last = vocab - (most - 1) * narrow
    return (narrow, last) if narrow and last < wide else (wide, wide)
