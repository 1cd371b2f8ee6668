"""The comparison of peagle with vLLM as a table."""

from collections.abc import Iterator

from peagle.compare.vllm_parity import TIE, Agreement


def table(agreement: Agreement) -> Iterator[str]:
    """Accepted draft tokens per position, ours beside vLLM's, and totals."""
    yield f"{'position':>10} {'peagle':>8} {'vLLM':>8} {'rate':>8}"
    for position, (mine, other) in enumerate(
        zip(agreement.ours_per_position, agreement.theirs_per_position, strict=True)
    ):
        yield f"{position:>10} {mine:>8} {other:>8} {mine / max(agreement.num_steps, 1):>8.4f}"
    lengths = [
        1 + sum(counts) / max(agreement.num_steps, 1)
        for counts in (agreement.ours_per_position, agreement.theirs_per_position)
    ]
    yield f"{'AL':>10} {lengths[0]:>8.4f} {lengths[1]:>8.4f}"
    num_faulty_drafts = sum(" position " in fault for fault in agreement.faults)
    yield (
        f"{agreement.num_prompts} prompts, {agreement.num_output_tokens} output tokens equal "
        f"({agreement.num_output_ties} prompts end at a target tie); {agreement.num_steps} drafts, "
        f"{agreement.num_compared_drafts} draft tokens, {num_faulty_drafts} differ "
        f"({agreement.num_draft_ties} more at ties below {TIE:g})"
    )
