"""The target of `engine_runs`, and an engine with a module's own drafter for it."""

from collections.abc import Iterator

import pytest

from harness.engine_runs import SEED, start
from harness.model_families import family_target
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.targets.hf import HFTarget


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """For the reference decoder; engines have the same weights, as a target that is lent answers to nobody else."""
    return family_target("llama", seed=SEED)


@pytest.fixture
def engine(drafter: Drafter) -> Iterator[Engine]:
    engine = start(drafter, page_size=4)
    yield engine
    engine.close()
