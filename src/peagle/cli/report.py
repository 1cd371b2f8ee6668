"""Write a report, HTML or Markdown, from the JSON of `peagle bench`, `bench serve`, `tune`, `lossless` and `eval`.

The HTML file has its styles and charts inside and needs no network. Several results make one report.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from peagle.console.arguments import parse
from peagle.errors import ConfigError
from peagle.report.build import check_report, read_document, write_report


@dataclass(frozen=True)
class Arguments:
    results: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RESULT.json ...")] = ()
    """files with what --json printed"""
    output: Path = Path("report.html")
    """the file to write, .html or .md"""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "report", argv)
    if not arguments.results:
        raise ConfigError("no results", hint="write one with `peagle bench ... --json > bench.json`")
    output = arguments.output.expanduser()
    check_report("--output", output)
    write_report([read_document(path) for path in arguments.results], output)
    print(output)
    return 0
