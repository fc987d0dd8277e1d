"""Command line of the benchmarks."""

import argparse
import dataclasses
import json
import platform
import re
from datetime import datetime, timezone
from pathlib import Path

import torch

import cutefce
from bench.step import Row, Shape, run

DEFAULT_SHAPES = {
    "cpu": Shape(tokens=2048, hidden=1024, vocab=50257, dtype="float32"),
    "cuda": Shape(tokens=8192, hidden=4096, vocab=131072, dtype="bfloat16"),
}


def main() -> None:
    """Measure a step, print the table and write the data."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--tokens", type=int, help="N")
    parser.add_argument("--hidden", type=int, help="D")
    parser.add_argument("--vocab", type=int, help="V")
    parser.add_argument("--dtype", help="bfloat16, float16, float32 or float64")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {k: v for k, v in vars(options).items() if k in Shape.__annotations__ and v}
    shape = dataclasses.replace(DEFAULT_SHAPES[device], **given)
    rows = run(shape, device, options.repeats)
    print(_table(shape, rows))
    print(f"written: {_write(options.output, device, shape, rows)}")


def _table(shape: Shape, rows: list[Row]) -> str:
    lines = [f"{shape}", f"{'form':17}{'ms':>9}  /products /two-stage  peak MiB"]
    lines += [
        f"{row.form:17}{row.median_ms:9.2f}{row.ratio_to_products:11.3f}"
        f"{row.ratio_to_two_stage:11.3f}{row.peak_mib:10.1f}"
        for row in rows
    ]
    return "\n".join(lines)


def _write(folder: Path, device: str, shape: Shape, rows: list[Row]) -> Path:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    slug = re.sub(r"\W+", "_", name.lower())
    path = folder / slug / f"step_{shape.tokens}x{shape.hidden}x{shape.vocab}_{shape.dtype}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": name,
        "versions": {
            "cutefce": cutefce.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "shape": dataclasses.asdict(shape),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


if __name__ == "__main__":
    main()
