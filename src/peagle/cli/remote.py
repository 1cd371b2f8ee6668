"""Options of commands that talk to a server."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from peagle.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "PEAGLE_API_KEY"


@dataclass(frozen=True)
class KeyArguments:
    """The API key, which is never an argument: everybody on the machine could read that."""

    api_key_file: Path | None = None
    """file whose first line is the server's API key; lines with # are left out"""
    api_key_variable: str = KEY_VARIABLE
    """environment variable that has it, for example OPENAI_API_KEY"""

    def read(self) -> str | None:
        """The key of the file, else of the environment, else none."""
        if self.api_key_file is None:
            key = os.environ.get(self.api_key_variable, "").strip()
            if not key and self.api_key_variable != KEY_VARIABLE:
                raise ConfigError(f"--api-key-variable {self.api_key_variable}: it is not set, or empty")
            return _printable(key, self.api_key_variable) or None
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the API key in {self.api_key_file} cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ConfigError(f"{self.api_key_file} has no API key", hint="write it on the first line")
        return _printable(keys[0], str(self.api_key_file))


def _printable(key: str, where: str) -> str:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"the API key of {where} has characters that no header may have")
    return key


KeyOptions = Annotated[KeyArguments, tyro.conf.OmitArgPrefixes]
