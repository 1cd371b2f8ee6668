"""peagle: P-EAGLE speculative decoding. Train a drafter for a causal LM; decode faster with identical answers.

    with peagle.LLM() as llm:  # the embedded target and its drafter
        print(llm.generate("Once upon a time", peagle.SamplingParams(max_tokens=64))[0].text)

Names are imported on first use, so `import peagle` and `peagle --help` do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.checkpoint.native import load_drafter
    from peagle.decoding.reference import decode
    from peagle.engine.async_engine import AsyncEngine
    from peagle.engine.llm import LLM
    from peagle.engine.outputs import RequestOutput
    from peagle.errors import PeagleError
    from peagle.sampling_params import Grammar, SamplingParams
    from peagle.targets.load import load_target

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "Grammar",
    "PeagleError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "decode",
    "load_drafter",
    "load_target",
]

_HOME_OF = {
    "LLM": "peagle.engine.llm",
    "AsyncEngine": "peagle.engine.async_engine",
    "Grammar": "peagle.sampling_params",
    "PeagleError": "peagle.errors",
    "RequestOutput": "peagle.engine.outputs",
    "SamplingParams": "peagle.sampling_params",
    "decode": "peagle.decoding.reference",
    "load_drafter": "peagle.checkpoint.native",
    "load_target": "peagle.targets.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'peagle' has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
