"""The recommendation follows from the cells of a sweep, by hand calculation."""

import pytest

from peagle.tuning.recommend import at, curves_of, place_of, recommend
from peagle.tuning.settings import settings_of
from peagle.tuning.shown import lines_of

PLACES = (1, 8, 32)


def cells(speeds, tpot=None, tokens=20):
    """Cells by (method, draft tokens) and concurrency; the time per token is concurrency over speed unless given."""
    found = []
    for (method, depth), own in speeds.items():
        label = "plain" if method == "none" else method if depth is None else f"{method} K={depth}"
        for places, speed in zip(PLACES, own, strict=True):
            ms = (tpot or {}).get((label, places), 1e3 * places / speed)
            found.append(
                {
                    "method": method,
                    "num_draft_tokens": depth,
                    "label": label,
                    "concurrency": places,
                    "output_tokens_per_second": speed,
                    "num_output_tokens": 10 * tokens,
                    "num_requests": 10,
                    "time_per_output_token_ms": {"mean": ms, "p50": ms, "p95": 1.5 * ms, "p99": 2 * ms},
                    "ttft_ms": {"mean": 5.0, "p50": 5.0, "p95": 9.0, "p99": 9.0},
                    "acceptance_length": None if method == "none" else 2.5,
                    "per_position": None if method == "none" else [0.8, 0.7],
                }
            )
    return found


PLAIN = ("none", 0)
AUTO, K3, K7 = (("p-eagle", depth) for depth in (None, 3, 7))


def test_the_setting_that_is_fastest_over_the_whole_load_is_chosen():
    found = recommend(cells({PLAIN: (100, 400, 800), K3: (180, 600, 900), K7: (250, 500, 600)}))
    # geometric means: plain 317.5, K=3 459.8, K=7 421.7
    assert (found["label"], found["method"], found["num_draft_tokens"]) == ("p-eagle K=3", "p-eagle", 3)
    assert found["max_batch"] == 32 and found["vllm"] == {"method": "p-eagle", "num_draft_tokens": 3}
    assert found["expected"] == {
        "concurrency": 32,
        "output_tokens_per_second": 900.0,
        "tpot_p50_ms": pytest.approx(32e3 / 900),
        "tpot_p99_ms": pytest.approx(64e3 / 900),
        "ttft_p50_ms": 5.0,
        "ttft_p99_ms": 9.0,
        "acceptance_length": 2.5,
    }
    rows = found["by_concurrency"]
    assert [(row["output_tokens_per_second"], row["fastest"]) for row in rows] == [
        (180, "p-eagle K=7"), (600, "p-eagle K=3"), (900, "p-eagle K=3"),
    ]  # fmt: skip
    assert found["stops_paying_at_concurrency"] is None, "drafting pays everywhere"


def test_the_engines_own_choice_goes_before_a_number_that_is_no_faster():
    speeds = {PLAIN: (100, 400, 800), AUTO: (246, 600, 890), K7: (250, 600, 900)}
    assert recommend(cells(speeds))["label"] == "p-eagle"
    assert recommend(cells(speeds))["vllm"]["num_draft_tokens"] == 7, "vLLM takes a number"
    assert recommend(cells(speeds | {AUTO: (230, 560, 850)}))["label"] == "p-eagle K=7"


def test_without_a_gain_nothing_is_drafted():
    found = recommend(cells({PLAIN: (100, 400, 800), AUTO: (101, 405, 805), K3: (90, 300, 400)}))
    assert (found["label"], found["num_draft_tokens"]) == ("plain", 0)
    assert found["vllm"] == {"method": "none", "num_draft_tokens": 0}


def test_vllm_gets_a_number_for_the_same_drafter():
    eagle3 = ("eagle3", 5)
    found = recommend(cells({PLAIN: (100, 400, 800), AUTO: (300, 700, 1200), K3: (150, 500, 900), eagle3: (200,) * 3}))
    assert found["label"] == "p-eagle" and found["vllm"] == {"method": "p-eagle", "num_draft_tokens": 3}


def test_drafting_stops_paying_where_the_gain_is_zero():
    found = recommend(cells({PLAIN: (100, 400, 800), AUTO: (200, 500, 640)}))
    # savings 0.5, 0.2 and -0.25: zero at 0.2 / 0.45 of the way from 8 to 32, on a log scale
    assert found["stops_paying_at_concurrency"] == pytest.approx(8 * 4 ** (0.2 / 0.45), abs=0.01)


def test_a_batch_that_adds_no_throughput_is_not_asked_for():
    assert recommend(cells({PLAIN: (100, 300, 300), AUTO: (200, 505, 510)}))["max_batch"] == 8


def test_a_limit_on_the_time_per_token_bounds_the_batch_and_decides_the_setting():
    speeds = {PLAIN: (100, 400, 800), AUTO: (200, 500, 900)}  # p99: 20, 40, 80 and 10, 32, 71 ms
    found = recommend(cells(speeds), max_tpot=35)
    assert (found["label"], found["max_batch"], found["is_within_limit"]) == ("p-eagle", 8, True)
    assert found["expected"]["output_tokens_per_second"] == 500
    none = recommend(cells(speeds), max_tpot=1)
    assert none["is_within_limit"] is False and none["max_batch"] == 1


def test_a_request_rate_is_served_where_the_tokens_per_second_suffice():
    speeds = {PLAIN: (100, 400, 800), AUTO: (200, 600, 900)}
    found = recommend(cells(speeds, tokens=20), request_rate=20)
    assert found["needed_tokens_per_second"] == 400 and found["keeps_up"] and found["label"] == "p-eagle"
    # half-way from 200 at 1 to 600 at 8, on a log scale
    assert found["expected"]["concurrency"] == pytest.approx(8**0.5, abs=0.01)
    assert found["expected"]["output_tokens_per_second"] == pytest.approx(400)
    assert found["expected"]["tpot_p50_ms"] == pytest.approx((5 + 8e3 / 600) / 2, abs=1e-3)
    assert found["max_batch"] == 32, "room for bursts"
    assert recommend(cells(speeds), request_rate=1000)["keeps_up"] is False
    assert recommend(cells(speeds), request_rate=1)["expected"]["concurrency"] == 1


def test_cells_that_failed_and_anchors_do_not_count():
    failed = cells({PLAIN: (100, 400, 800)})[2] | {"output_tokens_per_second": None}
    anchor = failed | {"method": "transformers eager", "label": "transformers eager", "output_tokens_per_second": 1e6}
    assert list(curves_of([failed, anchor])) == [] and recommend([failed, anchor]) is None


def test_figures_at_the_ends_are_those_measured():
    (curve,) = curves_of(cells({PLAIN: (100, 400, 800)})).values()
    assert place_of(curve, 50) == 1 and place_of(curve, 400) == 8 and place_of(curve, 1e9) == 32
    assert at(curve, 0.5)["concurrency"] == 1 and at(curve, 100)["concurrency"] == 32


def test_rounded_weights_are_recommended_only_if_they_are_faster():
    def rounded(form, factor):
        speeds = {PLAIN: (100, 400, 800), AUTO: (200, 500, 900)}
        found = cells({name: tuple(factor * each for each in own) for name, own in speeds.items()})
        return [cell | {"quantize": form, "label": f"{cell['label']}, {form}"} for cell in found]

    own = cells({PLAIN: (100, 400, 800), AUTO: (200, 500, 900), K3: (150, 450, 700)})
    found = recommend([*own, *rounded("int8", 1.01), *rounded("fp8", 0.9)])
    assert found["label"] == "p-eagle" and found["quantize"] is None, "a gain of 1% is none"
    found = recommend([*own, *rounded("int8", 1.2), *rounded("fp8", 1.5)])
    assert found["label"] == "p-eagle, fp8" and (found["quantize"], found["num_draft_tokens"]) == ("fp8", None)
    assert found["vllm"] == {"method": "p-eagle", "num_draft_tokens": 3}, "vLLM has the weights as they are"
    assert found["by_concurrency"][0]["plain_tokens_per_second"] == 100 and found["stops_paying_at_concurrency"] is None
    assert settings_of(found, "t", None).native.quantize == "fp8"
    assert ", --quantize fp8." in lines_of(found)[0] and "those of the quantized model" in lines_of(found)[1]
