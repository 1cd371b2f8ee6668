"""Settings of the HTTP server."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.errors import ConfigError

KEYS_VARIABLE = "PEAGLE_API_KEYS"
"""Environment variable with API keys, separated by commas or whitespace."""


@dataclass(frozen=True)
class ServerOptions:
    """Address, access and time limits."""

    host: str | None = None
    """address to listen on; default: 127.0.0.1, in a SageMaker container 0.0.0.0"""
    port: int = 8080
    """port to listen on; 0 picks a free one and logs it"""
    served_model_name: tuple[str, ...] = ()
    """model names that requests may use; default: the target's own. Responses show the first"""
    api_key_file: Path | None = None
    """file with one API key per line; the environment variable PEAGLE_API_KEYS adds more"""
    cors_origins: tuple[str, ...] = ()
    """web origins whose pages may call the server, "*" for any; default: none"""
    request_seconds: float = 600.0
    """time limit of a request"""
    drain_seconds: float = 25.0
    """time for accepted requests to finish after SIGTERM; SageMaker kills the process after 30"""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds must be 0 or more, got {self.drain_seconds}")
        if not all(self.served_model_name):
            raise ConfigError("served_model_name must not be empty", hint="omit it to use the target's name")
        for name in ("request_seconds", "header_seconds", "body_seconds", "grammar_seconds", "keep_alive_seconds"):
            if not 0 < getattr(self, name, 1) < 1e7:
                raise ConfigError(f"{name} must be above 0 and below 10,000,000, got {getattr(self, name)}")


@dataclass(frozen=True)
class ServerSettings(ServerOptions):
    """All settings of a server: the options above, and those that only programs set."""

    max_choices: int = 128
    """limit of a request's prompts times n"""
    max_body_bytes: int = 16 * 2**20
    header_seconds: float = 10.0
    """time limit for the headers of a request to arrive, from their first byte"""
    body_seconds: float = 30.0
    """time limit for a request body to arrive"""
    grammar_seconds: float = 5.0
    """time limit for the grammar of a request to compile"""
    keep_alive_seconds: float = 10.0
    """a stream that is silent for this long gets a comment, so that proxies keep it open"""
    log_format: Literal["auto", "text", "json"] = "auto"
    """format of the request log; auto: text on a terminal, JSON otherwise"""


def keys_in(file: Path) -> list[str]:
    """The API keys of a file, one a line; `#` begins a comment."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API keys in {file} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"{file} has no API key", hint="write one a line, or leave --api-key-file out")
    return keys
