"""Facts about the machine."""

import pytest

from peagle.console.facts import processor_engine
from peagle.native import amx, jit


@pytest.mark.parametrize(
    ("native", "tiles", "shown"),
    [
        (None, None, "native layers, AMX tiles"),
        (None, "the CPU lacks amx-tile", "native layers, vectors (the CPU lacks amx-tile)"),
        ("llvmlite is not installed", "llvmlite is not installed", "PyTorch (llvmlite is not installed)"),
    ],
)
def test_what_computes_layers_on_a_cpu_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, native: str | None, tiles: str | None, shown: str
) -> None:
    monkeypatch.setattr(jit, "missing", lambda: native)
    monkeypatch.setattr(amx, "missing", lambda: tiles)
    assert processor_engine() == shown
