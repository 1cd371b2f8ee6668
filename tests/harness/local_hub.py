"""A local stand-in for the Hugging Face Hub: serves directories through the routes that `huggingface_hub` calls.

The client is the real one. A repository may be gated, unknown or broken.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandInHub:
    """`repositories` maps model ids to directories; `gated` ones list their files but serve none."""

    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    parameters: dict[str, dict[str, int]] = field(default_factory=dict)
    """By model id: the number of parameters of each dtype."""
    quantization: dict[str, dict[str, int]] = field(default_factory=dict)
    """By model id: the quantization_config of its config.json."""
    served: list[str] = field(default_factory=list)
    """Files served, as model id and path."""
    url: str = ""

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        model_id, rest = "/".join(parts[:2]), parts[2:]
        directory = self.repositories.get(model_id)
        if directory is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if not is_api:
            return self._file(method, model_id, directory, "/".join(rest[2:]))
        files = [each for each in sorted(directory.rglob("*")) if each.is_file()]
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": str(each.relative_to(directory))} | _sizes(each) for each in files]
            return 200, {}, json.dumps(tree).encode()
        siblings = [{"rfilename": str(each.relative_to(directory))} for each in files]
        counts = self.parameters.get(model_id)
        held = {} if counts is None else {"safetensors": {"parameters": counts, "total": sum(counts.values())}}
        if model_id in self.quantization:
            held["config"] = {"quantization_config": self.quantization[model_id]}
        about = {"id": model_id, "sha": COMMIT, "siblings": siblings, "private": False} | held
        return 200, {}, json.dumps(about).encode()

    def _file(self, method: str, model_id: str, directory: Path, name: str) -> tuple[int, dict[str, str], bytes]:
        if model_id in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        path = directory / name
        if not path.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = path.read_bytes()
        if method == "GET":
            self.served.append(f"{model_id}/{name}")
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content


def _sizes(path: Path) -> dict[str, object]:
    return {"size": path.stat().st_size, "oid": hashlib.sha1(path.read_bytes()).hexdigest()}


@contextmanager
def running(hub: StandInHub) -> Iterator[StandInHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            status, headers, body = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
