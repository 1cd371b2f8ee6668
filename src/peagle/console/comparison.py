"""The answers of `peagle generate --compare`, plain and with drafts: as a table and as a document."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from peagle.bench.cells import rounded
from peagle.bench.report import make_table, number
from peagle.compare.divergence import Divergence
from peagle.console.display import STYLES

if TYPE_CHECKING:
    from peagle.engine.outputs import Completion


@dataclass
class Run:
    """All answers of one method, timed."""

    method: str
    answers: "tuple[Completion, ...]"
    acceptance_length: float
    seconds: float
    """from request to last token"""
    time_to_first_token: float
    """from request to the end of the first step (prefill)"""
    num_first_tokens: int
    """tokens of the first step"""
    num_tolerated_tokens: int
    """tokens that are not the target's own choice"""

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed without the first step; None if the answers ended there."""
        num_later = self.num_tokens - self.num_first_tokens
        return num_later / (self.seconds - self.time_to_first_token) if num_later else None


def not_lossless(run: Run, tolerance: float) -> str:
    return (
        f"tolerance {tolerance:g}: not lossless, {run.num_tolerated_tokens} of {run.num_tokens} tokens are drafts that "
        "the target did not choose"
    )


def comparison(plain: Run, drafted: Run) -> Table:
    ids = [[each.token_ids for each in run.answers] for run in (plain, drafted)]
    shown = {kind: style for kind, style in STYLES.items() if kind != "tolerated" or drafted.num_tolerated_tokens}
    colors = ", ".join(f"[{style}]{kind}[/]" for kind, style in shown.items())
    in_all = (drafted.num_tokens / drafted.seconds) / (plain.num_tokens / plain.seconds)
    speed_up = f"speed-up {in_all:.2f}x in all"
    if plain.tokens_per_second and drafted.tokens_per_second:
        speed_up = f"speed-up {drafted.tokens_per_second / plain.tokens_per_second:.2f}x decoding, {in_all:.2f}x in all"
    answers = "two answers" if len(plain.answers) == 1 else "answers of the two"
    title = f"the {answers} {'are identical' if ids[0] == ids[1] else 'DIFFER'}"
    columns = ("decoding", "tokens", "first token", "in all", "tokens/s", "acceptance length")
    rows = [
        (
            each.method,
            str(each.num_tokens),
            f"{each.time_to_first_token:.2f} s",
            f"{each.seconds:.2f} s",
            number(each.tokens_per_second, 1),
            f"{each.acceptance_length:.2f}",
        )
        for each in (plain, drafted)
    ]
    return make_table(title, columns, rows, caption=f"colors: {colors} | {speed_up}")


def report(runs: list[Run], divergence: Divergence | None) -> dict[str, Any]:
    """One entry per answer, with the times of its run."""
    document: dict[str, Any] = {"answers": [entry(run, answer) for run in runs for answer in run.answers]}
    if len(runs) == 2:
        document["identical_to_plain"] = divergence is None
        document["divergence"] = None if divergence is None else asdict(divergence)
    return document


def entry(run: Run, answer: "Completion") -> dict[str, Any]:
    result: dict[str, Any] = {
        "method": run.method,
        "index": answer.index,
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "acceptance_length": run.acceptance_length,
        "seconds": run.seconds,
        "time_to_first_token": run.time_to_first_token,
        "tokens_per_second": rounded(run.tokens_per_second, 2),
        "num_tolerated_tokens": run.num_tolerated_tokens,
        "is_lossless": run.num_tolerated_tokens == 0,
    }
    if answer.logprobs is not None:
        result["logprobs"] = [
            {"logprob": each.logprob, "top": [{"token_id": key, "logprob": value} for key, value in each.top.items()]}
            for each in answer.logprobs
        ]
    return result
