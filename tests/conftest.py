"""Seeds and thread counts, so that a test gives the same numbers alone, in company and on any machine."""

import os
import random
import signal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tests' models are so small that handing work to a second thread costs more than it saves; and several tests run
# at a time. In the environment, so that commands which tests start keep to it as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore Ctrl-C, and so would every command that a test starts and then interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Where there is no GPU, Triton's kernels run in its interpreter. Triton reads this when a kernel is decorated, its
    # own library's among them, so it is set before anything imports triton.
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The documents' blocks take longest by far and stay in one process: begun last, they would be waited for."""
    items.sort(key=lambda item: item.path.name != "test_docs.py")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
