"""Figures of the README and the docs, which are those of the committed records.

A part of a page is a whole table, which is found by its first line, or words with numbers.  What
the records hold replaces what the page has there; everything else is written by hand.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench.experiments.options import SCORES, TOP
from bench.experiments.options import UNFUSED as UNFUSED_SCORES
from bench.experiments.peers import MAIN_HEAD, README_PEERS, README_SHAPES, README_WORKSPACES
from bench.experiments.sampled_curves import summarize
from bench.experiments.training_step import LLAMA, QWEN, SAMPLED
from bench.harness.problems import Shape, sizes_of
from bench.harness.records import RESULTS, Row, newest

ROOT = RESULTS.parents[1]
H200 = RESULTS / "nvidia_h200"
UNFUSED = "F.linear, F.cross_entropy in float32"
MANY_TOKENS = Shape(32768, 4096, 131072, "bfloat16")
NUMBER = r"([-+]?\d[\d.]*\d|\d)"


@dataclass(frozen=True)
class Words:
    """Words of a page, with `{}` where it has numbers; any white space separates words."""

    words: str
    numbers: Sequence[str]


Table = list[str]
"""Lines of a table; a page has the same first line."""


@click.command("figures")
def command() -> None:
    """Write the figures of the committed records into the README and the docs."""
    for name, parts in PAGES.items():
        path = ROOT / name
        path.write_text(filled(path.read_text(), parts()))
        click.echo(f"written: {path}")


def filled(text: str, parts: Iterator[Table | Words]) -> str:
    """Return the text of a page with the figures of its parts.

    Raises:
        ValueError: if the page lacks a part, or has one twice.
    """
    for part in parts:
        text = _with_numbers(text, part) if isinstance(part, Words) else _with_table(text, part)
    return text


def _with_table(text: str, table: Table) -> str:
    pattern = rf"^{re.escape(table[0])}\n(?:\|.*\n)*"
    return _replaced(text, pattern, lambda _: "".join(line + "\n" for line in table), table[0])


def _with_numbers(text: str, part: Words) -> str:
    pieces = [r"\s+".join(map(re.escape, re.split(r"\s+", x))) for x in part.words.split("{}")]

    def replaced(match: re.Match[str]) -> str:
        new, begin = "", match.start()
        for group, number in enumerate(part.numbers, 1):
            new += text[begin : match.start(group)] + number
            begin = match.end(group)
        return new + text[begin : match.end()]

    return _replaced(text, NUMBER.join(pieces), replaced, part.words)


def _replaced(text: str, pattern: str, new: Callable[[re.Match[str]], str], what: str) -> str:
    text, count = re.subn(pattern, new, text, flags=re.M)
    if count != 1:
        raise ValueError(f"got {count} times, expected once: {what}")
    return text


def results(folder: Path, shapes: Sequence[Shape]) -> Table:
    """Return the README's table of a GPU, with two columns for each head."""
    sizes = [f"{shape.tokens} × {shape.hidden} × {shape.vocab}" for shape in shapes]
    lines = [f"| tokens × hidden × classes | {' | | '.join(sizes)} | |"]
    lines += ["|---" * (1 + 2 * len(sizes)) + "|", "| " + "| time | MiB " * len(sizes) + "|"]
    names = {f"cutefce {name}": f"cutefce {name}" for name in README_WORKSPACES}
    names |= {name: name for name in README_PEERS} | {UNFUSED: "unfused"}
    data = []
    for shape in shapes:
        try:
            data.append(_by_name(newest(folder, "peers", **sizes_of(shape))[1]))
        except LookupError:  # which the GPU has too little memory for
            data.append({})
    for label, name in names.items():
        cells = []
        for rows in data:
            row = rows.get(name)
            has_run = row is not None and row["median_ms"] is not None
            cells += [_ratio(row), _mib(row)] if row and has_run else ["–", "–"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def readme() -> Iterator[Table | Words]:
    """Yield the parts of README.md."""
    rows = _by_name(newest(H200, "training_step", model=LLAMA)[1])
    library, ours = rows["transformers"], rows["cutefce"]
    peak = [f"{row['peak_mib'] / 1024:.1f}" for row in (library, ours)]
    times = [_ms(rows[x]) for x in ("transformers", "cutefce", SAMPLED, "Liger", "CCE")]
    yield Words(
        "takes {} GiB and {} ms with the model's own loss. With `cutefce.defer(model)` it takes "
        "{} GiB and {} ms, or {} ms with sampled gradients; Liger's loss takes {} ms, CCE {} ms",
        [peak[0], times[0], peak[1], *times[1:]],
    )
    yield results(H200, README_SHAPES["cuda"])
    many = _by_name(newest(H200, "peers", **sizes_of(MANY_TOKENS))[1])
    default, liger = many["cutefce default"], many["Liger"]
    yield Words(
        "With 32768 tokens, cutefce takes {} with {} MiB, its default, and Liger {} with {}",
        [_ratio(default), _mib(default), _ratio(liger), _mib(liger)],
    )
    sampled = []
    for shape in (MAIN_HEAD, MANY_TOKENS):
        rows_of = newest(H200, "sampled", **sizes_of(shape))[1]
        some = [row for row in rows_of if row["implementation"].startswith("sampled")]
        sampled += [f"{x:.2f}" for x in _range(row["ratio_to_gemms"] for row in some)]
        sampled += [f"{x:.0f}" for x in _range(row["peak_mib"] for row in some)]
    yield Words(
        "It takes {} to {} in {} to {} MiB with 8192 tokens, {} to {} in {} to {} MiB with 32768",
        sampled,
    )
    types = "{} of the {} types of causal language models of transformers {} that"
    yield Words(types, _deferred())


def _deferred() -> list[str]:
    """Return how many types of causal LMs are fused, of how many that run, and of which version."""
    header, rows = newest(RESULTS / "cpu", "causal_lms")
    fused = sum(row["outcome"] == "fused" for row in rows)
    has_run = sum(row["outcome"] != "not run" for row in rows)
    version = header["versions"]["transformers"].rpartition(".")[0]
    return [f"{fused}", f"{has_run}", version]


def defer_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/defer.md."""
    yield Words("{} of the {} types of transformers {} that can be built tiny", _deferred())


def memory_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/memory.md."""
    trained = _by_name(newest(H200, "peers", **sizes_of(MAIN_HEAD))[1])
    frozen = _by_name(newest(H200, "peers_frozen_head", **sizes_of(MAIN_HEAD))[1])
    few, many = (
        _by_name(newest(H200, "accumulation", **sizes_of(shape))[1])
        for shape in (MAIN_HEAD, MANY_TOKENS)
    )
    calls = (
        (
            '8192 tokens × 4096 hidden, 131072 classes: `"max"`, 1 GiB, `"min"`',
            [trained[f"cutefce {name}"] for name in README_WORKSPACES],
        ),
        (
            "frozen weight, as LoRA and most adapters have (two products): "
            '`"max"`, 280 MiB, 110 MiB',
            [frozen[f"cutefce {name}"] for name in ("max", "280 MiB", "110 MiB")],
        ),
        (
            '`accumulate_into`, `"max"`: the forward computes gradients, the backward adds dW',
            [few["backward max"]],
        ),
        ("no buffer, the default budget: torch adds dW", [few["dW, then added"]]),
        (
            "32768 tokens, `accumulate_into`, `grad_output`: 1.1 GiB, 300 MiB",
            [many[f"forward {name}"] for name in ("1.1 GiB", "300 MiB")],
        ),
        (
            "32768 tokens, `accumulate_into` alone: 1.1 GiB, 300 MiB, which is too little",
            [many[f"backward {name}"] for name in ("1.1 GiB", "300 MiB")],
        ),
    )
    lines = ["| call | time | MiB |", "|---|---|---|"]
    for call, rows in calls:
        lines.append(f"| {call} | {', '.join(map(_ratio, rows))} | {', '.join(map(_mib, rows))} |")
    yield lines


def sampled_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/sampled.md."""
    rows = newest(H200, "sampled")[1]
    exact = [row["ratio_to_gemms"] for row in rows if row["implementation"] == "exact max"]
    yield Words(
        'exact gradients take {} to {} with `workspace="max"`',
        [f"{min(exact):.2f}", f"{max(exact):.2f}"],
    )
    lines = [
        "| tokens × features, classes | samples | MiB | time, random | time, trained-like | "
        "errors, random | errors, trained-like |",
        "|---" * 7 + "|",
    ]
    found = {
        (row["tokens"], row["hidden"], row["vocab"], row["implementation"], row["data"]): row
        for row in rows
    }
    for tokens, hidden, vocab in dict.fromkeys(key[:3] for key in found):
        head = f"{tokens} × {hidden}, {vocab}"
        for samples in (256, 64):
            both = [
                found[tokens, hidden, vocab, f"sampled {samples}", data]
                for data in ("random", "trained")
            ]
            errors = [f"{row['dx_error']:.3f}, {row['dw_error']:.3f}" for row in both]
            cells = f"{samples} | {_mib(both[0])} | {' | '.join([*map(_ratio, both), *errors])}"
            lines.append(f"| {head} | {cells} |" if head else f"| | {cells} |")
            head = ""
    yield lines
    lines = ["| model | its own loss | cutefce, exact | 256 samples |", "|---|---|---|---|"]
    for model, label in ((LLAMA, "Llama"), (QWEN, "Qwen 3")):
        trained = _by_name(newest(H200, "training_step", model=model)[1])
        first = trained["transformers"]
        size = f"{first['parameters'] / 1e9:.1f} B parameters, {first['vocab']} classes"
        times = [_ms(trained[name]) for name in ("transformers", "cutefce", SAMPLED)]
        lines.append(f"| {label} of {size} | {' | '.join(f'{ms} ms' for ms in times)} |")
    yield lines
    lines = [
        "| gradient | seeds | final validation loss, mean | standard deviation over seeds | "
        "mean difference from exact, same seed |",
        "|---" * 5 + "|",
    ]
    curves = newest(H200, "sampled_curves")[1]
    for one in summarize(curves):
        is_exact = one.gradient == "exact"
        name = "exact" if is_exact else f"{one.gradient.split()[1]} samples"
        difference = "" if is_exact else f" {one.mean_difference:+.3f}"
        lines.append(f"| {name} | {one.seeds} | {one.mean:.3f} | {one.std:.3f} |{difference} |")
    yield lines
    steps = f"{len(curves[0]['losses'])}"
    yield Words("`python -m bench sampled-curves` compares trainings of {} steps", [steps])


OPTION_ROWS = {
    "| `logit_scale` | a |": "logit_scale",
    "| `linear_bias` | b, (V,), with gradient |": "linear_bias",
    "| `softcap` | c tanh(x / c) |": "softcap",
    "| `temperature` | T, a number, () or one for each token |": "temperature",
    "| `logit_floor` | of `linear_log_probs`, (...): [classes below it]"
    "(scoring.md#truncated-sampling) are left out |": "logit_floor",
    "| `kept_classes` | of `linear_log_probs`, (..., K): the softmax is over these |": (
        "64 kept_classes"
    ),
    "| argument `top_k` | the k largest log p_iv and their v | no |": "top 8",
    "| `weight` | κ, (V,) |": "weight",
    "| `token_weights` | q, (...) |": "token_weights",
    "| `label_smoothing` | ε |": "label_smoothing",
    "| `z_loss` | λ |": "z_loss",
    "| `return_lse` | also returns lse_i |": "lse",
    '| `"sum_p_squared"` | Σ_v p_iv² | no |': "sum_p_squared",
    '| `"mean_logit"` | Σ_v u_iv / V | no |': "mean_logit",
    '| `"is_top1"` | whether no logit is above u_iy | no |': "is_top1",
    '| `"argmax"` | the class of the largest logit; y if `is_top1` | no |': "argmax",
    '| `"rank"` | how many logits are above u_iy | no |': "rank",
}
"""Rows of docs/options.md up to their costs, and the options that were measured for them."""


COPYING = (
    *("token_weights", "weight", "z_loss", "temperature of each token", "logit_floor"),
    *("lse without a target", "entropy", "sum_p_squared", "mean_logit"),
    *("is_top1", "argmax", "rank", "top 8", "rank and top 8"),
)
"""Options that copy the hidden states with the least memory."""


def options_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/options.md."""
    for begin, option in OPTION_ROWS.items():
        yield Words(f"{begin} {{}}, {{}}", _option_costs(option))
    yield Words(
        "{}, {} without gradient; {}, {} with it and a temperature of each token",
        [*_option_costs("entropy"), *_option_costs("entropy with gradient")],
    )
    forwards = _options("forward")
    plain = [
        row["ratio_to_plain"]
        for name, row in forwards.items()
        if not name.endswith(("soft targets", "top 8", "kept_classes"))
        and name not in ("none", UNFUSED_SCORES)
    ]
    yield Words(
        "Forwards alone take {} to {}. 8 soft targets a token take {} and {}, 64 take {} and {}, "
        "and {} of a forward alone. Of a forward alone, `top_k=8` takes {}, 64 `kept_classes` {}.",
        [
            f"{min(plain):.2f}",
            f"{max(plain):.2f}",
            *_option_costs("8 soft targets"),
            *_option_costs("64 soft targets"),
            *(
                f"{forwards[name]['ratio_to_plain']:.2f}"
                for name in ("64 soft targets", "top 8", "64 kept_classes")
            ),
        ],
    )
    most, least = _options("max"), _options("min")
    yield Words(
        "by up to {} MiB with a bias, {} MiB with 64 soft targets, {} MiB with 64 `kept_classes`. "
        'With "min" ({} MiB), `token_weights`, `weight`, `z_loss`, a temperature for each token, '
        'reduction "none", `logit_floor` and every output of `linear_log_probs` take {} to {} MiB '
        "more",
        [
            *(
                f"{most[name]['more_mib']:.0f}"
                for name in ("linear_bias", "64 soft targets", "64 kept_classes")
            ),
            f"{least['none']['peak_mib']:.0f}",
            *(f"{x:.0f}" for x in _range(least[name]["more_mib"] for name in COPYING)),
        ],
    )


def soft_targets_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/soft_targets.md."""
    costs = [_option_costs(f"{count} soft targets")[0] for count in (8, 64)]
    yield Words("the time of hard targets times {} for 8 classes and {} for 64", costs)


def scoring_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/scoring.md."""
    rows = _options("forward")
    scores = [rows[name]["ratio_to_plain"] - 1 for name in ("rank", "is_top1", "argmax")]
    yield Words(
        "take {} ms; ranks, top-1 and argmax add {} %",
        [f"{rows['none']['median_ms']:.0f}", f"{100 * max(scores):.0f}"],
    )
    yield Words(
        "The peak beyond the inputs is {} MiB there, of which 64 are a copy of the hidden states, "
        "and {} MiB with ranks",
        [_mib(rows["none"]), _mib(rows["rank"])],
    )
    least = _options(SCORES)
    yield Words(
        "ranks and the 8 most likely classes then take {} MiB, scores of logits {} MiB",
        [_mib(least[TOP]), _mib(least[UNFUSED_SCORES])],
    )


def distillation_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/distillation.md."""
    by_kind = {
        kind: _by_name(newest(H200, "divergence", divergence=kind)[1])
        for kind in ("forward_kl", "jsd")
    }
    forward_kl, jsd = by_kind.values()
    lines = ["| | forward KL | JSD | MiB |", "|---|---|---|---|"]
    labels = {'`"max"`': "max", "`None`": "default", "600 MiB": "600 MiB", '`"min"`': "min"}
    for label, name in labels.items():
        both = [rows[f"cutefce {name}"] for rows in (forward_kl, jsd)]
        times = " | ".join(f"{row['products']:.1f}" for row in both)
        lines.append(f"| {label} | {times} | {_mib(both[0])} |")
    both = [rows["logits"] for rows in (forward_kl, jsd)]
    times = " | ".join(f"{row['products']:.1f}" for row in both)
    memory = f"{_mib(both[0])} for the KL, {_mib(both[1])} for the JSD"
    lines.append(f"| all logits, float32 | {times} | {memory} |")
    liger = jsd["Liger JSD"]
    lines.append(f"| Liger | | {liger['products']:.1f} | {_mib(liger)} |")
    yield lines


def gpu_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/gpu.md."""
    for words, shape in (
        ("{} ms with everything kept and", Shape(4096, 2048, 151936, "bfloat16")),
        ("{} ms, and", MAIN_HEAD),
    ):
        folder = RESULTS / f"{H200.name}_without_kernels"
        rows = _by_name(newest(folder, "peers", **sizes_of(shape))[1])
        ours = [rows[f"cutefce {name}"] for name in ("max", "min")]
        yield Words(
            f"{words} {{}} ms in {{}} MiB; torch.compile {{}} ms in {{}} MiB, CCE {{}} ms, "
            "Liger {} ms",
            [
                *(f"{row['median_ms']:.1f}" for row in ours),
                _mib(ours[1]),
                f"{rows['torch.compile']['median_ms']:.1f}",
                _mib(rows["torch.compile"]),
                _ms(rows["CCE"]),
                _ms(rows["Liger"]),
            ],
        )


def method_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/internals/method.md."""
    sizes = sizes_of(MAIN_HEAD)
    data = [_by_name(newest(H200, "peers", **sizes)[1])]
    data += [
        _by_name(newest(H200, "peers_ignored_rows", **sizes, ignored_percent=percent)[1])
        for percent in (50, 80, 95)
    ]
    lines = ["| ignored | 0 % | 50 % | 80 % | 95 % |", "|---" * 5 + "|"]
    for name, label in (("max", '`"max"`'), ("1 GiB", "1 GiB"), ("min", '`"min"`')):
        rows = [some[f"cutefce {name}"] for some in data]
        ratios = [row["ratio_to_gemms"] for row in rows]
        cells = [f"{ratio:.{2 if ratio >= 0.1 else 3}f}" for ratio in ratios]
        lines.append(f"| {label}, {_mib(rows[0])} MiB | {' | '.join(cells)} |")
    yield lines


def planning_page() -> Iterator[Table | Words]:
    """Yield the parts of docs/internals/planning.md."""
    rows = _by_name(newest(H200, "peers_frozen_head", **sizes_of(MAIN_HEAD))[1])
    yield Words(
        "take {} of three products of all rows if all columns are stored, {} in 280 MiB",
        [_ratio(rows["cutefce max"]), _ratio(rows["cutefce 280 MiB"])],
    )
    yield Words("and {} in 110 MiB", [_ratio(rows["cutefce 110 MiB"])])


PAGES: dict[str, Callable[[], Iterator[Table | Words]]] = {
    "README.md": readme,
    "docs/defer.md": defer_page,
    "docs/distillation.md": distillation_page,
    "docs/gpu.md": gpu_page,
    "docs/internals/method.md": method_page,
    "docs/internals/planning.md": planning_page,
    "docs/memory.md": memory_page,
    "docs/options.md": options_page,
    "docs/sampled.md": sampled_page,
    "docs/scoring.md": scoring_page,
    "docs/soft_targets.md": soft_targets_page,
}
"""Pages by their paths in the repository, and their parts."""


def _options(workspace: str) -> dict[str, Row]:
    """Return the rows of `python -m bench options` with a workspace, by option."""
    return {row["option"]: row for row in newest(H200, "options", workspace=workspace)[1]}


def _option_costs(option: str) -> list[str]:
    """Return the times of an option over a plain call's, with the most and the least memory."""
    return [f"{_options(name)[option]['ratio_to_plain']:.2f}" for name in ("max", "min")]


def _range(values: Iterable[float]) -> tuple[float, float]:
    """Return the least and the largest value."""
    found = sorted(values)
    return found[0], found[-1]


def _by_name(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["implementation"]: row for row in rows}


def _ratio(row: Row) -> str:
    return f"{row['ratio_to_gemms']:.2f}"


def _ms(row: Row) -> str:
    return f"{row['median_ms']:.0f}"


def _mib(row: Row) -> str:
    """Return the peak in MiB, with a decimal below 10."""
    return f"{row['peak_mib']:.{0 if row['peak_mib'] >= 10 else 1}f}"
