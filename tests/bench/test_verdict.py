"""What measurements mean, in words."""

import pytest

from peagle.bench.verdict import acceptance_verdict, best_by_concurrency, shortest_draft, sweep_verdict


def cell(method, concurrency, speedup, depth=None):
    label = "plain" if method == "none" else f"{method} K={depth}" if depth else method
    rates = None if method == "none" else [0.5]
    return {"method": method, "concurrency": concurrency, "speedup": speedup, "num_draft_tokens": depth,
            "label": label, "per_position": rates}  # fmt: skip


PLAIN = [cell("none", places, 1.0, 0) for places in (1, 8)]


@pytest.mark.parametrize(
    ("rates", "depth"),
    [([0.6, 0.3, 0.1, 0.01, 0.0], 3), ([0.5, 0.5, 0.5], 3), ([0.0, 0.0], 0), ([0.9], 1)],
)
def test_drafts_are_as_long_as_they_are_accepted(rates, depth):
    assert shortest_draft(rates) == depth


def test_acceptance_says_whether_it_is_enough():
    said = acceptance_verdict([0.1, 0.0], 50)
    assert said.startswith("drafting hardly pays") and "less than 1.10 times a plain one" in said
    said = acceptance_verdict([0.6, 0.3, 0.1, 0.01], 50)
    assert "less than 2.01 times a plain one" in said and "a chain of 3 keeps 95%" in said
    assert "nothing was drafted" in acceptance_verdict([0.0], 0)


def test_a_sweep_names_the_fastest_setting_and_where_it_pays():
    cells = [*PLAIN, cell("p-eagle", 1, 1.4, 2), cell("p-eagle", 1, 1.8, 4), cell("p-eagle", 8, 0.9, 4)]
    assert [each["num_draft_tokens"] for each in best_by_concurrency(cells)] == [4, 4]
    assert sweep_verdict(cells) == (
        "drafting pays at concurrency 1: 1.80x at concurrency 1, 0.90x at concurrency 8. "
        "With p-eagle K=4 it is fastest: use --num-draft-tokens 4"
    )
    assert sweep_verdict([*PLAIN, cell("p-eagle", 1, 1.5)]).endswith("leave --num-draft-tokens unset")
    said = sweep_verdict([*PLAIN, cell("p-eagle", 1, 0.8), cell("p-eagle", 8, 1.03)])
    assert said.startswith("drafting pays at concurrency 8: 0.80x at concurrency 1, 1.03x"), "not up to 8"


def test_a_sweep_without_a_gain_or_without_plain_decoding_says_so():
    said = sweep_verdict([*PLAIN, cell("p-eagle", 1, 0.8)])
    assert said == "drafting does not pay here: 0.80x at concurrency 1. Use --num-draft-tokens 0"
    assert sweep_verdict([cell("p-eagle", 1, None)]) == "add none to --methods to see whether drafting pays"
    assert sweep_verdict(PLAIN) is None
