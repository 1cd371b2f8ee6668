"""Write a report, HTML or Markdown, from the JSON of `peagle bench`, `bench serve`, `tune`, `lossless` and `eval`.

The HTML file has its styles and charts inside and needs no network. Several results make one report; `bench serve` of a
server with drafts and of one without are compared. A price adds the cost to results that were measured without one.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from peagle.console.arguments import parse
from peagle.cost import MeasuredCost
from peagle.errors import ConfigError
from peagle.report.build import check_report, priced, read_document, write_report
from peagle.report.pair import paired


@dataclass(frozen=True)
class Arguments:
    results: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RESULT.json ...")] = ()
    """files with what --json printed"""
    output: Path = Path("report.html")
    """the file to write, .html or .md"""
    markdown: bool = False
    """also write the Markdown beside the HTML file"""
    cost: MeasuredCost = field(default_factory=MeasuredCost)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "report", argv)
    if not arguments.results:
        raise ConfigError("no results", hint="write one with `peagle bench ... --json > bench.json`")
    output = arguments.output.expanduser()
    check_report("--output", output)
    documents = priced(paired([read_document(path) for path in arguments.results]), arguments.cost)
    for path in dict.fromkeys([output, output.with_suffix(".md")] if arguments.markdown else [output]):
        write_report(documents, path)
        print(path)
    return 0
