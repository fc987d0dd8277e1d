"""Faults: each undoes a past fix, or puts its equivalent into the code of today.

A fault is a few replaced lines.  The text before occurs exactly once in its file, so that an edit
that no longer fits is an error; `test_catalogue.py` says so.  Its tests are those that should
notice, the most likely ones first.

Past fixes that are none of these: predictions that were wrong by less than what is promised of
them, and races between launches, which a GPU alone can show, and not each time.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

KINDS = (
    *("kernels", "numerics", "options", "ranks"),
    *("planner", "deferral", "cache", "errors"),
)


class Edit(NamedTuple):
    """One replaced place."""

    path: str
    """Of a file, relative to the repository and not through the links of `cutefce/`."""
    before: str
    """Text that occurs exactly once in that file."""
    after: str
    """The faulty text."""

    def applied(self, source: str) -> str:
        """Return the faulty text of the file's `source`.

        Raises:
            ValueError: if the text before does not occur exactly once.
        """
        count = source.count(self.before)
        if count != 1:
            raise ValueError(f"{self.path}: found {count} times, expected once:\n{self.before}")
        return source.replace(self.before, self.after)


@dataclass(frozen=True)
class Fault:
    """A past bug as edits of today's sources."""

    name: str
    """A short unique name."""
    kind: str
    """One of `KINDS`."""
    what: str
    """What goes wrong, in a sentence."""
    fixed_in: str
    """The short hash of the commit that mended it."""
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    """Files or tests, as pytest names them."""

    @property
    def sha(self) -> str:
        """A short hash of the edits."""
        return hashlib.sha256(repr([*map(tuple, self.edits)]).encode()).hexdigest()[:12]


KERNELS = (
    Fault(
        "negative-key-of-a-soft-class",
        "kernels",
        "The kernel of soft targets reads a class's coefficient at a negative place of shared"
        " memory, as the lower half of a key of more than 2^23 classes may be negative.",
        "6aedde7",
        (
            Edit(
                "cute_kernels/soft_targets/prepare_soft.py",
                "value = b[Int32(keys[k] & (MOST - 1))]",
                "value = b[Int32(keys[k]) % MOST]",
            ),
        ),
        ("tests/hopper/test_emulation.py::test_rows_of_soft_targets",),
    ),
    Fault(
        "rows-behind-a-short-row-block",
        "kernels",
        "The GEMM of dW's sums reads rows that no kernel has written, where row blocks of swapped"
        " operands end inside a K tile.",
        "ca541b2",
        (
            Edit(
                "ops/primitives/dispatch.py",
                "clears = grad_bias or gemms is None or kernels.row_sums.config.rows % TILE_K > 0",
                "clears = grad_bias or gemms is None",
            ),
        ),
        ("tests/hopper/test_emulation.py::test_row_blocks_that_end_inside_a_k_tile",),
    ),
    Fault(
        "excluded-target-beside-terms-in-a-kernel",
        "kernels",
        "The kernel that reduces losses makes NaN of a z-loss where the target's logit is -inf.",
        "a8b9bf4",
        (
            Edit(
                "cute_kernels/rowwise/loss_terms.py",
                "        if nll == Float32.inf:\n"
                "            loss = terms.lse * nll  # the other terms may be infinite or NaN\n",
                "",
            ),
        ),
        (
            "tests/hopper/test_emulation.py::test_reduced_losses_with_terms",
            "tests/hopper/test_emulation.py::test_smoothed_losses",
        ),
    ),
    Fault(
        "diverged-target-in-a-kernel",
        "kernels",
        "The kernel of target logits lets a logit of +inf pass for the mark of an ignored token.",
        "7d734c0",
        (
            Edit(
                "cute_kernels/rowwise/target_logit.py",
                "if not in_vocab or z == Float32.inf:",
                "if not in_vocab:",
            ),
        ),
        ("tests/hopper/test_emulation.py::test_target_logits",),
    ),
    Fault(
        "sums-of-ignored-rows-in-a-kernel",
        "kernels",
        "The kernel that reduces partial sums reads those of ignored tokens, which may be NaN.",
        "7d734c0",
        (
            Edit(
                "cute_kernels/rowwise/reduce_partials.py",
                "            if target[row] == ignored:\n"
                "                count = Int32(0)  # sums of an ignored row may be NaN\n",
                "",
            ),
        ),
        (
            "tests/hopper/test_emulation.py::test_reduced_partials",
            "tests/ops/test_sums.py::test_ignored_rows",
        ),
    ),
    Fault(
        "ties-of-kept-sums-in-a-kernel",
        "kernels",
        "The kernels round kept sums half-way between two numbers up, and not to the even one.",
        "f9eb8b7",
        (
            Edit(
                "cute_kernels/common/kept_bits.py",
                "number + ((1 << drop - 1) - 1) + ((number >> drop) & 1)",
                "number + (1 << drop - 1)",
            ),
        ),
        (
            "tests/hopper/test_emulation.py::test_kept_sums",
            "tests/hopper/test_kept_hidden_sums.py::test_any_sums_are_rounded",
        ),
    ),
    Fault(
        "dw-of-no-token",
        "kernels",
        "The GEMM of dW leaves out all MMAs where no token counts, and stores what its registers"
        " held.",
        "04145a2",
        (
            Edit(
                "cute_kernels/schedule/scheduler.py",
                "last_k = cutlass.max(tokens - (k_tiles - 1) * tile_k, 1)",
                "last_k = tokens - (k_tiles - 1) * tile_k",
            ),
        ),
        ("tests/hopper/test_emulation.py::test_counted_rows_of_final_gradients",),
    ),
    Fault(
        "partials-by-warpgroup",
        "kernels",
        "Ping-pong warpgroups write sums of all columns to places that depend on which of them"
        " had the first tile, so that equal rows of two row blocks differ in their last bits.",
        "73bd696",
        (
            Edit(
                "cute_kernels/sm90/project_exp.py",
                "partial += first_parity  # in the same place for all row blocks",
                "partial += consumer.warp_group_idx",
            ),
        ),
        ("tests/emulation/test_project_exp.py::test_rows_have_the_same_bits_anywhere",),
    ),
    Fault(
        "warpgroup-without-a-tile",
        "kernels",
        "A warpgroup that has no tile of a work tile reads the target's logits before the kernel"
        " before has written them.",
        "307d5b7",
        (
            Edit(
                "cute_kernels/sm90/project_exp.py",
                "                cute.arch.griddepcontrol_wait()"
                "  # a warpgroup may have no tile of a work tile\n",
                "",
            ),
        ),
        (
            "tests/cute_kernels/test_pdl.py::test_each_role_waits",
            "tests/cute_kernels/test_pdl.py::test_no_access_before_the_wait",
        ),
    ),
    Fault(
        "flags-before-the-kernel-that-writes-them",
        "kernels",
        "The kernel that repairs exponentials reads flags before the kernel before has written"
        " them.",
        "307d5b7",
        (
            Edit(
                "cute_kernels/sm90/project_exp.py",
                "            cute.arch.griddepcontrol_wait()"
                "  # the previous kernel writes the flags\n",
                "            pass\n",
            ),
        ),
        (
            "tests/cute_kernels/test_pdl.py::test_each_role_waits",
            "tests/cute_kernels/test_pdl.py::test_no_access_before_the_wait",
        ),
    ),
    Fault(
        "lanes-that-part-before-tensor-memory",
        "kernels",
        "Lanes of a Blackwell warp read tensor memory apart, where they waited and masked apart.",
        "867ed29",
        (
            Edit(
                "cute_kernels/sm100/project_exp.py",
                "                    # lanes diverge where they wait and mask;"
                " reads need the whole warp\n"
                "                    cute.arch.sync_warp()\n",
                "",
            ),
        ),
        (
            "tests/blackwell/test_machine_code.py::test_code_keeps_the_rules",
            "tests/emulation/test_project_exp.py::test_every_order_of_events",
        ),
    ),
    Fault(
        "buffers-of-stores-that-do-not-happen",
        "kernels",
        "A Blackwell warp takes the next buffer where it stores nothing, and so overwrites one"
        " that TMA still reads.",
        "d5820ed",
        (
            Edit(
                "cute_kernels/sm100/project_exp.py",
                "            next_buffer = (buffer + 1) % self.arch.EPI_STAGES\n"
                "        return next_buffer",
                "        return (buffer + 1) % self.arch.EPI_STAGES",
            ),
        ),
        (
            "tests/emulation/test_project_exp.py::test_every_order_of_events",
            "tests/emulation/test_project_exp.py::test_sums_and_exponentials",
        ),
    ),
    Fault(
        "class-of-dx-that-is-not-clamped",
        "kernels",
        "The last step of dX reads the weight's row of a target that is no class.",
        "dcf7e5f",
        (
            Edit(
                "cute_kernels/rowwise/scale_add_rows.py",
                "gathered = row_vectors(table, clamped(index[row], table))",
                "gathered = row_vectors(table, index[row])",
            ),
        ),
        ("tests/hopper/test_emulation.py::test_scaled_rows",),
    ),
    Fault(
        "unaligned-tile",
        "kernels",
        "A divergence gives its kernel a second tile of logits that begins at no multiple of 16"
        " bytes of its arena.",
        "9f1a6ce",
        (
            Edit(
                "ops/program/place.py",
                "offset = max(offset, round_up(end, ALIGNMENT))",
                "offset = max(offset, end)",
            ),
        ),
        ("tests/ops/test_divergence_plans.py::test_programs_are_sound",),
    ),
    Fault(
        "one-sided-mixture-in-a-kernel",
        "kernels",
        "The kernel of divergences takes the logarithm of a number near 1 where a JSD's mixture is"
        " nearly one side.",
        "174814c",
        (
            Edit(
                "cute_kernels/divergence/terms.py",
                "    if not size(over) < CLOSE:",
                "    if not size(distance) < CLOSE:",
            ),
            Edit(
                "cute_kernels/divergence/terms.py",
                "    if not size(over_larger) < CLOSE:",
                "    if not gap < CLOSE:",
            ),
            Edit(
                "cute_kernels/divergence/terms.py",
                "    if not size(over_smaller) < CLOSE:",
                "    if not gap < CLOSE:",
            ),
        ),
        ("tests/hopper/test_divergence_rows.py::test_a_mixture_of_nearly_one_side",),
    ),
    Fault(
        "target-behind-a-window",
        "kernels",
        "A class behind a window, in the columns of its last tile, is left out of its sums.",
        "b6e547f",
        (
            Edit(
                "ops/primitives/cute_projection.py",
                "            index = torch.where(index < last, index, -1)\n",
                "            index = index.contiguous()\n",
            ),
        ),
        ("tests/ops/test_sums.py::test_outputs_of_chunks_are_those_of_windows",),
    ),
    Fault(
        "transposed-soft-targets",
        "kernels",
        "A call gives kernels soft targets whose rows are not contiguous.",
        "6899a39",
        (
            Edit(
                "ops/interface/options.py",
                "            given = {name: x.contiguous() for name, x in given.items()}\n",
                "",
            ),
        ),
        ("tests/ops/test_soft_targets.py::test_classes_of_any_layout",),
    ),
    Fault(
        "first-chunk-without-rows",
        "kernels",
        "dW's kernel multiplies exponentials that nothing has written, in a first chunk of which"
        " no token counts.",
        "65683b9",
        (
            Edit(
                "ops/program/exponentials.py",
                "    clear_first_rows(call.view(s.writes[0]))\n",
                "",
            ),
        ),
        (
            "tests/ops/test_row_selection.py::test_chunks_without_rows_compute_nothing",
            "tests/ops/test_row_selection.py::test_targets_are_added_once_wherever_the_last_token_counts",
        ),
    ),
    Fault(
        "expanded-upstream-gradient",
        "kernels",
        "The kernel of row coefficients gets an upstream gradient that is one number expanded.",
        "4d59619",
        (
            Edit(
                "ops/primitives/cute_rowwise.py",
                "upstream = upstream.to(rows.dtype).reshape(-1).contiguous()",
                "upstream = upstream.to(rows.dtype).reshape(-1)",
            ),
        ),
        ("tests/hopper/test_emulation.py::test_an_expanded_gradient",),
    ),
    Fault(
        "layout-that-hooks-restore",
        "kernels",
        "A backward of what kernels stored is not theirs where hooks of saved tensors restored the"
        " weight with another layout.",
        "f2fc571",
        (
            Edit(
                "ops/operators/operands.py",
                "w = with_aligned_rows(w)  # hooks",
                "pass  # hooks",
            ),
        ),
        ("tests/ops/test_torch_contexts.py::test_saved_tensors_may_come_back_with_another_layout",),
    ),
)

NUMERICS = (
    Fault(
        "entries-of-small-gradients",
        "numerics",
        "The entries of a token's classes overflow where its derivative by the log-sum-exp is"
        " small, so that all of dW is NaN.",
        "3d94caa",
        (
            Edit(
                "ops/rows/classes/soft_targets.py",
                "    quotients = (terms / a[:, None]).masked_fill_((a == 0)[:, None], 0)\n"
                "    return quotients.mul_(stats.sum_exp[:, None])",
                "    factor = torch.where(a == 0, 0, stats.sum_exp / a)\n"
                "    return terms * factor[:, None]",
            ),
        ),
        ("tests/ops/test_non_finite.py::test_tokens_of_small_gradients_leave_the_others",),
    ),
    Fault(
        "excluded-target-beside-terms",
        "numerics",
        "A loss with label smoothing or a z-loss is NaN where the target's logit is -inf, and not"
        " infinite.",
        "590982f",
        (
            Edit(
                "ops/rows/statistics.py",
                "    losses = torch.where(stats.loss == torch.inf, infinite, losses)\n",
                "",
            ),
        ),
        (
            "tests/ops/test_option_guarantees.py::test_non_finite_inputs_end_as_those_of_torch",
            "tests/ops/test_soft_targets.py::test_a_class_that_cannot_be",
        ),
    ),
    Fault(
        "one-sided-mixture",
        "numerics",
        "A JSD loses its digits where the mixture is nearly one side and the sides differ.",
        "1d9b600",
        (
            Edit(
                "ops/divergence/elementwise.py",
                "is_close = excess.abs() < 0.5",
                "is_close = distance.abs() < 0.5",
            ),
        ),
        (
            "tests/ops/test_divergence.py"
            "::test_a_mixture_of_nearly_one_side_keeps_relative_precision",
        ),
    ),
    Fault(
        "block-of-excluded-classes",
        "numerics",
        "A block of logits that are all -inf makes NaN of an infinite loss.",
        "f25aadb",
        (
            Edit(
                "ops/primitives/elementwise.py",
                "    reference = torch.where(reference == -torch.inf, 0, reference)"
                "  # -inf - -inf is NaN\n",
                "",
            ),
        ),
        ("tests/ops/test_non_finite.py::test_whole_reference_blocks_of_no_probability",),
    ),
    Fault(
        "target-as-reference",
        "numerics",
        "The target's logit, as the GEMM rounds it, becomes the reference of the others, so that"
        " a confident token with large logits has the loss -inf.",
        "f07069e",
        (
            Edit(
                "ops/primitives/elementwise.py",
                "    # the target's logit, rounded as by a GEMM,"
                " must not become the reference of the others\n"
                "    logits.masked_fill_(target[:, None, None] == columns, -torch.inf)\n",
                "",
            ),
            Edit(
                "ops/primitives/elementwise.py",
                "        references.copy_(reference)\n",
                "        references.copy_(reference)\n"
                "    logits.masked_fill_(target[:, None, None] == columns, -torch.inf)\n",
            ),
        ),
        ("tests/ops/test_non_finite.py::test_confident_rows_with_large_logits",),
    ),
    Fault(
        "upstream-of-ignored-tokens",
        "numerics",
        "Ignored tokens have a gradient of NaN where the upstream gradient is.",
        "f8f65be",
        (
            Edit(
                "ops/rows/scaling.py",
                "dx = replace(relative.times(scale), scale=scale)",
                "dx = replace(relative.times(grad_scale), scale=scale)",
            ),
        ),
        (
            "tests/ops/test_non_finite.py"
            "::test_ignored_rows_have_no_gradient_whatever_the_upstream_one_is",
        ),
    ),
    Fault(
        "float16-of-no-tokens",
        "numerics",
        "A backward in float16 of no tokens takes the largest of no factors, and raises.",
        "363d901",
        (
            Edit(
                "ops/rows/scaling.py",
                "    if narrow and len(dx.scale):\n        grad_scale = dx.scale.abs().amax()\n",
                "    if narrow:\n        grad_scale = dx.scale.abs().amax()\n",
            ),
        ),
        ("tests/ops/test_loss.py::test_no_tokens_have_gradients_of_zero",),
    ),
    Fault(
        "bad-ignored-tokens-on-a-cpu",
        "numerics",
        "NaN in the hidden states of ignored tokens reaches the gradient of the weight where a"
        " plan computes all tokens.",
        "4d59619",
        (
            Edit(
                "ops/operators/operands.py",
                "    return plan_for(*given, int(counts.sum()), leaves_out=True)",
                "    return plan",
            ),
        ),
        ("tests/ops/test_row_selection.py::test_what_ignored_rows_hold_does_not_matter",),
    ),
    Fault(
        "lse-around-the-target",
        "numerics",
        "Equal tokens with other targets have log-sum-exps that differ in the last bits.",
        "73bd696",
        (
            Edit(
                "ops/rows/statistics.py",
                'return self.output("lse", options) if stored else self.lse',
                "return self.lse",
            ),
        ),
        ("tests/ops/test_equal_rows.py::test_rows_of_other_targets",),
    ),
    Fault(
        "ties-of-kept-sums",
        "numerics",
        "Kept sums half-way between two numbers are rounded up, and not to the even one.",
        "f9eb8b7",
        (
            Edit(
                "ops/rows/kept_sums.py",
                "rounded = (bits >> drop).bitwise_and_(1).add_(bits).add_((1 << drop - 1) - 1)",
                "rounded = bits + (1 << drop - 1)",
            ),
        ),
        (
            "tests/ops/test_kept_sums.py::test_sums_are_rounded_to_nearest_and_ties_to_even",
            "tests/ops/test_kept_sums.py::test_what_is_kept_of_any_sum",
        ),
    ),
    Fault(
        "saved-tensors-unpacked-twice",
        "numerics",
        "The backward of log-probabilities unpacks what it saved twice, which an activation"
        " checkpoint refuses.",
        "3d439dd",
        (
            Edit(
                "ops/operators/autograd.py",
                "return *_backward(ctx, torch.cat(rows), operands, tensors), None, None",
                "return *_backward(ctx, torch.cat(rows), *_saved(ctx)), None, None",
            ),
        ),
        (
            "tests/ops/test_option_guarantees.py::test_hooks_unpack_what_is_saved_once",
            "tests/ops/test_option_guarantees.py::test_outputs_are_checkpointed",
        ),
    ),
    Fault(
        "loss-that-is-a-view",
        "numerics",
        "Losses per token are a view of the statistics, which a backward reads, so that changing"
        " them in place changes the gradient or raises.",
        "0bcf44c",
        (
            Edit(
                "ops/operators/operators.py",
                "return loss.clone() if selection is None else selection.restore(loss)",
                "return loss if selection is None else selection.restore(loss)",
            ),
        ),
        (
            "tests/ops/test_loss.py::test_the_loss_can_be_changed_in_place",
            "tests/ops/test_loss.py::test_opcheck",
        ),
    ),
    Fault(
        "sums-that-a-backward-has-multiplied",
        "numerics",
        "A second backward adds to a buffer sums that the first one has multiplied in their place.",
        "dd62e74",
        (
            Edit(
                "ops/program/lower.py",
                "out = (into,) if p.keeps_sums else (into, *out)",
                "out = (into,)",
            ),
        ),
        ("tests/ops/test_accumulate_into.py::test_each_backward_of_a_frozen_input_adds",),
    ),
    Fault(
        "second-backward-of-a-forward-that-added",
        "numerics",
        "A second backward adds nothing to the buffer that the forward has added to.",
        "dd62e74",
        (
            Edit(
                "ops/program/steps.py",
                "self.buffers[n].home is Home.INTO for step in self.forward",
                "self.buffers[n].home is None for step in self.forward",
            ),
        ),
        ("tests/ops/test_grad_output.py::test_the_forward_adds",),
    ),
    Fault(
        "replay-over-an-earlier-gradient",
        "numerics",
        "A backward outside of its forward's CUDA graph overwrites what a replay finds.",
        "2bde3d2",
        (
            Edit(
                "ops/program/run.py",
                "if self.plan.program.is_spent and self.capture != capture_id():",
                "if self.plan.program.is_spent and self.capture is self.memory:",
            ),
        ),
        (
            "tests/ops/test_kept.py"
            "::test_a_backward_outside_of_the_forwards_capture_overwrites_nothing_of_it",
        ),
    ),
)

OPTIONS = (
    Fault(
        "mean-over-weights-that-cancel",
        "options",
        "A mean over weights that add up to 0 is 0 without a word, where torch has no number.",
        "86b3d47",
        (
            Edit(
                "ops/rows/targets.py",
                "return torch.where(self.active.any(), total.to(dtype).reciprocal(), 0)",
                "return torch.where(total == 0, 0, total.to(dtype).reciprocal())",
            ),
        ),
        ("tests/ops/test_options.py::test_a_mean_over_weights_that_add_up_to_0_is_not_0",),
    ),
    Fault(
        "sampled-entries-of-capped-logits",
        "options",
        "The kernel that sorts sampled entries leaves out the derivative of the softcap.",
        "e2fa85d",
        (
            Edit(
                "cute_kernels/sampling/sort_samples.py",
                "                        if cutlass.const_expr(row_scale is not None):\n"
                "                            value *= softcap_derivative(u, inverse_scale)\n",
                "",
            ),
        ),
        (
            "tests/hopper/test_sampling.py::test_sorted_entries",
            "tests/ops/test_sampled_kernels.py",
        ),
    ),
    Fault(
        "seed-of-a-traced-graph",
        "options",
        "A graph that was traced without gradients has no seed of sampled gradients when it is"
        " trained.",
        "2070a6b",
        (
            Edit(
                "ops/operators/autograd.py",
                "    if options.is_sampled and tensors.seed is None:\n"
                "        tensors = dataclasses.replace("
                "tensors, seed=torch.ops.cutefce.draw_seed(y))\n",
                "",
            ),
        ),
        (
            "tests/ops/test_sampled.py"
            "::test_a_graph_that_is_traced_without_gradients_draws_a_seed_when_it_is_trained",
        ),
    ),
    Fault(
        "gradient-through-a-loss-of-16-bits",
        "options",
        "A known upstream gradient is refused where a loss that is cast to 16 bits rounds it.",
        "efaaedf",
        (
            Edit(
                "ops/operators/agreement.py",
                "UPSTREAM_TOLERANCE = 2.0**-7",
                "UPSTREAM_TOLERANCE = 2.0**-19",
            ),
        ),
        ("tests/ops/test_grad_output.py::test_the_gradient_of_a_loss_in_16_bits_passes",),
    ),
    Fault(
        "known-gradient-that-is-infinite",
        "options",
        "A known upstream gradient of inf passes for the one that the backward gets.",
        "ebbfebf",
        (
            Edit(
                "ops/operators/agreement.py",
                "is_same = given.isfinite() & ((upstream - given).abs()"
                " <= UPSTREAM_TOLERANCE * given.abs())",
                "is_same = (upstream - given).abs() <= UPSTREAM_TOLERANCE * given.abs()",
            ),
        ),
        (
            "tests/ops/test_grad_output.py"
            "::test_a_gradient_that_is_not_finite_is_never_the_right_one",
        ),
    ),
    Fault(
        "soft-classes-of-unsigned-integers",
        "options",
        "Soft targets of unsigned or narrow integers raise an error that names no argument.",
        "06c5e85",
        (
            Edit(
                "ops/interface/options.py",
                '            given["target_indices"] = given["target_indices"].long()\n',
                "",
            ),
        ),
        ("tests/ops/test_soft_targets.py::test_classes_of_any_integer_dtype",),
    ),
    Fault(
        "numbers-in-float64",
        "options",
        "A number among the arguments becomes a float64 tensor on a device that has none.",
        "8023448",
        (
            Edit(
                "ops/interface/scalars.py",
                "return torch.full((), number, dtype=dtype, device=h.device)",
                "return torch.full((), number, dtype=torch.float64, device=h.device)",
            ),
        ),
        ("tests/ops/test_devices_without_float64.py::test_arguments_of_the_loss",),
    ),
    Fault(
        "graph-for-each-denominator",
        "options",
        "A compiled call is compiled again for each value of a denominator that is a number.",
        "fb9c648",
        (
            Edit(
                "ops/interface/scalars.py",
                "        return torch.ones((), dtype=dtype, device=h.device) * value\n",
                "        return torch.full((), value, dtype=dtype, device=h.device)\n",
            ),
        ),
        ("tests/ops/test_compile.py::test_float_denominators_share_graphs",),
    ),
)

RANKS = (
    Fault(
        "rounded-reduction-of-dx",
        "ranks",
        "Each rank rounds its part of dX before the ranks add theirs.",
        "548d4ac",
        (
            Edit(
                "ops/parallel/shard.py",
                "        return sum_dtype(dtype)\n",
                "        return dtype\n",
            ),
        ),
        ("tests/parallel/test_vocab_parallel.py::test_every_layout",),
    ),
    Fault(
        "other-upstream-gradients",
        "ranks",
        "Ranks whose losses get other upstream gradients compute a mixture without an error.",
        "f07069e",
        (
            Edit(
                "ops/operators/agreement.py",
                '        "gradient of the loss": upstream,\n',
                "",
            ),
        ),
        ("tests/parallel/test_consistency.py::test_backwards_that_differ_raise",),
    ),
    Fault(
        "tokens-that-some-ranks-ignore",
        "ranks",
        "A token that one rank ignores and another does not raises on some ranks alone.",
        "f25aadb",
        (
            Edit(
                "ops/parallel/shard.py",
                "ignored = count == ranks * (ranks + 1)",
                "ignored = ~targets.active",
            ),
        ),
        ("tests/parallel/test_non_finite.py::test_ranks_that_ignore_different_tokens_all_raise",),
    ),
    Fault(
        "shard-of-fsdp",
        "ranks",
        "A parameter that FSDP2 has sharded over data ranks is taken for a part of the vocabulary.",
        "07d6b7c",
        (
            Edit(
                "ops/parallel/dtensor.py",
                "    if group is None and not torch_compat.is_dtensor(h):\n",
                "    if group is None and not isinstance(h, Tensor):\n",
            ),
        ),
        (
            "tests/parallel/test_parallel_calls.py"
            "::test_weight_that_fsdp_has_sharded_is_refused_unless_a_group_is_named",
        ),
    ),
    Fault(
        "plan-for-own-copies",
        "ranks",
        "Ranks that copy other operands choose other strategies or chunks.",
        "5272029",
        (
            Edit(
                "ops/operators/plans.py",
                "            self, problem=problem, operands=replace(self.operands, vocab=vocab),"
                " copies=Copies()\n",
                "            self, problem=problem, operands=replace(self.operands, vocab=vocab)\n",
            ),
        ),
        (
            "tests/parallel/test_parallel_calls.py"
            "::test_ranks_that_copy_different_operands_plan_alike",
        ),
    ),
    Fault(
        "error-of-what-a-backward-unpacks",
        "ranks",
        "Ranks wait for one whose weight was modified, as what it raises while it unpacks is not"
        " reported.",
        "89b1c4f",
        (
            Edit(
                "ops/operators/autograd.py",
                "    with report_errors(ctx.group):  # of inputs that were modified\n"
                "        saved = [*ctx.saved_tensors]",
                "    if True:\n        saved = [*ctx.saved_tensors]",
            ),
        ),
        ("tests/parallel/test_consistency.py::test_error_before_the_backward_reaches_every_rank",),
    ),
    Fault(
        "round-that-is-given-up",
        "ranks",
        "A rank that gave up a round after the timeout begins another one than the others have.",
        "f07069e",
        (
            Edit(
                "ops/parallel/consistency.py",
                "            self.count = number\n",
                "",
            ),
        ),
        ("tests/parallel/test_consistency.py::test_round_that_is_given_up_is_tried_again",),
    ),
    Fault(
        "agreement-before-an-error",
        "ranks",
        "Ranks skip the exchange of a call that they agreed on before an error, so that one of them"
        " does not hear of it.",
        "b187df1",
        (
            Edit(
                "ops/parallel/consistency.py",
                "        rounds.calls += 1\n        rounds.known.clear()\n",
                "        rounds.calls += 1\n",
            ),
        ),
        (
            "tests/parallel/test_consistency.py"
            "::test_ranks_meet_again_after_an_error_although_they_agreed_before",
        ),
    ),
    Fault(
        "group-in-a-store-that-was-kept",
        "ranks",
        "A group that is made anew in a kept store reads what an earlier one has left.",
        "92e09d7",
        (
            Edit(
                "ops/parallel/consistency.py",
                "        finalize(process_group, rounds.close).atexit = False\n",
                "",
            ),
        ),
        (
            "tests/parallel/test_consistency.py"
            "::test_group_that_is_closed_takes_back_errors_that_a_later_one_could_hear",
            "tests/parallel/test_consistency.py"
            "::test_process_group_after_another_one_in_a_store_that_was_kept",
        ),
    ),
    Fault(
        "ranks-with-and-without-kernels",
        "ranks",
        "A rank with kernels and one without exchange sums of other shapes.",
        "58f81a2",
        (
            Edit(
                "ops/parallel/shard.py",
                '        "primitives": backend_of(h, w, h.shape[0] * parts).name,\n',
                "",
            ),
        ),
        ("tests/parallel/test_parallel_calls.py::test_ranks_that_differ_in_primitives_all_raise",),
    ),
)

PLANNER = (
    Fault(
        "smoothing-of-sampled-gradients",
        "planner",
        "The memory model leaves out the sums of dX that label smoothing adds to sampled gradients"
        " on kernels.",
        "d5f1a3f",
        (
            Edit(
                "ops/sampling/lower.py",
                'out.append(self.buffer("sums", p.tokens, p.hidden, p.sums))',
                "pass",
            ),
            Edit(
                "ops/sampling/kernels.py",
                '    sums = call.view("sums")\n',
                "    sums = factors.scale.new_empty(x.tokens, x.h.shape[1])\n",
            ),
        ),
        ("tests/ops/test_sampled_kernels.py::test_peak_memory_is_predicted",),
    ),
    Fault(
        "exchange-of-dx",
        "planner",
        "The memory model leaves out the copies that an exchange of dX makes on a CPU.",
        "915ed6d",
        (
            Edit(
                "ops/planning/step_memory.py",
                'copied_rows = p.tokens if p.device == "cpu" else 0',
                "copied_rows = 0",
            ),
        ),
        ("tests/parallel/test_parallel_calls.py::test_peak_is_predicted",),
    ),
    Fault(
        "blocks-of-kept-sums",
        "planner",
        "The memory model counts fewer blocks of rows than a step with kept sums takes on a CPU.",
        "06c5e85",
        (
            Edit(
                "ops/planning/step_memory.py",
                "PLAIN, GATHERED, CONVERTED, ADDED = 2, 3, 4, 6",
                "PLAIN, GATHERED, CONVERTED, ADDED = 2, 3, 4, 4",
            ),
        ),
        ("tests/ops/test_memory_model.py::test_the_peak_of_a_layout_is_predicted",),
    ),
    Fault(
        "plans-on-meta",
        "planner",
        "A plan for tensors on meta is that of a portable backend, of four times the memory.",
        "c73f918",
        (
            Edit(
                "ops/primitives/dispatch.py",
                'return "cuda" if x.is_meta else x.device.type',
                "return x.device.type",
            ),
        ),
        ("tests/ops/test_meta_plans.py",),
    ),
    Fault(
        "plans-that-must-alias",
        "planner",
        "A budget is exceeded by the scaled hidden states that columns in dW's memory need, where"
        " a plan without such columns takes less.",
        "38a026b",
        (
            Edit(
                "ops/program/plan.py",
                "for aliased in {0, most_aliased(p, window, block)}:",
                "for aliased in {most_aliased(p, window, block)}:",
            ),
        ),
        ("tests/program/test_planning.py",),
    ),
    Fault(
        "copies-of-strided-operands",
        "planner",
        "The memory model leaves out the copies of operands that GEMMs cannot address.",
        "11fc916",
        (
            Edit(
                "ops/program/primitives_backend.py",
                "        peak += copies.dense\n",
                "",
            ),
        ),
        ("tests/ops/test_memory_model.py::test_copies_of_operands_are_predicted",),
    ),
)

DEFERRAL = (
    Fault(
        "copy-of-changed-logits",
        "deferral",
        "A copy of logits that have changed has the loss of those before.",
        "8eb6552",
        (
            Edit(
                "integrations/deferral/head.py",
                "        self.check_others(memory, None)\n        self.copies += 1\n",
                "        self.copies += 1\n",
            ),
        ),
        ("tests/deferral/test_changes.py::test_a_copy_of_changed_logits_is_refused",),
    ),
    Fault(
        "copy-that-changes",
        "deferral",
        "A change of a copy of the logits is taken for one of the logits.",
        "ae3f8c3",
        (
            Edit(
                "integrations/deferral/head.py",
                "            other != memory or x is own or _version(x) == version"
                " for other, x, version in self.made\n",
                "            x is own or _version(x) == version for _, x, version in self.made\n",
            ),
        ),
        ("tests/deferral/test_changes.py::test_a_copy_of_the_logits_may_be_changed",),
    ),
    Fault(
        "view-before-a-hook",
        "deferral",
        "The gradient of a loss of a view that was taken before a hook of the logits passes the"
        " hook.",
        "cdc0602",
        (
            Edit(
                "integrations/deferral/head.py",
                "        self.check_watched()\n        self.is_fused = True\n",
                "        self.is_fused = True\n",
            ),
            Edit(
                "integrations/deferral/logits.py",
                "            self.call.check_watched()\n",
                "",
            ),
        ),
        (
            "tests/deferral/test_autograd.py"
            "::test_gradients_of_logits_are_watched_before_the_loss_alone",
        ),
    ),
    Fault(
        "hook-after-the-loss",
        "deferral",
        "A hook of the logits that is registered after their loss never runs.",
        "2880fcd",
        (
            Edit(
                "integrations/deferral/head.py",
                "        if self.is_fused:\n            raise RuntimeError(\n"
                '                f"logits: got {method}',
                "        if self.is_fused and not self.grad:\n            raise RuntimeError(\n"
                '                f"logits: got {method}',
            ),
        ),
        (
            "tests/deferral/test_autograd.py"
            "::test_gradients_of_logits_are_watched_before_the_loss_alone",
        ),
    ),
    Fault(
        "cast-of-outputs-after-steps",
        "deferral",
        "A cast of a model's outputs comes behind what is done to the logits afterwards.",
        "fa2019e",
        (
            Edit(
                "integrations/deferral/record.py",
                "memory, own = self.call.copy(self.memory), self.derived()"
                "  # with a cast among its steps",
                "memory, own = self.call.copy(self.memory), self",
            ),
        ),
        ("tests/deferral/test_logits.py::test_casts_of_states_come_before_later_steps",),
    ),
    Fault(
        "scale-under-a-transform",
        "deferral",
        "A scale of the logits that is a tensor loses its derivative under a transform.",
        "fa2019e",
        (
            Edit(
                "integrations/deferral/record.py",
                "        return False\n    if torch_compat.is_transformed():\n"
                "        return False\n    return not (x.is_cuda",
                "        return False\n    return not (x.is_cuda",
            ),
        ),
        ("tests/deferral/test_autograd.py::test_a_scale_has_derivatives_by_transforms",),
    ),
    Fault(
        "checkpoint-that-returns-more",
        "deferral",
        "A reentrant checkpoint that returns a part of the logits loses their gradient.",
        "fa2019e",
        (
            Edit(
                "ops/torch_compat.py",
                "def checkpoint_returned_rows() -> bool:",
                "def checkpoint_returned_rows(last: int) -> bool:",
            ),
            Edit(
                "ops/torch_compat.py",
                "return any(isinstance(x, Tensor) and x.ndim > 0 for x in given)",
                "return any(isinstance(x, Tensor) and last in x.shape[-1:] for x in given)",
            ),
            Edit(
                "integrations/deferral/head.py",
                "if torch_compat.checkpoint_returned_rows():",
                "if torch_compat.checkpoint_returned_rows(self.weight.shape[0]):",
            ),
        ),
        ("tests/deferral/test_autograd.py::test_a_reentrant_checkpoint_may_return_any_rows",),
    ),
    Fault(
        "head-of-fewer-rows",
        "deferral",
        "A head whose weight was replaced by one of fewer rows has the classes of before.",
        "44af97d",
        (
            Edit(
                "integrations/deferral/head.py",
                "self.classes = head.weight.shape[0]",
                "self.classes = head.out_features",
            ),
        ),
        ("tests/deferral/test_heads.py::test_a_weight_of_fewer_rows_tells_the_classes",),
    ),
    Fault(
        "hooks-that-leave-a-forward",
        "deferral",
        "A head keeps the forward that removed hooks of accelerate have left in it, which makes"
        " logits for ever.",
        "fa2019e",
        (
            Edit(
                "integrations/deferral/model.py",
                '    if getattr(head.__dict__.get("forward"), "__func__", None) in FORWARDS:\n'
                '        del head.__dict__["forward"]\n',
                "",
            ),
        ),
        ("tests/integrations/test_deferral.py::test_hooks_of_accelerate_come_and_go",),
    ),
    Fault(
        "negative-labels-of-megatron",
        "deferral",
        "A negative label of Megatron-Core, which its mask takes away, is an error or NaN.",
        "2ef7500",
        (
            Edit(
                "integrations/megatron.py",
                '    if "ignore_index" not in options:\n'
                "        labels = labels.masked_fill(labels < 0, -100)\n",
                "",
            ),
        ),
        ("tests/integrations/test_megatron.py",),
    ),
    Fault(
        "megatrons-logits-in-a-list",
        "deferral",
        "Megatron's logits in a list, or by keyword, call themselves without end.",
        "5a59166",
        (
            Edit(
                "integrations/megatron.py",
                "        made, named = replaced((args, kwargs or {}), cls, cls.logits)\n"
                "        return function(*made, **named)\n",
                "        made = [x.logits() if isinstance(x, cls) else x for x in args]\n"
                "        return function(*made, **(kwargs or {}))\n",
            ),
        ),
        ("tests/integrations/test_megatron.py::test_a_function_of_the_logits_makes_them_once",),
    ),
)

CACHE = (
    Fault(
        "fingerprint-without-subfolders",
        "cache",
        "The fingerprint of the kernels' sources leaves out subfolders, so that stale kernels are"
        " loaded.",
        "7a4a27a",
        (
            Edit(
                "cute_kernels/jit/cache.py",
                'for path in folder.rglob("*.py")}',
                'for path in folder.glob("*.py")}',
            ),
        ),
        ("tests/cute_kernels/test_jit_cache.py::test_files_change_the_source_fingerprint",),
    ),
    Fault(
        "merge-that-revives-what-was-rejected",
        "cache",
        "A merge of tuned tables keeps an entry of a configuration that another table rejects.",
        "be21105",
        (
            Edit(
                "autotune_cache/table.py",
                "for key, entry in table.without_rejected(rejected).entries.items():",
                "for key, entry in table.entries.items():",
            ),
        ),
        ("tests/autotune_cache/test_table.py::test_rejections_survive_every_merge",),
    ),
    Fault(
        "time-of-infinity",
        "cache",
        "A table with an infinite or huge time is read, and raises out of the lookup.",
        "be21105",
        (
            Edit(
                "autotune_cache/table_io.py",
                "if type(time) not in (int, float) or not MIN_MS <= time <= MAX_MS:",
                "if type(time) not in (int, float) or not MIN_MS <= time:",
            ),
        ),
        ("tests/autotune_cache/test_lookup.py::test_a_bad_file_is_ignored_with_one_warning",),
    ),
    Fault(
        "folder-that-others-may-write-to",
        "cache",
        "A library is loaded from a folder that another user may write to.",
        "be21105",
        (
            Edit(
                "cute_kernels/cache_files.py",
                "    for part in _parts(path):\n        _check(part)\n",
                "    for part in _parts(path)[-1:]:\n        _check(part)\n",
            ),
        ),
        (
            "tests/cute_kernels/test_cache_files.py"
            "::test_what_others_may_have_written_is_neither_read_nor_changed",
        ),
    ),
    Fault(
        "two-holders-of-a-lock",
        "cache",
        "Two processes hold one lock, as a waiting one locks the file that the holder has removed.",
        "be21105",
        (
            Edit(
                "cute_kernels/cache_files.py",
                "if _flock(descriptor) and os.path.samestat(os.fstat(descriptor), name.stat()):",
                "if _flock(descriptor):",
            ),
        ),
        ("tests/cute_kernels/test_cache_files.py::test_a_lock_of_a_removed_file_is_none",),
    ),
    Fault(
        "verification-that-another-process-made",
        "cache",
        "A process that waited for another one's verification does not see what that rejected.",
        "80d85f9",
        (
            Edit(
                "autotune_cache/tuning/verify.py",
                "        lookup.reload(gpu)"
                "  # another process may have verified, and rejected, meanwhile\n",
                "",
            ),
        ),
        (
            "tests/autotune_cache/test_verification.py"
            "::test_a_process_that_waited_uses_what_the_other_found",
        ),
    ),
    Fault(
        "tuned-configurations-beside-a-wrong-default",
        "cache",
        "Tuned configurations are rejected for a fault of the default beside which they are"
        " checked.",
        "f23a9a7",
        (
            Edit(
                "autotune_cache/tuning/verify.py",
                "_faults([dataclasses.replace(together, configs=default), *one_by_one])",
                "_faults(one_by_one)",
            ),
        ),
        (
            "tests/autotune_cache/test_verification.py"
            "::test_a_call_whose_default_fails_rejects_no_tuned_configuration",
        ),
    ),
    Fault(
        "compiling-inside-the-time-limit",
        "cache",
        "A kernel that no folder keeps is compiled within the time limit of its check, and so may"
        " be recorded as one that hangs.",
        "897940a",
        (
            Edit(
                "autotune_cache/tuning/verify.py",
                "                for kernel in check.kernels():\n"
                "                    process.ask("
                "functools.partial(worker.load, kernel), build.BUILD_SECONDS)\n",
                "",
            ),
        ),
        (
            "tests/autotune_cache/test_verification.py"
            "::test_kernels_that_cannot_be_stored_are_compiled_outside_the_time_limit",
        ),
    ),
    Fault(
        "process-that-the-system-ended",
        "cache",
        "A check whose process the system ended for lack of memory is recorded as a kernel's"
        " fault.",
        "897940a",
        (
            Edit(
                "cute_kernels/jit/subprocess_worker.py",
                '    "ended by SIGKILL",\n',
                "",
            ),
        ),
        (
            "tests/autotune_cache/test_verification.py"
            "::test_a_process_killed_by_the_system_is_no_verdict",
        ),
    ),
    Fault(
        "rows-of-a-check-in-two-orders",
        "cache",
        "Verification masks moved rows in the order of the call by targets in that of the"
        " selection, and rejects every kernel.",
        "bb7bb70",
        (
            Edit(
                "autotune_cache/tuning/outputs/steps.py",
                "counts = (_partly_ignored(case) != IGNORED)[:, None]",
                "counts = (inputs.targets.index != IGNORED)[:, None]",
            ),
        ),
        ("tests/autotune_cache/test_worker.py::test_models_of_the_kernels_pass",),
    ),
    Fault(
        "winner-that-was-the-default",
        "cache",
        "A problem gets the default of another problem where that won, and not its own.",
        "d5d14ce",
        (
            Edit(
                "autotune_cache/lookup.py",
                "return entry if entry.beats_default and not"
                " _wastes_rows(key, entry, problem, gpu) else None",
                "return entry if not _wastes_rows(key, entry, problem, gpu) else None",
            ),
        ),
        (
            "tests/autotune_cache/test_lookup.py"
            "::test_where_the_default_won_other_problems_get_their_default",
        ),
    ),
    Fault(
        "tuned-tiles-for-few-tokens",
        "cache",
        "A tuned entry for the most tokens of a bucket serves fewer, which smaller tiles serve"
        " faster.",
        "a23b5d3",
        (
            Edit(
                "autotune_cache/lookup.py",
                "return None if swaps and _wastes_rows(key, entry, problem, gpu) else entry",
                "return entry",
            ),
        ),
        ("tests/autotune_cache/test_lookup.py::test_few_tokens_of_a_bucket_have_smaller_tiles",),
    ),
    Fault(
        "library-that-does-not-load",
        "cache",
        "A whole library of the user's that does not load raises, and no other one is tried.",
        "67e32d9",
        (
            Edit(
                "cute_kernels/jit/cache.py",
                "        with contextlib.suppress(OSError):\n            return _load(path)\n",
                "        return _load(path)\n",
            ),
        ),
        (
            "tests/cute_kernels/test_jit_cache.py::test_a_library_that_does_not_load_is_compiled_again",
        ),
    ),
)

ERRORS = (
    Fault(
        "wrong-buffer-without-gradients",
        "errors",
        "A wrong buffer passes where gradients are off.",
        "8416745",
        (
            Edit(
                "ops/interface/call.py",
                "        adds = tensors.accumulate_into is not None\n",
                "        if not grad:\n"
                "            tensors = dataclasses.replace("
                "tensors, accumulate_into=None, grad_output=None)\n"
                "        adds = tensors.accumulate_into is not None\n",
            ),
        ),
        (
            "tests/errors/test_wrong_calls.py::test_wrong_arguments",
            "tests/ops/test_accumulate_into.py::test_without_gradients_nothing_is_added",
        ),
    ),
    Fault(
        "temperature-of-some-positions",
        "errors",
        "A loss of K dimensions takes a temperature for each token where each position needs one.",
        "a1c8f89",
        (
            Edit(
                "ops/interface/positions.py",
                "        if check is not None and isinstance(x, Tensor):\n",
                '        if name != "temperature" and check and isinstance(x, Tensor):\n',
            ),
        ),
        ("tests/errors/test_wrong_calls.py::test_wrong_arguments",),
    ),
    Fault(
        "negative-denominator",
        "errors",
        "A negative denominator gives a loss of the other sign, and one of NaN no number.",
        "49c9e66",
        (
            Edit(
                "ops/interface/checks.py",
                "DIVISOR = SCALAR.of(lambda x: 0 <= x < math.inf,",
                "DIVISOR = SCALAR.of(lambda x: not x >= math.inf,",
            ),
        ),
        ("tests/errors/test_wrong_calls.py::test_wrong_arguments",),
    ),
    Fault(
        "buffer-in-the-weight",
        "errors",
        "A backward overwrites the weight, in whose memory the buffer begins elsewhere.",
        "8449c65",
        (
            Edit(
                "ops/interface/checks.py",
                "return bool(first_a < end_b and first_b < end_a)",
                "return bool(first_a == first_b)",
            ),
        ),
        (
            "tests/errors/test_wrong_calls.py::test_wrong_arguments",
            "tests/errors/test_wrong_calls.py::test_a_buffer_has_none_of_the_memory_of_a_bias",
        ),
    ),
    Fault(
        "beta-of-no-jsd",
        "errors",
        "A divergence ignores a beta beside a KL, so that a call that meant the JSD computes the"
        " forward KL.",
        "3389d34",
        (
            Edit(
                "ops/divergence/checks.py",
                '    if beta is not None and divergence != "jsd":\n',
                '    if beta is not None and divergence == "":\n',
            ),
        ),
        ("tests/errors/test_wrong_calls.py::test_wrong_arguments",),
    ),
    Fault(
        "floats-of-8-bits",
        "errors",
        "Biases and temperatures of 8 bits pass the checks.",
        "1ed9d91",
        (
            Edit(
                "ops/interface/checks.py",
                "    check_dtype(name, x)\n    _check_place(name, x, of, shape)\n",
                "    if not x.is_floating_point():\n        check_dtype(name, x)\n"
                "    _check_place(name, x, of, shape)\n",
            ),
        ),
        ("tests/errors/test_wrong_calls.py::test_wrong_arguments",),
    ),
    Fault(
        "bool-for-a-number",
        "errors",
        "True passes for the number 1.",
        "86b3d47",
        (
            Edit(
                "ops/interface/checks.py",
                "    if isinstance(value, (bool, str)):  #",
                "    if isinstance(value, str):  #",
            ),
        ),
        ("tests/errors/test_wrong_calls.py::test_wrong_arguments",),
    ),
    Fault(
        "minutes-that-are-no-number",
        "errors",
        "A tuning budget of NaN minutes never ends.",
        "71b329f",
        (
            Edit(
                "cutefce/commands/tune.py",
                "    if math.isnan(given):\n",
                "    if given < 0:\n",
            ),
        ),
        ("tests/test_cli.py::test_tune",),
    ),
    Fault(
        "brackets-as-markup",
        "errors",
        "A command takes brackets in the reason of a rejection for markup, and hides or fails at"
        " them.",
        "be21105",
        (
            Edit(
                "cutefce/commands/common.py",
                "markup=False, highlight=False)",
                "highlight=False)",
            ),
        ),
        (
            "tests/test_cli.py::test_show_prints_reasons_and_names_as_they_are",
            "tests/test_cli.py::test_tune_reports_reasons_as_they_are",
        ),
    ),
)

FAULTS = (*KERNELS, *NUMERICS, *OPTIONS, *RANKS, *PLANNER, *DEFERRAL, *CACHE, *ERRORS)
