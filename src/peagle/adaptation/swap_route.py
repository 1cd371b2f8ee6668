"""POST /v1/drafter: serve other weights of the same drafter, without a restart. Off unless the operator names a place.

Only drafters in that directory can be chosen, so a client with an API key cannot make the server read other files.
"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from peagle.checkpoint.card import baseline_of
from peagle.errors import ConfigError
from peagle.server.app import ExtraRoute, Routes, read_json
from peagle.server.errors import as_bad_body, invalid
from peagle.server.protocol import Part
from peagle.server.service import Service
from peagle.server.streaming import JsonResponse

if TYPE_CHECKING:
    from peagle.checkpoint.card import DrafterCard

log = logging.getLogger(__name__)

PATH = "/v1/drafter"


class SwapBody(Part):
    """Which drafter to serve."""

    drafter: str
    """its path, relative to the directory of drafters, or absolute"""


def swap_route(directory: Path) -> ExtraRoute:
    """The route, for the drafters in `directory`."""
    if not directory.is_dir():
        raise ConfigError(f"--swap-from {directory} is not a directory", hint="create it, and put drafters into it")
    root, lock = directory.resolve(), asyncio.Lock()

    async def swap(routes: Routes[Any], request: Request) -> Response:
        try:
            body = SwapBody.model_validate(await read_json(request, routes.settings))
        except ValidationError as error:
            raise as_bad_body(error) from None
        service: Service = routes.lifecycle.answering()
        path = _within(root, body.drafter)
        async with lock:
            card = await service.engine.swap_drafter(path)
            before, service.drafter_name = service.drafter_name, path.name
            _use_card(service, card)
        log.info("drafter %s took the place of %s", path, before)
        return JsonResponse({"drafter": path.name, "previous": before, "acceptance": _lengths(card)})

    return ExtraRoute(PATH, ("POST",), "Serve other weights of the same drafter", swap, bodies=(SwapBody,))


def _within(root: Path, name: str) -> Path:
    """The drafter of that name. Refuses paths that lead out of the directory, links included."""
    try:
        path = (root / name).resolve()
        is_directory = path.is_dir()
    except (OSError, ValueError, RuntimeError):  # a null byte, links in a circle, or a name that is too long
        raise invalid("drafter", "is not a path") from None
    if not path.is_relative_to(root) or path == root:
        raise invalid("drafter", f"must be in the directory of drafters, {root}, got {name[:200]!r}")
    if not is_directory:
        raise invalid("drafter", f"names no directory: {name[:200]!r}")
    return path


def _use_card(service: Service, card: "DrafterCard") -> None:
    """Compare acceptance with the new card from now on."""
    metrics = service.metrics
    metrics.baseline, metrics.sampled = (
        baseline_of(card.acceptance, service.num_draft_tokens, is_sampled) for is_sampled in (False, True)
    )
    metrics.window.clear()


def _lengths(card: "DrafterCard") -> dict[str, float]:
    entries = {name: entry for name, entry in card.acceptance.items() if isinstance(entry, dict)}
    return {name: entry["acceptance_length"] for name, entry in entries.items() if "acceptance_length" in entry}
