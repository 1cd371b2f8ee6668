"""The server in front of vLLM, in a thread, with the stub process as vLLM."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import httpx

from peagle.sagemaker.serving import SAGEMAKER_ROUTES
from peagle.server.auth import ApiKeys
from peagle.server.lifecycle import Lifecycle, Server, bind
from peagle.server.settings import ServerSettings
from peagle.vllm.command import Command
from peagle.vllm.process import VllmProcess
from peagle.vllm.proxy import ProxyService, create_proxy_app
from peagle.vllm.proxy_bodies import Served

COMMAND = Command(("vllm", "serve", "target", "--served-model-name", "mine"), {}, 5, 2)
SERVED = {
    "names": ("mine",),
    "target": "target",
    "engine": "vLLM 0.32.0",
    "max_batch": 2,
    "num_draft_tokens": 5,
    "method": "p-eagle",
    "drafter_name": "head",
    "acceptance": {"some": {"per_position": [0.9, 0.8, 0.7, 0.6, 0.5]}},
}
CHAT = {"messages": [{"role": "user", "content": "the user asks"}], "max_tokens": 6}


class Running:
    def __init__(self, url, server, lifecycle, process):
        self.url, self.server, self.lifecycle, self.process = url, server, lifecycle, process
        self.http = httpx.Client(base_url=url, timeout=30)

    def post(self, path="/v1/chat/completions", **changes):
        return self.http.post(path, json=CHAT | changes)

    def metric(self, name):
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name)]
        assert len(lines) == 1, f"{name}: {lines}"
        return float(lines[0].rpartition(" ")[2])


@contextlib.contextmanager
def running(interpreter, keys=(), served=None, **settings) -> Iterator[Running]:
    own = ServerSettings(port=0, **settings)
    listener = bind(own)
    process = VllmProcess(interpreter)

    def load():
        process.start(COMMAND, os.environ)
        process.wait_healthy(30)
        return process

    served = Served(**(SERVED | (served or {})))
    lifecycle = Lifecycle(own, load, lambda child: ProxyService(child, served, own), process.end)
    server = Server(create_proxy_app(own, ApiKeys(keys), lifecycle, SAGEMAKER_ROUTES), lifecycle)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    found = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", server, lifecycle, process)
    try:
        deadline = time.monotonic() + 30
        while lifecycle.state != "ready":
            assert time.monotonic() < deadline and lifecycle.failure is None, lifecycle.failure
            time.sleep(0.01)
        yield found
    finally:
        found.http.close()
        server.lifecycle.begin_drain()
        thread.join(20)
        assert not thread.is_alive() and process.returncode is not None
