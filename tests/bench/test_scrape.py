"""Prometheus' text format, percentiles of histograms, and acceptance between two scrapes."""

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from peagle.bench.scrape import Histogram as ReadHistogram
from peagle.bench.scrape import Scrape, Speculation, gained

SPEC = "vllm:spec_decode_num_"


def spec_text(num_drafts, num_tokens, num_accepted, per_position, model="m"):
    lines = [
        f'{SPEC}drafts_total{{engine="0",model_name="{model}"}} {num_drafts}',
        f'{SPEC}draft_tokens_total{{engine="0",model_name="{model}"}} {num_tokens}',
        f'{SPEC}accepted_tokens_total{{engine="0",model_name="{model}"}} {num_accepted}',
    ]
    for position, count in enumerate(per_position):
        lines.append(f'{SPEC}accepted_tokens_per_pos_total{{model_name="{model}",position="{position}"}} {count}')
    return "\n".join(lines)


def test_what_the_client_library_writes_is_read_back():
    registry = CollectorRegistry()
    Counter("vllm:a", "what", ["x"], registry=registry).labels('odd "name", with {braces} \\ and\nlines').inc(3)
    Gauge("vllm:b", "what", registry=registry).set(1e-7)
    times = Histogram("vllm:c_seconds", "what", registry=registry, buckets=(0.1, 1.0))
    for seconds in (0.05, 0.5, 0.6, 7.0):
        times.observe(seconds)
    found = Scrape.parse(generate_latest(registry).decode())
    assert found.by_label("vllm:a_total", "x") == {'odd "name", with {braces} \\ and\nlines': 3.0}
    assert found.total("vllm:b") == 1e-7
    histogram = found.histogram("vllm:c_seconds")
    assert histogram is not None and histogram.count == 4 and histogram.sum == pytest.approx(8.15)
    assert histogram.buckets == ((0.1, 1.0), (1.0, 3.0), (math.inf, 4.0))


def test_special_values_and_times_are_read_and_other_text_is_no_scrape():
    found = Scrape.parse("# HELP a b\n\na 1\nc NaN\nd +Inf\ne 1 1700000000\n")
    assert found.total("a") == 1 and math.isnan(found.total("c")) and found.total("d") == math.inf
    assert found.total("e") == 1, "a time after the value is allowed"
    assert found.total("nothing") is None and found.histogram("nothing") is None and not Scrape.parse("<html>")


def test_samples_of_several_engines_are_added_up():
    found = Scrape.parse(
        'r{engine="0"} 2\nr{engine="1"} 3\nh_bucket{engine="0",le="1.0"} 1\nh_bucket{engine="1",le="1.0"} 1'
    )
    assert found.total("r") == 5 and found.largest("r") == 3
    assert found.histogram("h").buckets == ((1.0, 2.0),)


def test_first_name_that_is_there_counts():
    found = Scrape.parse("old 1")
    assert found.total("new", "old") == 1 and found.largest("new", "old") == 1 and found.total("new") is None


@pytest.mark.parametrize(("percent", "expected"), [(0, 0.0), (25, 0.5), (50, 1.0), (75, 3.0), (90, 4.2), (100, 5.0)])
def test_percentiles_are_those_of_histogram_quantile(percent, expected):
    histogram = ReadHistogram(((1.0, 10.0), (5.0, 20.0), (math.inf, 20.0)), 0.0)
    assert histogram.percentile(percent) == pytest.approx(expected)


def test_percentiles_at_the_edges():
    assert ReadHistogram(((1.0, 0.0), (math.inf, 0.0)), 0.0).percentile(50) is None
    assert ReadHistogram(((1.0, 0.0), (math.inf, 4.0)), 0.0).percentile(50) == 1.0, "above the last limit: that limit"
    empty_first = ReadHistogram(((1.0, 0.0), (2.0, 0.0), (4.0, 8.0), (math.inf, 8.0)), 0.0)
    assert empty_first.percentile(50) == 3.0 and empty_first.percentile(0) == 2.0


def test_difference_of_histograms_is_what_was_added():
    before = ReadHistogram(((1.0, 10.0), (math.inf, 10.0)), 5.0)
    after = ReadHistogram(((1.0, 10.0), (math.inf, 14.0)), 45.0)
    added = after.minus(before)
    assert (added.count, added.sum, added.percentile(50)) == (4.0, 40.0, 1.0)
    assert after.minus(None) == after and after.minus(ReadHistogram(((2.0, 1.0), (math.inf, 1.0)), 1.0)) == after


def test_acceptance_between_two_scrapes_is_that_of_vllm():
    before = Scrape.parse(spec_text(10, 30, 12, [6, 4, 2]))
    after = Scrape.parse(spec_text(30, 90, 48, [22, 15, 11]))
    found = Speculation.between(before, after)
    assert found == Speculation(20, 60, 36, (0.8, 0.55, 0.45))
    assert found.report() == {
        "spec_decode_acceptance_rate": 60.0,
        "spec_decode_acceptance_length": 2.8,
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 60,
        "spec_decode_accepted_tokens": 36,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.55, 0.45],
    }


def test_positions_are_in_order_of_their_numbers():
    found = Speculation.between(Scrape(), Scrape.parse(spec_text(10, 120, 55, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0])))
    assert found.per_position == (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0)


def test_nothing_drafted_is_none_and_not_zero():
    same = Scrape.parse(spec_text(10, 30, 12, [6, 4, 2]))
    assert Speculation.between(same, same) is None and Speculation.between(Scrape(), Scrape.parse("a 1")) is None


def test_growth_of_a_counter_that_is_not_there_is_none():
    assert gained(Scrape.parse("a 1"), Scrape.parse("a 3"), "a") == 2
    assert gained(Scrape(), Scrape.parse("a 3"), "a") == 3 and gained(Scrape(), Scrape(), "a") is None
