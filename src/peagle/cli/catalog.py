"""List the models known by name: target, drafters, draft tokens, memory, hardware, license.

With a name: details of one model, and how to serve it. Add your own models in a TOML file (PEAGLE_CATALOG, or
catalog.toml in ~/.config/peagle; see docs/guides/models.md).
"""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from peagle.bench.report import print_document
from peagle.console.arguments import parse
from peagle.errors import ConfigError, nearest
from peagle.targets.catalog import entries, find, user_file
from peagle.targets.catalog_report import describe, details, overview


@dataclass(frozen=True)
class Arguments:
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None
    """catalog name, or Hugging Face id of a target"""
    json: bool = False
    """print one JSON document instead of a table"""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "catalog", argv)
    known = entries()
    document: dict[str, Any] = {"entries": [describe(each) for each in known], "file": str(user_file() or "") or None}
    shown = overview(known)
    if arguments.name is not None:
        entry = find(arguments.name)
        if entry is None:
            hint = nearest(arguments.name, [each.name for each in known])
            raise ConfigError(f"no {arguments.name!r} in the catalog", hint=hint)
        document, shown = describe(entry), details(entry)
    print_document(document, arguments.json, shown)
    return 0
