"""A server for each module of tests, and a question for it."""

from collections.abc import Iterator
from typing import Any

import pytest

from serving import Running, running


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """One server for the tests of a module, none of which may leave it changed."""
    with running() as found:
        yield found


@pytest.fixture
def chat_body() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "the user asks"}], "max_tokens": 8, "temperature": 0}
