"""A report as Markdown, without its charts: the tables have their values."""

from peagle.report.parts import Report, Table


def markdown_of(report: Report) -> str:
    lines = [f"# {report.title}", "", report.summary, ""]
    for section in report.sections:
        lines += [f"## {section.title}", ""]
        for paragraph in section.text:
            lines += [paragraph, ""]
        if section.code is not None:
            lines += ["```bash", section.code, "```", ""]
        for table in section.tables:
            lines += [f"{table.caption}:", "", *_table(table), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table) -> list[str]:
    rule = ["---" if index < table.num_left else "---:" for index in range(len(table.heads))]
    rows = [table.heads, rule, *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
