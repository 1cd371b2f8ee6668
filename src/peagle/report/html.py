"""A report as one HTML file: styles and charts are inside, nothing is fetched, and no script runs."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from peagle import __version__
from peagle.report.charts import svg_of
from peagle.report.parts import Report, Section, Table

STYLE = Path(__file__).with_name("report.css")


def html_of(report: Report) -> str:
    body = "\n".join(_section(section, index) for index, section in enumerate(report.sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.title)}</title>
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>{_title(report.title)}</h1>
<p class="summary">{_prose(report.summary)}</p>
</header>
<main>
{body}
</main>
<footer><p>Written by peagle {escape(__version__)}.</p></footer>
</body>
</html>
"""


def _title(text: str) -> str:
    """A title that may break inside a path."""
    return re.sub(r"([/+])", r"\1<wbr>", escape(text))


def _prose(text: str) -> str:
    """Text that does not break inside an option or a date."""
    return re.sub(r"(--[a-z][a-z-]*|\d{4}-\d\d-\d\d)", r'<span class="whole">\1</span>', escape(text))


def _section(section: Section, index: int) -> str:
    parts = [f'<section aria-labelledby="section-{index}">', f'<h2 id="section-{index}">{escape(section.title)}</h2>']
    parts += [f"<p>{_prose(paragraph)}</p>" for paragraph in section.text]
    if section.code is not None:
        parts.append(f'<pre tabindex="0"><code>{escape(section.code)}</code></pre>')
    if section.charts:
        figures = (
            f"<figure><figcaption>{escape(chart.title)}</figcaption>\n{svg_of(chart, f'{index}-{place}')}</figure>"
            for place, chart in enumerate(section.charts)
        )
        parts.append('<div class="charts">\n' + "\n".join(figures) + "\n</div>")
    parts += [_table(table, section.title) for table in section.tables]
    return "\n".join([*parts, "</section>"])


def _table(table: Table, section: str) -> str:
    head = "".join(_cell(text, "th", index, table, ' scope="col"') for index, text in enumerate(table.heads))
    rows = "\n".join(f"<tr>{_row(row, table)}</tr>" for row in table.rows)
    name = escape(f"{section}: {table.caption}")
    return "\n".join(
        [
            f'<div class="scroll" role="region" aria-label="{name}" tabindex="0"><table>',
            f"<caption><span>{escape(table.caption)}</span></caption>",
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>",
        ]
    )


def _row(row: Sequence[str], table: Table) -> str:
    first = _cell(row[0], "th", 0, table, ' scope="row"')
    return first + "".join(_cell(text, "td", index, table) for index, text in enumerate(row[1:], start=1))


def _cell(text: str, tag: str, index: int, table: Table, attributes: str = "") -> str:
    number = ' class="number"' if index >= table.num_left else ""
    return f"<{tag}{attributes}{number}>{escape(text)}</{tag}>"
