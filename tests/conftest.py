"""Seeds and thread counts: a test gives the same numbers alone, with other tests and on any machine."""

import os
import random
import signal
from collections.abc import Iterator

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The test models are tiny: a second thread costs more than it saves, and several tests run at once. Set in the
# environment, so that the commands that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Background jobs of a shell ignore SIGINT, and the commands that tests start and interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Without a GPU, Triton's interpreter runs the kernels. Triton reads the variable when a kernel is decorated, so it
    # must be set before the first import of triton.
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the documents' blocks first: they take longest, and the other tests fill the time beside them."""
    items.sort(key=lambda item: item.path.name != "test_docs.py")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _steps_cost_the_same() -> Iterator[None]:
    """Engines on a CPU measure steps at start. Here every step costs the same, so drafts pay on any machine."""
    from peagle.worker.step_costs import StepCosts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.worker.runner.measure_step_costs", lambda *_: StepCosts({1: 1.0}, {1: 0.0}))
        yield


@pytest.fixture(autouse=True, scope="session")
def _training_ends_soon() -> Iterator[None]:
    """Measure few answers at the end of a training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.compare.acceptance.TRAINING_PROMPTS", 2)
        patch.setattr("peagle.compare.acceptance.TRAINING_MAX_TOKENS", 8)
        yield
