"""The report: one file that needs nothing else, says what the JSON says, and can be read by everybody."""

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.results import evaluation, load, proof, sweep
from peagle.cli.main import run
from peagle.cost import MeasuredCost
from peagle.errors import ConfigError, MissingExtraError
from peagle.report.build import check_report, priced, read_document, report_of
from peagle.report.html import STYLE, html_of
from peagle.report.markdown import markdown_of
from peagle.report.pair import paired

HOSTILE = 'a"><script>alert(1)</script>|<b>'

DOCUMENTS = {
    "bench": [sweep()],
    "serve": [load()],
    "lossless": [proof()],
    "eval": [evaluation("questions", 2.3), evaluation("code", 3.1)],
    "all": [sweep(), load(), proof(), evaluation("code", 3.1)],
    "two sweeps": [sweep(), sweep(workload="code")],
}


class Page(HTMLParser):
    """What a browser would see: the elements with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    handle_startendtag = handle_starttag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, *names):
        return [attributes for tag, attributes in self.tags if tag in names]


@pytest.fixture(scope="module")
def page():
    report = report_of(DOCUMENTS["all"])
    few = [replace(each, charts=each.charts[:1]) for each in report.sections]  # a chart takes a tenth of a second
    return Page(html_of(replace(report, sections=few)))


def test_the_page_fetches_nothing_and_runs_nothing(page):
    assert not page.all("script", "link", "img", "iframe", "object", "embed", "image")
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{tag} has a handler"
            if name in ("src", "href", "xlink:href", "data", "action"):
                assert value.startswith("#"), f"{tag} refers to {value}"
            assert "url(" not in (value or "").replace("url(#", ""), f"{tag} refers to {value}"
    assert "url(" not in STYLE.read_text() and "@import" not in STYLE.read_text()


def test_the_page_can_be_read_without_seeing_it(page):
    assert page.all("html")[0]["lang"] == "en" and len(page.all("h1")) == 1 and len(page.all("main")) == 1
    assert len(page.all("table")) == len(page.all("caption")), "every table has a caption"
    assert all("scope" in each for each in page.all("th"))
    for picture in page.all("svg"):
        assert picture["role"] == "img"
        names = picture["aria-labelledby"].split()
        assert {each.get("id") for each in page.all("title", "desc")} >= set(names)
    ids = Counter(attributes["id"] for _, attributes in page.tags if attributes.get("id"))
    drawn = {name for name, count in ids.items() if count > 1}
    assert not drawn, f"ids occur twice: {sorted(drawn)[:5]}"
    names = Counter(each["aria-label"] for each in page.all("div") if each.get("role") == "region")
    assert max(names.values()) == 1, names.most_common(1)
    for scrolled in page.all("pre"):
        assert scrolled["tabindex"] == "0", "what scrolls can be reached with the keyboard"


def luminance(color):
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_and_curves_have_contrast_in_light_dark_and_print():
    blocks = re.findall(r":root \{([^}]*)\}", STYLE.read_text())
    assert len(blocks) == 3
    for block in blocks:
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        paper = luminance(colors["paper"])
        for name, color in colors.items():
            if name in ("paper", "grid", "line", "band"):
                continue
            pair = sorted((paper, luminance(color)))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, f"{name} is too faint"


def test_the_colors_of_charts_are_those_of_the_page(page):
    styles = [attributes.get("style") or "" for _, attributes in page.tags]
    fixed = {color for style in styles for color in re.findall(r"(?:fill|stroke): (#[0-9a-f]{3,6})", style)}
    assert not fixed, f"colors that do not follow the page: {fixed}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_summary_has_three_sentences(name):
    summary = report_of(DOCUMENTS[name]).summary
    assert len(re.split(r"(?<=[.])\s", summary)) == 3, summary


def test_the_report_of_a_sweep_says_what_its_json_says():
    text = markdown_of(report_of([sweep()]))
    assert text.startswith("# Speculative decoding of tiny on questions\n")
    for sentence in (
        "With drafts, tiny decodes 2.50 times as fast as plain decoding at concurrency 1 and 1.50 times at ",
        "concurrency 8, on NVIDIA H200.",
        "p-eagle K=4 emits 3.00 tokens per step on average, and 4 of 4 answers equal those of plain decoding.",
    ):
        assert sentence in text
    assert "cost $1.39 instead of $2.08, at $4.50 per hour on 2026-07-22." in text
    assert "| p-eagle K=4 | 8 | 4 | 900.0 | 1.50 | 112.5 | 3.00 | 0 of 4 |" in text
    assert "| p-eagle K=4 | 0.800 | 0.600 | 0.400 | 0.200 |" in text
    assert "| 1 | $12.50 | $5.00 | p-eagle K=4 | 60.0% | 1.20 | 3.00 |" in text
    assert "earned back after 600,000 tokens at concurrency 1, after 6.48 million tokens at concurrency 8." in text
    assert "| p-eagle K=4 | 1 | 4.000 | 3.800 | 2.800 | 1.000 | 0.200 |" in text
    assert "| drafters | my-drafter (p-eagle) |" in text and "```bash\n" in text


def test_acceptance_of_several_evaluations_stands_side_by_side_by_workload_and_length():
    old = evaluation("code", 3.1)
    del old["by_length"]
    text = markdown_of(report_of([evaluation("questions", 2.3), old]))
    assert "| questions | 100 | 50 | 2.300 |\n| code | 100 | 50 | 3.100 |" in text
    heads = "Acceptance length by tokens of the text:\n\n| workload | 0-127 | 1024-2047 |\n| --- | ---: | ---: |\n"
    assert f"{heads}| questions | 2.50 | 2.50 |\n\n" in text, "a result without lengths has no row"


def test_a_sweep_shows_acceptance_by_length_of_each_setting():
    document = sweep()
    by_length = {"text": {"0-127": {"acceptance_length": 3.2, "num_drafts": 9}}, "prompt": {}, "answer": {}}
    for cell in document["cells"][2:]:
        cell["by_length"] = by_length
    text = markdown_of(report_of([document]))
    assert (
        "Acceptance length by tokens of the text:\n\n| drafts of | 0-127 |\n| --- | ---: |\n| p-eagle K=4 | 3.20 |"
        in text
    )
    assert "by tokens of the prompt" not in text


def test_categories_of_a_sweep_and_of_a_load_have_a_table_and_a_chart():
    found = {"chat": 2.25, "code": 3.5}
    figures = {"num_requests": 4, "tokens_per_second_per_request": 80.0, "speedup": 2.0, "completed": 4}
    figures |= {"median_ttft_ms": 12.0, "median_tpot_ms": 3.0}
    by_category = {name: figures | {"acceptance_length": length} for name, length in found.items()}
    swept, loaded = sweep(), load()
    swept["cells"][2]["by_category"] = loaded["results"][0]["by_category"] = by_category
    for document, row in (
        (swept, "| code | 4 | 3.50 80.0 2.00x |"),
        (loaded, "| code | 4 | 80.0 | 12.0 | 3.00 | 3.50 |"),
    ):
        report = report_of([document])
        assert row in markdown_of(report)
        (drawn,) = (each for part in report.sections for each in part.charts if "category" in each.title)
        assert drawn.description == "chat 2.25, code 3.50."
        assert "3.50" in html_of(replace(report, sections=[replace(report.sections[0], charts=[drawn])]))


def test_latencies_are_shown_as_they_are_spread_at_the_highest_load():
    def spreads_of(document):
        charts = (each for part in report_of([document]).sections for each in part.charts)
        return {each.title: each for each in charts if "spread" in each.title}

    found = spreads_of(sweep())
    first = found["Time to first token, spread at concurrency 8"]
    assert "plain: p5 11.5, p25 17.5, p50 25, p75 32.5, p99 39.7; p-eagle K=4: " in first.description
    assert "Time per output token, spread at concurrency 8" in found
    report = report_of([sweep()])
    page = Page(html_of(replace(report, sections=[replace(report.sections[0], charts=[first])])))
    assert "ms; line: percentiles 5 to 99, bar: 25 to 75" in page.texts
    old = sweep()
    for cell in old["cells"]:
        for name in ("ttft_ms", "time_per_output_token_ms"):
            cell[name] = {key: value for key, value in cell[name].items() if key not in ("p5", "p25", "p75")}
    assert spreads_of(old) == {}, "results of earlier versions"


def test_a_server_with_drafts_and_one_without_are_compared():
    plain = load(((1, 100.0), (8, 1000.0), (32, 2000.0)), is_drafted=False)
    documents = paired([proof(), plain, load()])
    assert len(documents) == 2 and paired([plain]) == [plain]
    twice = [load(), load()]
    assert paired(twice) == twice, "both with drafts"
    other = load() | {"workload": "code"}
    assert paired([plain, other]) == [plain, other], "another workload"
    text = markdown_of(report_of(documents[1:]))
    for words in (
        "at http://127.0.0.1:8080 emits 3.00 times the tokens/s of plain decoding at concurrency 1 and 1.50 times at ",
        "At concurrency 1 a step with drafts emits 2.50 tokens on average; 0 of ",
        "| with drafts, concurrency 8 | 8 of 8 | 0 | 1.50 | 1,500.0 | 62.5 | 2.50 |",
        "| plain, concurrency 32 | 8 of 8 | 0 | - | 2,000.0 | 15.6 | - |",
    ):
        assert words in text, words
    assert text.count("## How to reproduce: bench serve") == 2
    charts = {each.title: each for part in report_of(documents[1:]).sections for each in part.charts}
    assert (
        "plain: 100 at 1, 1000 at 8, 2000 at 32; with drafts: 300 at 1, 1500 at 8." in charts["Throughput"].description
    )
    assert "with drafts: 3 at 1, 1.5 at 8." in charts["Speedup over plain decoding"].description
    documents[1]["results"][3]["spec_decode_acceptance_length"] = None
    assert "At concurrency 1 no draft was verified; 0 of " in markdown_of(report_of(documents[1:]))


def test_a_price_is_added_to_results_that_have_none():
    cost = MeasuredCost(price_per_hour=3.6)
    plain, drafted = load(((1, 100.0), (8, 1000.0)), is_drafted=False), load()
    text = markdown_of(report_of(priced(paired([plain, drafted]), cost)))
    assert "| 1 | $10.00 | $3.33 | with drafts | 66.7% | 0.83 | 2.50 |" in text, "3.6 / 3600 / 100 * 1e6, and / 300"
    assert "At concurrency 8 a million output tokens cost $0.667 instead of $1.00, at $3.60 per hour on 20" in text
    (swept,) = priced([sweep()], cost)
    assert swept["cost"]["price"]["charged_usd_per_hour"] == 3.6, "in place of the price it was measured with"
    assert priced([plain], MeasuredCost()) == [plain]
    with pytest.raises(ConfigError, match="no result has a speed"):
        priced([proof()], cost)
    with pytest.raises(ConfigError, match="has H100 GPUs, but this was measured on NVIDIA H200"):
        priced([sweep()], MeasuredCost(instance="ml.p5.4xlarge"))


def test_loads_show_how_their_latencies_are_spread():
    def spreads_of(document):
        charts = (each for part in report_of([document]).sections for each in part.charts)
        return {each.title: each.description for each in charts if "spread" in each.title}

    found = spreads_of(load())
    assert found.keys() == {
        f"{what}, spread" for what in ("Time to first token", "Time per output token", "Whole answer")
    }
    words = "concurrency 1: p5 20, p25 20, p50 20, p75 20, p99 20; concurrency 8: p5 160"
    assert words in found["Time to first token, spread"]
    old = load()
    for row in old["results"]:
        for name in ("ttft", "tpot", "e2el"):
            del row[f"p25_{name}_ms"]
    assert spreads_of(old) == {}, "results of earlier versions"


def test_on_a_cpu_a_step_has_no_empty_columns():
    document = sweep()
    for cell in document["cells"]:
        cell["step"] |= dict.fromkeys(("device_ms", "verify_ms", "draft_ms", "host_gap_ms"))
    text = markdown_of(report_of([document]))
    assert "| method | concurrency | step |\n" in text and "| p-eagle K=4 | 1 | 4.000 |\n" in text


def test_a_recommendation_stands_first_with_what_to_expect_of_it():
    document = sweep()
    figures = {"output_tokens_per_second": 900.0, "tpot_p50_ms": 8.9, "tpot_p99_ms": 12.0, "ttft_p50_ms": 25.0}
    figures |= {"ttft_p99_ms": 40.0, "acceptance_length": 3.0, "plain_tokens_per_second": 600.0, "concurrency": 8}
    row = figures | {"fastest": "p-eagle K=4", "fastest_tokens_per_second": 900.0}
    document |= {"tuned": {"label": "p-eagle K=4", "by_concurrency": [row]}, "verdict": "recommended: p-eagle K=4"}
    text = markdown_of(report_of([document]))
    assert text.index("## Recommendation") < text.index("## Throughput") and text.count("ecommended: p-eagle K=4.") == 1
    assert "## How to reproduce: tune" in text
    assert "| 8 | 900.0 | 600.0 | p-eagle K=4: 900.0 | 8.90 | 12.00 | 25.0 | 40.0 | 3.00 |" in text


def test_a_proof_beside_a_sweep_takes_the_second_sentence():
    summary = report_of([sweep(), proof()]).summary
    assert "Decoding with drafts is lossless: 2 of 2 comparisons with the target's own answers hold." in summary
    failed = markdown_of(report_of([proof(holds=False)]))
    assert "was not shown to be lossless: 1 of 2" in failed and "| FAILS |" in failed


def test_a_chart_s_description_has_its_values(page):
    words = "output tokens/s by concurrent requests. plain: 100 at 1, 600 at 8; p-eagle K=4: 250 at 1, 900 at 8."
    assert words in page.texts and len(page.all("svg")) == 9


def test_names_are_text_whatever_they_contain():
    hostile = sweep(target=HOSTILE, workload=HOSTILE)
    report = report_of([hostile])
    page = Page(
        html_of(replace(report, sections=[replace(each, charts=each.charts[:1]) for each in report.sections[-1:]]))
    )
    assert not page.all("script", "b") and any(HOSTILE in text for text in page.texts)
    assert '| target | a"><script>alert(1)</script>\\|<b> |' in markdown_of(report_of([hostile]))


def test_what_is_no_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "x.json"
    for text in ("", "{}", "[1]", "no json", '{"cells": 1'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is not a result of peagle"):
            read_document(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_document(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="nothing was measured"):
        report_of([sweep() | {"cells": []}])
    with pytest.raises(ConfigError, match=r"the name must end in .html, .md"):
        check_report("--report", tmp_path / "x.pdf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="--report"):
        check_report("--report", tmp_path / "x.html")
    check_report("--report", tmp_path / "x.md")


def test_the_command_writes_one_report_from_several_results(tmp_path, capsys):
    files = []
    for index, document in enumerate(DOCUMENTS["all"]):
        files.append(tmp_path / f"{index}.json")
        files[-1].write_text("a table before it\n" * index + json.dumps(document))
    output = tmp_path / "out.md"
    assert run(["report", *map(str, files), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_text().count("\n## ") == 14
    page = tmp_path / "out.html"
    assert run(["report", str(files[2]), "--output", str(page), "--markdown"]) == 0
    assert capsys.readouterr().out == f"{page}\n{output}\n" and output.read_text().startswith("# Losslessness")
    assert "<html" in page.read_text()
    assert run(["report", str(files[1]), "--output", str(output), "--price-per-hour", "3.6"]) == 0
    assert "| server | 8 | $0.667 |" in output.read_text()
    capsys.readouterr()
    assert run(["report", str(files[1]), "--price-per-hour", "0"]) == 2 and "above 0" in capsys.readouterr().err
    assert run(["report"]) == 2 and "no results" in capsys.readouterr().err
