"""API keys: reading them, and comparing them in constant time."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from peagle.server.errors import HttpError
from peagle.server.settings import KEYS_VARIABLE, keys_in

CHALLENGE = {"WWW-Authenticate": "Bearer"}


class ApiKeys:
    """The keys of the inference routes, stored as digests. Without keys the routes are open."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """Raise a 401 unless the header `Authorization: Bearer KEY` holds one of the keys."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "missing API key; send the header 'Authorization: Bearer KEY'"
            raise HttpError(401, message, code="missing_api_key", headers=CHALLENGE)
        given = _digest(key.strip())
        if not sum(hmac.compare_digest(given, digest) for digest in self._digests):  # all: timing reveals nothing
            raise HttpError(401, "incorrect API key", code="invalid_api_key", headers=CHALLENGE)


def read_keys(file: Path | None, environment: Mapping[str, str], more: Iterable[str] = ()) -> ApiKeys:
    """Keys of a file, of the environment, and given ones."""
    keys = [*re.split(r"[\s,]+", environment.get(KEYS_VARIABLE, "")), *more]
    if file is not None:
        keys += keys_in(file)
    return ApiKeys(key for key in keys if key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
