"""A stand-in of the Hugging Face Hub's API, as far as the client `huggingface_hub` needs it to create and fill a model
repository over Git LFS."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_stand_in"


@dataclass
class Hub:
    """Repositories by id: files by path. `refused` maps a part of a path to the status that requests to it get."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        do_PUT = do_POST

        def _answer(self, body: bytes | None) -> None:
            status, document, code = answer(hub, self.path, self.headers.get("Authorization"), body)
            data = json.dumps(document).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(hub: Hub, path: str, authorization: str | None, body: bytes | None) -> tuple[int, Any, str]:
    """Status, document and error code."""
    path = path.partition("?")[0]
    for part, status in hub.refused.items():
        if part in path:
            return status, {"error": "refused by the test"}, ""
    if path.startswith("/lfs/"):
        hub.stored[path.removeprefix("/lfs/")] = body or b""
        return 200, {}, ""
    if authorization != f"Bearer {TOKEN}":
        return 401, {"error": "Invalid credentials"}, ""
    if path == "/api/whoami-v2":
        return 200, {"type": "user", "name": "ada", "auth": {"accessToken": {"role": "write"}}}, ""
    given = (body or b"").decode()
    if path == "/api/repos/create":
        return _create(hub, json.loads(given))
    if path == "/api/validate-yaml":
        is_good = re.search(r"^license: [a-z0-9.-]+$", json.loads(given)["content"], re.MULTILINE)
        return (200, {}, "") if is_good else (400, {"errors": [{"message": '"license" must be one of ...'}]}, "")
    found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+?)(?:\.git/info/lfs/objects/(batch)|/(\w+)/main)", path)
    if found is None or found[1] not in hub.files:
        return 404, {"error": "Repository not found"}, "RepoNotFound"
    return _on_repository(hub, found[1], found[2] or found[3], given)


def _create(hub: Hub, asked: dict[str, Any]) -> tuple[int, Any, str]:
    name = f"{asked['organization']}/{asked['name']}"
    if name in hub.files:
        return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}, ""
    hub.files[name], hub.private[name] = {".gitattributes": b""}, asked.get("visibility") == "private"
    return 200, {"url": f"{hub.url}/{name}", "id": name}, ""


def _on_repository(hub: Hub, repo: str, what: str, given: str) -> tuple[int, Any, str]:
    files = hub.files[repo]
    if what == "tree":
        rows = [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files.items()]
        return 200, rows, ""
    if what == "preupload":
        asked = json.loads(given)["files"]
        modes = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for each in asked
        ]
        return 200, {"files": modes}, ""
    if what == "batch":
        objects = [
            each | {"actions": {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}}
            for each in json.loads(given)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}, ""
    assert what == "commit", what
    for line in map(json.loads, given.splitlines()):
        value = line["value"]
        if line["key"] == "header":
            hub.commits.append(value["summary"])
        elif line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = hub.stored[value["oid"]]
            assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
    return 200, {"commitUrl": f"{hub.url}/{repo}/commit/abc", "commitOid": "abc", "hookOutput": ""}, ""
