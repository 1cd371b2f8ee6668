"""The dashboard in deploy/grafana: well formed, and every metric it asks for is in a scrape of a real server."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.local_server import running
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.bench.scrape import Scrape
from peagle.checkpoint.card import DrafterCard, TargetIdentity
from peagle.engine.llm import LLM

DIRECTORY = Path(__file__).parents[2] / "deploy" / "grafana"
DASHBOARD = DIRECTORY / "peagle.json"
METRIC = re.compile(r"\b(?:vllm|peagle):[a-zA-Z0-9_:]+")
NUM_DRAFT_TOKENS = 22
WIDTH = 24


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def llm_that_exports_everything() -> LLM:
    """With a card, so that there is a baseline, and with drafts deeper than 20."""
    target = tiny_target()
    drafter = tiny_drafter(target, num_draft_tokens=NUM_DRAFT_TOKENS)
    config = drafter.config
    drafter.card = DrafterCard(
        TargetIdentity.of(target),
        config.method,
        config.num_draft_tokens,
        config.max_length,
        config.aux_layer_ids,
        acceptance={"prompts": {"per_position": [0.5] * NUM_DRAFT_TOKENS}},
    )
    return LLM(target, drafter, NUM_DRAFT_TOKENS, max_batch=2, max_length=256, page_size=16)


@pytest.fixture(scope="module")
def scraped() -> Scrape:
    with running(llm_that_exports_everything) as served:
        ask = {"prompt": ["the user", "as the"], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        assert served.http.post("/v1/completions", json=ask).status_code == 200
        return Scrape.parse(served.http.get("/metrics").text)


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels, also those in collapsed rows."""
    return [each for panel in dashboard["panels"] for each in (panel, *panel.get("panels", ()))]


def expressions(dashboard: dict[str, Any]) -> list[str]:
    found = [target["expr"] for panel in panels_of(dashboard) for target in panel.get("targets", ())]
    return found + [each["definition"] for each in dashboard["templating"]["list"] if each["type"] == "query"]


def test_every_metric_of_the_dashboard_is_in_a_scrape_of_the_server(dashboard, scraped):
    names = {name for expression in expressions(dashboard) for name in METRIC.findall(expression)}
    assert len(names) > 25, "the expressions were not found"
    assert sorted(names - scraped.samples.keys()) == []


def test_every_metric_of_the_alarms_is_in_a_scrape_of_the_server(scraped):
    rules = [
        rule for group in yaml.safe_load((DIRECTORY / "alerts.yml").read_text())["groups"] for rule in group["rules"]
    ]
    names = {name for rule in rules for name in METRIC.findall(rule["expr"])}
    assert names and sorted(names - scraped.samples.keys()) == []
    assert all(rule["alert"] and rule["annotations"]["summary"] for rule in rules)


def test_what_the_issue_is_about_is_drawn(dashboard):
    text = " ".join(expressions(dashboard))
    for name in (
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "peagle:acceptance_drift",
        "peagle:acceptance_length_baseline",
        "peagle:drafting_pays",
        "peagle:drafting_gain",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_bucket",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
    ):
        assert name in text, name


def test_panels_have_ids_of_their_own_and_lie_beside_each_other(dashboard):
    panels = panels_of(dashboard)
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["w"] > 0 and place["h"] > 0 and place["x"] + place["w"] <= WIDTH, panel[
            "title"
        ]
    for one, other in itertools.combinations(panels, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), f"{one['title']} lies on {other['title']}"


def test_the_panel_of_deep_drafts_is_shown_where_it_is_asked_for(dashboard):
    """Grafana has no panel that depends on a metric; a collapsed row asks for nothing until it is opened."""
    deep = [
        panel for panel in panels_of(dashboard) if any("deep" in target["expr"] for target in panel.get("targets", ()))
    ]
    (row,) = (panel for panel in dashboard["panels"] if panel["type"] == "row" and panel["collapsed"])
    assert row["panels"] == deep and "more than 20" in row["title"]
    assert row["gridPos"]["y"] == max(panel["gridPos"]["y"] for panel in dashboard["panels"]), "below everything else"


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    def meet(start: str, size: str) -> bool:
        return one[start] < other[start] + other[size] and other[start] < one[start] + one[size]

    return meet("x", "w") and meet("y", "h")


def test_overlap_is_seen():
    assert overlap({"x": 0, "y": 0, "w": 12, "h": 8}, {"x": 11, "y": 7, "w": 1, "h": 1})
    assert not overlap({"x": 0, "y": 0, "w": 12, "h": 8}, {"x": 12, "y": 0, "w": 12, "h": 8})


def test_every_query_asks_the_data_source_that_the_reader_chose(dashboard):
    kinds = {each["name"]: each["type"] for each in dashboard["templating"]["list"]}
    assert kinds == {"datasource": "datasource", "model": "query", "instance": "query"}
    for panel in panels_of(dashboard):
        if panel["type"] == "row":
            continue
        assert panel["description"] and panel["datasource"]["uid"] == "${datasource}", panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references), panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\$(\w+)", target["expr"] + target["legendFormat"]))
            assert used <= {*kinds, "__rate_interval"}, f"{panel['title']}: no variable {used}"
            assert target["expr"].count("(") == target["expr"].count(")"), panel["title"]


def test_provisioning_names_files_that_are_there():
    provider = yaml.safe_load((DIRECTORY / "provisioning" / "dashboards.yml").read_text())["providers"][0]
    readme = (DIRECTORY / "README.md").read_text()
    assert provider["options"]["path"] in readme
    for name in yaml.safe_load((DIRECTORY / "prometheus.yml").read_text())["rule_files"]:
        assert (DIRECTORY / name).is_file()
    for name in re.findall(r"`([\w/]+\.(?:json|yml))`", readme):
        assert (DIRECTORY / name).is_file(), name
