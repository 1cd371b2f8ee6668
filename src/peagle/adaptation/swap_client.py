"""Asks a running server to serve another drafter directory."""

from pathlib import Path
from typing import Any

import httpx

from peagle.bench.client import headers_of, is_this_machine, root_of
from peagle.errors import ServerError

SECONDS = 120.0
"""The server reads the directory and copies the weights between two steps."""


def swap(url: str, directory: Path, api_key: str | None = None) -> dict[str, Any]:
    """Serve the drafter in `directory` at `url`; returns the server's answer. A refusal changes nothing there."""
    root = root_of(url)
    body = {"drafter": str(directory.resolve())}
    try:
        with httpx.Client(timeout=SECONDS, trust_env=not is_this_machine(root), headers=headers_of(api_key)) as client:
            response = client.post(f"{root}/v1/drafter", json=body)
    except httpx.HTTPError as error:
        raise ServerError(
            f"cannot reach {root}: {str(error) or type(error).__name__}",
            hint="the drafter is written; rerun the command to try the swap again",
        ) from error
    if response.status_code == 404:
        raise ServerError(
            f"{root} does not swap drafters",
            hint=f"start it with `peagle serve --swap-from {directory.resolve().parent}`, then rerun the command",
        )
    if response.status_code != 200:
        raise ServerError(f"{root} refused the drafter: {_message(response)}", hint="it serves the one it had")
    found: dict[str, Any] = response.json()
    return found


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
