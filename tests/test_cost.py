"""Cost: the table follows from the JSON by hand calculation, and no number comes without its price and date."""

import json
from datetime import date

import pytest

from peagle.cost import CostOptions, MeasuredCost, cost_lines, cost_of
from peagle.errors import ConfigError
from peagle.targets.prices import Price, known_prices, price_of

PRICE = Price(4.50, "2026-07-22", "a list", "one-h200", "H200", 1)
SPEEDS = {("none", 1): 100.0, ("none", 8): 600.0, ("none", 64): 3000.0}
SPEEDS |= {("p-eagle", 1): 250.0, ("p-eagle", 8): 900.0, ("p-eagle", 64): 2500.0}


def document(accelerator="NVIDIA H200"):
    cells = [
        {
            "label": "plain" if method == "none" else method,
            "method": method,
            "concurrency": concurrency,
            "output_tokens_per_second": speed,
            "time_per_output_token_ms": {"p95": 1e3 * concurrency / speed},
            "acceptance_length": None if method == "none" else 3.0,
            "speedup": speed / SPEEDS["none", concurrency],
        }
        for (method, concurrency), speed in SPEEDS.items()
    ]
    return {"cells": cells, "provenance": {"hardware": {"accelerator": accelerator}}}


def test_the_table_follows_from_the_json_by_hand_calculation():
    cost = json.loads(json.dumps(cost_of(document(), PRICE, CostOptions(max_tpot=10, training_hours=0.25))))
    assert cost["price"] == {
        "usd_per_hour": 4.5,
        "date": "2026-07-22",
        "source": "a list",
        "instance": "one-h200",
        "gpu": "H200",
        "num_gpus": 1,
        "charged_usd_per_hour": 4.5,
    }
    # 4.50 dollars buy 3,600 s. At 100 tokens/s that is 360,000 tokens: 12.50 dollars a million; at 250, 5.00.
    first, second, third = cost["by_concurrency"]
    assert (first["plain_usd_per_million"], first["drafted_usd_per_million"], first["saving"]) == (12.5, 5.0, 0.6)
    assert (second["plain_usd_per_million"], second["drafted_usd_per_million"]) == (2.083333, 1.388889)
    assert (third["plain_usd_per_million"], third["drafted_usd_per_million"], third["saving"]) == (0.416667, 0.5, -0.2)
    # 2.5x at 3 tokens per step: a speculative step costs 1.2 plain steps, so 1.2 tokens per step break even.
    assert [row["break_even_acceptance_length"] for row in cost["by_concurrency"]] == [1.2, 2.0, 3.6]
    # The saving falls from 1/3 to -1/5 between 8 and 64: 5/8 of three doublings.
    assert cost["break_even_concurrency"] == pytest.approx(8 * 2 ** (3 * 0.3333 / 0.5333), abs=0.01)
    # Time per token at p95: plain 10, 13.3 and 21.3 ms; with drafts 4, 8.9 and 25.6 ms.
    limit = cost["within_limit"]
    assert (limit["plain"]["concurrency"], limit["plain"]["usd_per_million"]) == (1, 12.5)
    assert (limit["drafted"]["concurrency"], limit["drafted"]["usd_per_million"]) == (8, 1.388889)
    # A quarter of an hour costs 1.125 dollars; 7.50 are saved per million tokens at concurrency 1.
    assert cost["training"]["usd"] == 1.125
    tokens = {each["concurrency"]: each["num_tokens"] for each in cost["training"]["earned_back_after_tokens"]}
    assert tokens == {1: 150_000, 8: pytest.approx(1_620_000, rel=1e-5), 64: None}


def test_every_line_of_text_stands_under_the_price_its_source_and_its_date():
    lines = cost_lines(cost_of(document(), PRICE, CostOptions(max_tpot=3, training_hours=1)))
    assert lines[0] == "price: $4.50 per hour for one-h200 (a list, 2026-07-22)"
    assert lines[1] == (
        "concurrency 1: $12.50 per million output tokens plain, $5.00 with p-eagle (60% cheaper); pays above an "
        "acceptance length of 1.20, measured 3.00"
    )
    assert "(20% dearer)" in lines[3] and "drafting stops paying at about 29.3 concurrent" in lines[4]
    assert "within 3 ms per output token (p95), plain: no measured setting" in lines
    assert lines[-1] == (
        "training took 1 hours and cost $4.50, earned back after 600,000 tokens at concurrency 1, "
        "after 6.48 million tokens at concurrency 8, never at concurrency 64"
    )
    assert cost_lines({}) == []


def test_one_gpu_of_an_instance_is_charged_for_the_engine_and_all_for_a_server():
    eight = Price(36.0, "2026-07-22", "a list", "eight-h200", "H200", 8)
    assert cost_of(document(), eight)["by_concurrency"][0]["plain_usd_per_million"] == 12.5
    row = {"output_throughput": 1000.0, "max_concurrency": 8, "p95_tpot_ms": 8.0}
    served = cost_of({"results": [row]}, eight)
    assert served["cells"][0]["usd_per_million"] == 10.0 and served["by_concurrency"] == []
    assert cost_lines(served)[1] == "server at concurrency 8: $10.00 per million output tokens"


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price):
    with pytest.raises(ConfigError, match="--price-per-hour must be above 0"):
        CostOptions(price).price(None)


def test_an_unknown_instance_and_a_missing_price_or_measurement_are_refused():
    with pytest.raises(ConfigError) as caught:
        price_of("ml.g6e.3xlarge")
    assert str(caught.value) == (
        "no price of the instance 'ml.g6e.3xlarge' is known\nhint: pass --price-per-hour; did you mean 'ml.g6e.xlarge'?"
    )
    with pytest.raises(ConfigError, match="--max-tpot needs a price"):
        CostOptions(max_tpot=5).price(None)
    with pytest.raises(ConfigError, match="--training-hours must be above 0, got 0"):
        CostOptions(4.0, training_hours=0)
    with pytest.raises(ConfigError, match="there is no measurement to compute a cost from"):
        cost_of({"cells": []}, PRICE)
    assert MeasuredCost().added_to(document())["cost"] is None
    assert MeasuredCost(4.5).added_to({"cells": []})["cost"] is None, "an interrupted sweep still prints its document"


def test_an_instance_with_another_gpu_is_refused():
    MeasuredCost(instance="ml.p5.4xlarge").check("NVIDIA H100 80GB HBM3")
    for gpu, shown in (("NVIDIA L40S", "NVIDIA L40S"), (None, "a CPU")):
        with pytest.raises(ConfigError, match=f"ml.g6.xlarge has L4 GPUs, but this was measured on {shown}"):
            MeasuredCost(instance="ml.g6.xlarge").check(gpu)
    MeasuredCost(0.5).check(None)


def test_the_listed_prices_have_a_source_and_a_day_that_is_past():
    for name, price in known_prices().items():
        assert price.instance == name and price.source and price.gpu and price.num_gpus >= 1
        assert date(2026, 1, 1) <= date.fromisoformat(price.date) <= date.today()
    given = price_of("ml.g6.12xlarge", 3.0)
    assert (given.usd_per_hour, given.usd_per_gpu_hour, given.source) == (3.0, 0.75, "given with --price-per-hour")
