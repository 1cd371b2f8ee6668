"""Options that several commands share, and parsing them."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

T = TypeVar("T")


@dataclass(frozen=True)
class ModelArguments:
    """Which target and drafter, and how they run."""

    target: str | None = None
    """directory, GGUF file, catalog name or Hugging Face id; by default the embedded SmolLM2-135M-Instruct"""
    drafter: str | None = None
    """drafter directory; by default the one that ships for the target"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 where the processor has the instructions for it, else float32"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    allow_mismatch: bool = False
    """use a drafter that was trained for another target's weights, tokenizer or chat template"""

    def load_target(self) -> "HFTarget":
        from transformers.utils import logging as transformers_logging

        from peagle.targets.load import load_target

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        return load_target(self.target, dtype=self.dtype, device=self.device)

    def load_drafter(self, target: "HFTarget") -> "Drafter":
        from peagle.drafter.checkpoint import load_drafter

        return load_drafter(self.drafter, target, allow_mismatch=self.allow_mismatch)


Models = Annotated[ModelArguments, tyro.conf.OmitArgPrefixes]


def parse(kind: type[T], command: str, argv: list[str], **options: Any) -> T:
    """Parse a command's options into its dataclass; wrong ones end the process with status 2."""
    description = sys.modules[kind.__module__].__doc__
    return tyro.cli(kind, prog=f"peagle {command}", description=description, args=argv, **options)
