"""A real server in a thread over a tiny target, and the clients that talk to it over TCP."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.engine.llm import LLM
from peagle.responses.route import RESPONSES_ROUTE
from peagle.sagemaker.serving import SAGEMAKER_ROUTES
from peagle.server.app import ExtraRoute, create_app
from peagle.server.auth import ApiKeys
from peagle.server.lifecycle import Lifecycle, Server, bind
from peagle.server.service import Service
from peagle.server.settings import ServerSettings

READY_SECONDS = 60.0


@dataclass
class Running:
    """A server that listens; `url` is where."""

    url: str
    server: Server
    lifecycle: Lifecycle[Service]
    thread: threading.Thread
    http: httpx.Client = field(init=False)
    _clients: dict[str, openai.OpenAI] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def service(self) -> Service:
        assert self.lifecycle.service is not None
        return self.lifecycle.service

    def client(self, **options: Any) -> openai.OpenAI:
        """The SDK's client, closed with the server; one for all that ask for no options."""
        key = repr(sorted(options.items()))
        if key not in self._clients:
            options = {"api_key": "none", "max_retries": 0} | options
            self._clients[key] = openai.OpenAI(base_url=f"{self.url}/v1", **options)
        return self._clients[key]

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))

    def stats(self) -> Any:
        assert self.server.lifecycle._loop is not None
        return asyncio.run_coroutine_threadsafe(self.service.engine.stats(), self.server.lifecycle._loop).result(30)

    def wait_until_idle(self, seconds: float = 20) -> Any:
        """The engine's counts once nothing runs, waits or holds a page."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            is_idle = not (stats.num_running or stats.num_waiting or stats.num_pages_used)
            if is_idle or time.monotonic() > deadline:
                return stats
            time.sleep(0.02)

    def metric(self, name: str) -> float:
        """The value of the one sample that begins with `name`."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name)]
        assert len(lines) == 1, f"{name}: {lines}"
        return float(lines[0].rpartition(" ")[2])


def tiny_llm(**settings: Any) -> LLM:
    template = settings.pop("chat_template", None)
    target = tiny_target(**{"num_layers": 3} | settings.pop("target", {}))
    if template is not None:
        target.tokenizer.chat_template = template
    with_drafter = settings.pop("with_drafter", True)
    settings = {"max_batch": 8, "max_length": 256, "page_size": 16} | settings
    if not with_drafter:
        return LLM(target, None, **settings)
    return LLM(target, tiny_drafter(target, num_layers=1), 4, **{"verify_tokens": 0} | settings)


@contextlib.contextmanager
def running(
    load: Callable[[], LLM] = tiny_llm,
    keys: tuple[str, ...] = (),
    *,
    wait: bool = True,
    routes: tuple[ExtraRoute, ...] = (),
    **settings: Any,
) -> Iterator[Running]:
    own = ServerSettings(port=0, **settings)
    listener = bind(own)
    lifecycle = Lifecycle(own, load, lambda llm: Service(llm, own))
    server = Server(create_app(own, ApiKeys(keys), lifecycle, (*SAGEMAKER_ROUTES, RESPONSES_ROUTE, *routes)), lifecycle)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.start()
    found = Running(url, server, lifecycle, thread)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not server.started or (wait and lifecycle.state != "ready"):
            assert time.monotonic() < deadline and thread.is_alive(), f"the server is {lifecycle.state}"
            time.sleep(0.01)
        yield found
    finally:
        found.http.close()
        for client in found._clients.values():
            client.close()
        server.lifecycle.begin_drain()
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """One server for the tests of a module, none of which may leave it changed."""
    with running() as found:
        yield found


@pytest.fixture
def chat_body() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "the user asks"}], "max_tokens": 8, "temperature": 0}
