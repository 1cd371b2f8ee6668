"""Settings of the server, apart from those of the engine behind it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.errors import ConfigError

KEYS_VARIABLE = "PEAGLE_API_KEYS"
"""Environment variable with API keys, separated by commas or white space."""


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, what it lets in, and how long it waits."""

    host: str | None = None
    """address to listen on; by default 127.0.0.1, and in a SageMaker container all of them"""
    port: int = 8080
    """port to listen on; 0 takes a free one and says which"""
    served_model_name: tuple[str, ...] = ()
    """names that requests may use for the target; by default its own. The first one is shown in answers"""
    api_key_file: Path | None = None
    """file with one API key a line; keys may also be in the environment variable PEAGLE_API_KEYS"""
    cors_origins: tuple[str, ...] = ()
    """web origins that browsers may call from, "*" for any; by default none"""
    max_choices: int = 128
    """most answers of one request: its prompts times n"""
    max_body_bytes: int = 16 * 2**20
    """largest request body"""
    body_seconds: float = 30.0
    """time in which a request body must have arrived"""
    request_seconds: float = 600.0
    """time after which an unfinished request is ended with an error"""
    keep_alive_seconds: float = 10.0
    """silence after which a stream is sent a comment, so that proxies keep it open"""
    drain_seconds: float = 25.0
    """time that accepted requests get to finish after SIGTERM; SageMaker kills after 30"""
    log_format: Literal["auto", "text", "json"] = "auto"
    """lines of the request log; auto: text on a terminal, JSON otherwise"""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("max_choices", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("body_seconds", "request_seconds", "keep_alive_seconds"):
            if not 0 < getattr(self, name) < 1e7:
                raise ConfigError(f"{name} must be above 0 and below 10,000,000, got {getattr(self, name)}")
        if self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds must be 0 or more, got {self.drain_seconds}")
        if not all(self.served_model_name):
            raise ConfigError("served_model_name must not be empty", hint="leave it out to use the target's name")
