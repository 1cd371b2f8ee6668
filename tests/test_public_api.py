"""What `import peagle` offers, and what it must not cost."""

import subprocess
import sys

import pytest

import peagle
from peagle.errors import PeagleError


def test_exported_names_are_sorted() -> None:
    assert peagle.__all__ == sorted(peagle.__all__, key=lambda name: (not name.isupper(), name)), "as ruff sorts them"


def test_exported_names_are_complete() -> None:
    assert set(peagle.__all__) == {*peagle._HOME_OF, "__version__"}
    assert dir(peagle) == sorted(peagle.__all__)


@pytest.mark.parametrize("name", peagle.__all__)
def test_exported_name_resolves(name: str) -> None:
    assert getattr(peagle, name) is not None


def test_the_engine_is_offered_at_the_top() -> None:
    assert {"LLM", "AsyncEngine", "RequestOutput", "SamplingParams"} <= set(peagle.__all__)


def test_exported_error_is_the_one_that_is_raised() -> None:
    assert peagle.PeagleError is PeagleError


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError) as caught:
        peagle.load_verifier  # noqa: B018  # the access itself is under test
    assert "no attribute 'load_verifier'" in str(caught.value)
    assert "load_target" in str(caught.value)


@pytest.mark.parametrize("module", ["peagle", "peagle.cli.main"])
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [], f"import {module} loads {result.stdout}"
