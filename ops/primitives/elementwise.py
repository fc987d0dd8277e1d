"""The arithmetic between the GEMMs, in plain torch functions that a compiler can fuse.

On a GPU with Triton they run as single kernels.

R rows, D hidden, V vocab, P reference blocks of C columns.  Every function writes to its first
argument; results are rounded once, when they are written.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import SLACK
from cutefce.cute_kernels.process_cache import process_cache, warn_once
from cutefce.ops import torch_compat


def gathered_dot_(out: Tensor, h: Tensor, index: Tensor, w: Tensor) -> None:
    """Write h_i · w_index_i to `out` (R,); h is (R, D), index (R,), w (V, D)."""
    out.copy_(w[index].to(out.dtype).mul_(h).sum(1))


def gathered_dots_(out: Tensor, index: Tensor, order: Tensor, h: Tensor, w: Tensor) -> None:
    """Write h_order_i · w_index_ik to `out` (R, K); index is (R, K), order (R,), w (V, D)."""
    products = w[index].to(out.dtype).mul_(h[order].to(out.dtype)[:, None])
    out.copy_(products.sum(2))


def add_soft_rows_(
    sums: Tensor, index: Tensor, coefficient: Tensor, scale: Tensor, w: Tensor
) -> None:
    """Make `sums` (R, D) scale_i sums_i + Σ_k coefficient_ik w_index_ik; index is (R, K).

    A row whose scale is 0 counts as 0, whatever it holds.
    """
    added = w[index].to(sums.dtype).mul_(coefficient[:, :, None]).sum(1)
    scaled = sums * scale[:, None]
    sums.copy_(added + torch.where(scale[:, None] == 0, 0, scaled))


def scale_rows_to_(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """Write scale_i x_i to `out` (R, D); `scale` is (R,)."""
    out.copy_(x * scale[:, None])


def scale_rows_in_place_(x: Tensor, scale: Tensor) -> None:
    """Multiply each row of `x` (R, C) by its `scale` (R,)."""
    x.mul_(scale[:, None])


def scale_by_log_(exps: Tensor, a: Tensor, b: Tensor) -> None:
    """Multiply e (R, C) by a_i + b_i log e_iv, with a and b (R,); 0 stays 0."""
    wide = exps.to(a.dtype)
    scaled = wide * (a[:, None] + b[:, None] * wide.log())
    exps.copy_(torch.where(wide == 0, 0, scaled))


def finish_dx_(
    out: Tensor,
    sums: Tensor,
    index: Tensor,
    scale: Tensor,
    target: Tensor,
    factor: Tensor | None,
    w: Tensor,
    row: Tensor | None,
) -> None:
    """Write scale_i sums_i + target_i w_index_i to `out` (R, D); `out` may be `sums`.

    With `factor` (R,) and `row` (1, D), factor_i row is added.  A row whose scale, target and
    factor are all 0 is 0, whatever sums and w hold: an ignored row.
    """
    result = w[index].to(sums.dtype).mul_(target[:, None]).addcmul_(sums, scale[:, None])
    is_zero = (scale == 0) & (target == 0)
    if factor is not None and row is not None:
        result.addcmul_(factor[:, None], row)
        is_zero &= factor == 0
    out.copy_(result.masked_fill_(is_zero[:, None], 0))


def finish_dw_(
    out: Tensor,
    sums: Tensor,
    slot: Tensor,
    factor: Tensor | None,
    totals: Tensor,
    grad_scale: Tensor,
    row: Tensor | None,
) -> None:
    """Write (sums_v + totals_slot_v) * grad_scale to `out` (R, D); `out` may be `sums`.

    With `factor` (R,) and `row` (1, D), factor_v row is added before the product.
    """
    result = totals[slot].add_(sums)
    if factor is not None and row is not None:
        result.addcmul_(factor[:, None], row)
    out.copy_(result.mul_(grad_scale))


def exponentials_(
    logits: Tensor,
    start: Tensor,
    reference: Tensor,
    target: Tensor,
    sums: Tensor | None,
    references: Tensor | None,
    exps: Tensor | None,
    cap: Tensor | None = None,
    more: Tensor | None = None,
) -> None:
    """Replace `logits` (R, P, C) by their exponentials, 0 at the `target` (R,).

    The tile begins at vocabulary entry `start` ().  Exponentials are relative to `reference` (R,);
    with `references` (R, P), a block whose largest logit is more than `SLACK` above it takes that
    logit instead, and `references` receives the choice.  `sums` (R, P) receives the row sums,
    `exps` (R, P, C) a copy of the result.  With `cap` (R,), κ of `LogitMap`, the results are
    exponentials times 1 - (logit / κ)²; their sums are not.  `more` (4, R, P) receives Σ e (logit -
    reference), Σ e², the largest logit and its vocabulary entry, the lowest of equal ones.  More
    than eight parameters: fused kernels take tensors.
    """
    _, blocks, width = logits.shape
    columns = start + torch.arange(blocks * width, device=logits.device).view(blocks, width)
    # the target's logit, rounded as by a GEMM, must not become the reference of the others
    logits.masked_fill_(target[:, None, None] == columns, -torch.inf)
    reference = reference[:, None]
    if references is not None:
        largest = logits.amax(2)
        reference = torch.where(largest - reference > SLACK, largest, reference)
        references.copy_(reference)
    reference = torch.where(reference == -torch.inf, 0, reference)  # -inf - -inf is NaN
    derivative = None
    if cap is not None:
        cap = cap[:, None, None]
        # a masked logit is -inf
        derivative = logits.clamp(min=-cap.abs()).div_(cap).square_().neg_().add_(1)
    if more is not None:
        more[2], indices = logits.max(2)
        more[3] = columns.gather(1, indices.t()).t().to(logits.dtype)
    logits.sub_(reference[:, :, None])
    distances = None if more is None else logits.clamp(min=-1e30)  # e of -inf is 0
    logits.exp_()
    if more is not None and distances is not None:
        more[0] = distances.mul_(logits).sum(2)
        more[1] = torch.mul(logits, logits, out=distances).sum(2)
    if sums is not None:
        sums.copy_(logits.sum(2))
    if derivative is not None:
        logits.mul_(derivative)
    if exps is not None:
        exps.copy_(logits)


def exponentials(logits: Tensor, *rest: Tensor | None) -> None:
    """Do what `exponentials_` does without changing `logits`: fused kernels do not write them."""
    exponentials_(logits.clone(), *rest)  # type: ignore[arg-type]


def keep_dw_(
    words: Tensor,
    low: Tensor,
    sums: Tensor,
    slot: Tensor,
    factor: Tensor | None,
    totals: Tensor,
    row: Tensor | None,
) -> None:
    """Keep sums_v + totals_slot_v (R, D) in `words` and `low`; see `split_`.

    With `factor` (R,) and `row` (1, D), factor_v row is added.
    """
    _keep(words, low, _parts(sums, words), slot, factor, totals, row)


def add_to_kept_dw_(words: Tensor, low: Tensor, sums: Tensor, *rest: Tensor | None) -> None:
    """Do what `keep_dw_` does, and add what `words` and `low` keep."""
    parts = [_joined(words, low, i).add_(x) for i, x in enumerate(_parts(sums, words))]
    _keep(words, low, parts, *rest)  # type: ignore[arg-type]


def _keep(
    words: Tensor,
    low: Tensor,
    parts: list[Tensor],
    slot: Tensor,
    factor: Tensor | None,
    totals: Tensor,
    row: Tensor | None,
) -> None:
    """Do what `keep_dw_` does of the `parts` of sums."""
    added: list[Tensor] = []
    while parts:  # each is freed when it is added
        i, count = len(added), words.element_size() // 2
        total = totals[:, i::count][slot].add_(parts.pop(0))
        if factor is not None and row is not None:
            total.addcmul_(factor[:, None], row[:, i::count])
        added.append(total)
    _write(words, low, added)


def joined_sums(kept: Tensor, low: Tensor) -> Tensor:
    """Return the float32 sums (N, D) of `kept` and `low`."""
    words = words_of(kept, low)
    parts = [_joined(words, low, i) for i in range(words.element_size() // 2)]
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1)


def words_of(kept: Tensor, low: Tensor) -> Tensor:
    """Return 16-bit `kept` (N, D) as words, one for each byte of `low`, (N, D) or (N, D / 2).

    Without bytes, `low` being a seed, each number is a word.
    """
    is_shared = low.ndim == 2 and low.shape[1] < kept.shape[1]
    return kept.view(torch.int32 if is_shared else torch.int16)


def split_(words: Tensor, low: Tensor, sums: Tensor) -> None:
    """Write float32 `sums` (N, D), rounded to nearest, ties to even, to 24 or 20 bits.

    Of 24 bits, `words` (N, D) int16 are the upper halves, and `low` (N, D) uint8 the next bytes.
    Of 20 bits, `words` and `low` (N, D / 2) hold those of an even and the next column: `words`
    int32 the upper halves, `low` uint8 the next four bits, those of the even column below.
    """
    _write(words, low, _parts(sums, words))


def add_to_kept_(words: Tensor, low: Tensor, sums: Tensor) -> None:
    """Add float32 `sums` (N, D) to what `words` and `low` keep; see `split_`."""
    parts = [_joined(words, low, i).add_(x) for i, x in enumerate(_parts(sums, words))]
    _write(words, low, parts)


def scale_kept_rows_(words: Tensor, low: Tensor, scale: Tensor) -> None:
    """Multiply the kept sums (R, D) by `scale` (R,); see `split_`."""
    count = words.element_size() // 2
    _write(words, low, [_joined(words, low, i).mul_(scale[:, None]) for i in range(count)])


def _parts(sums: Tensor, words: Tensor) -> list[Tensor]:
    """Return the columns of `sums` (N, D) by their place in a word: all, or even and odd ones."""
    count = words.element_size() // 2
    return [sums[:, i::count] for i in range(count)]


def _write(words: Tensor, low: Tensor, parts: list[Tensor]) -> None:
    """Do what `split_` does of the `parts` of sums."""
    bits, upper, lower = 8 // len(parts), [], []
    for i, part in enumerate(parts):
        rounded = _rounded(part, bits)
        halves = rounded >> 16
        if i + 1 < len(parts):
            halves.bitwise_and_(0xFFFF)
        upper.append(halves.bitwise_left_shift_(16 * i))
        lower.append(rounded.bitwise_right_shift_(16 - bits).bitwise_and_((1 << bits) - 1))
        lower[i].bitwise_left_shift_(bits * i)
    words.copy_(upper[0] if len(parts) == 1 else upper[0].bitwise_or_(upper[1]))
    low.copy_(lower[0] if len(parts) == 1 else lower[0].bitwise_or_(lower[1]))


def _rounded(sums: Tensor, low_bits: int) -> Tensor:
    """Return the bits of float32 `sums` so that the first 16 + `low_bits` are rounded."""
    bits, drop = sums.view(torch.int32), 16 - low_bits
    rounded = (bits >> drop).bitwise_and_(1).add_(bits).add_((1 << drop - 1) - 1)
    return rounded.masked_fill_(sums.isnan(), 0x7FC00000)  # a carry would make it another number


def _joined(words: Tensor, low: Tensor, place: int) -> Tensor:
    """Return the float32 sums at `place` of each word."""
    low_bits = 16 // words.element_size()
    upper = words.to(torch.int32, copy=True)
    upper.bitwise_right_shift_(16 * place).bitwise_left_shift_(16)
    lower = low.to(torch.int32).bitwise_right_shift_(low_bits * place)
    lower.bitwise_and_((1 << low_bits) - 1).bitwise_left_shift_(16 - low_bits)
    return upper.bitwise_or_(lower).view(torch.float32)


def scale_kept_(words: Tensor, low: Tensor, scale: Tensor) -> None:
    """Write scale_v times the kept sums (R, D), rounded to bfloat16, to `words`."""
    count, scaled = words.element_size() // 2, []
    for i in range(count):
        part = _joined(words, low, i).mul_(scale[:, None]).to(torch.bfloat16)
        scaled.append(part.view(torch.int16).to(words.dtype))
        if i + 1 < count:
            scaled[i].bitwise_and_(0xFFFF)
        scaled[i].bitwise_left_shift_(16 * i)
    words.copy_(scaled[0] if count == 1 else scaled[0].bitwise_or_(scaled[1]))


def can_fuse(x: Tensor) -> bool:
    """Whether functions of the rows of x run fused: on a GPU with Triton, for two rows or more."""
    return x.is_cuda and x.shape[0] > 1 and _has_triton()


@process_cache
def fused(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function`, which writes to its arguments, as one kernel for any number of rows."""
    return torch_compat.compile_pointwise(function)


@process_cache
def _has_triton() -> bool:
    if not torch_compat.has_triton():
        warn_once("no Triton; the portable path runs unfused on the GPU")
        return False
    return True
