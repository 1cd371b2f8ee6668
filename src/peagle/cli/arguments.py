"""Options that several commands share, and parsing them."""

import contextlib
import io
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from peagle.errors import PeagleError

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetArguments:
    """Which target, and how it runs."""

    target: str | None = None
    """directory, GGUF file, name in `peagle catalog` or Hugging Face id; by default the embedded one"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU; on a CPU float32, or bfloat16 for weights that fill the memory where it is native"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""

    def load(self) -> "HFTarget":
        from transformers.utils import logging as transformers_logging

        from peagle.targets.load import load_target

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        return load_target(self.target, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class DrafterArguments:
    """Which drafter."""

    drafter: str | None = None
    """directory, Hugging Face id, or variant in `peagle catalog` (base, long-context); by default the catalog's"""
    allow_mismatch: bool = False
    """use a drafter that was trained for another target's weights, tokenizer or chat template"""

    def check(self, target: TargetArguments) -> None:
        """Refuse a drafter that nobody can have while nothing is downloaded yet."""
        from peagle.targets.catalog import DEFAULT_TARGET, find

        entry = find(target.target or DEFAULT_TARGET)
        if entry is None:
            return
        for each in (entry.drafter(),) if self.drafter is None else entry.drafters:
            if self.drafter in (None, each.variant):
                each.check_public(entry.name)

    def load(self, target: "HFTarget") -> "Drafter":
        from peagle.drafter.checkpoint import load_drafter

        return load_drafter(self.drafter, target, allow_mismatch=self.allow_mismatch)


TargetOptions = Annotated[TargetArguments, tyro.conf.OmitArgPrefixes]
DrafterOptions = Annotated[DrafterArguments, tyro.conf.OmitArgPrefixes]


def parse(kind: type[T], command: str, argv: list[str], *, description: str | None = None, **options: Any) -> T:
    """Parse a command's options into its dataclass; without a description, its module's is shown.

    What a dataclass itself refuses is raised as it is. Options that cannot be read are explained on stderr and end
    the process with status 2.
    """
    description = description or sys.modules[kind.__module__].__doc__
    talk = io.StringIO()
    try:
        with contextlib.redirect_stderr(talk):
            return tyro.cli(kind, prog=f"peagle {command}", description=description, args=argv, **options)
    except SystemExit as end:
        refusal = _refusal(end)
        if refusal is not None:
            raise refusal from None
        sys.stderr.write(talk.getvalue())
        raise


def _refusal(end: BaseException) -> PeagleError | None:
    """The error of ours that made tyro end: it takes any ValueError of a dataclass for its own to print."""
    cause = end.__context__
    while cause is not None and not isinstance(cause, PeagleError):
        cause = cause.__context__
    return cause


def accelerator(target: "HFTarget") -> str | None:
    """The name of the GPU the target runs on; None on a CPU."""
    if target.device.type != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name(target.device)
