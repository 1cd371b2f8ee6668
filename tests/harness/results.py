"""Results as `--json` of the commands that measure prints them, with figures that are easy to check."""

import json

from peagle.bench.cells import Answer, Cell, CellResult, Comparison, StepSplit
from peagle.bench.report import document_of
from peagle.bench.verdict import best_by_concurrency, sweep_verdict
from peagle.cost import MeasuredCost
from peagle.decoding.acceptance import Acceptance
from peagle.provenance import provenance

SPEEDS = {("none", 0): {1: 100.0, 8: 600.0}, ("p-eagle", 4): {1: 250.0, 8: 900.0}}


def sweep(**facts):
    def result(method, depth, concurrency, speed):
        seconds = concurrency / speed
        answers = [Answer(index, (1,) * 10, 0.01 * (1 + index), seconds) for index in range(4)]
        drafted = Acceptance(100, (80, 60, 40, 20)) if depth else None
        split = StepSplit(0.004, 0.0038, 0.0028 if depth else 0.0038, 0.001 if depth else None)
        return CellResult(
            Cell(method, depth, concurrency),
            answers,
            40 / speed,
            speed,
            drafted,
            split,
            comparison=Comparison(4, (), 0.1),
        )

    results = [result(*name, places, speed) for name, by in SPEEDS.items() for places, speed in by.items()]
    known = {"workload": "questions", "num_prompts": 4, "target": "tiny", "dtype": "bfloat16", "device": "cuda:0"}
    known |= {"max_tokens": 10, "temperature": 0.0, "drafters": {"p-eagle": "my-drafter"}}
    document = document_of(results, **known, provenance=provenance("NVIDIA H200")) | facts
    document |= {
        "verdict": sweep_verdict(document["cells"]),
        "recommended": best_by_concurrency(document["cells"]),
    }
    cost = MeasuredCost(instance="gpu-h200-sxm_1gpu-16vcpu-200gb", training_hours=1)
    return json.loads(json.dumps(cost.added_to(document)))


def load(speeds=((1, 300.0), (8, 1500.0)), *, is_drafted=True):
    def row(concurrency, speed):
        spreads = {
            f"{figure}_{name}_ms": value * concurrency
            for name, value in (("ttft", 20.0), ("tpot", 2.0), ("itl", 3.0), ("e2el", 90.0))
            for figure in ("mean", "median", "std", "p5", "p25", "p75", "p90", "p95", "p99")
        }
        counts = {"num_prompts": 8, "completed": 8, "failed": 0, "request_throughput": 2.0, "request_goodput": None}
        drafts = {
            "spec_decode_acceptance_length": 2.5,
            "spec_decode_per_position_acceptance_rates": [0.7, 0.5, 0.3],
        }
        head = {"max_concurrency": concurrency, "request_rate": "inf", "output_throughput": speed}
        return head | counts | spreads | (drafts if is_drafted else {})

    return {
        "results": [row(*each) for each in speeds],
        "base_url": "http://127.0.0.1:8080",
        "model_id": "tiny",
        "workload": "questions",
        "temperature": 0.0,
        "provenance": provenance(),
    }


def proof(holds=True):
    comparison = {"name": "engine, greedy", "num_identical": 4, "num_answers": 4, "num_tokens": 192, "differences": []}
    comparison |= {"num_near_ties": 0, "largest_gap": None, "holds": holds}
    drawn = {"prompt": 0, "num_samples": 256, "statistic": 12.5, "p_value": 0.4, "control_p_value": 1e-9, "holds": True}
    return {
        "lossless": holds,
        "target": {"name": "tiny"},
        "comparisons": [comparison],
        "distributions": [drawn],
        "num_prompts": 4,
        "prompts": "questions",
        "acceptance_length": 2.5,
        "provenance": provenance(),
    }


def evaluation(workload, length):
    return {
        "workload": workload,
        "per_position": [0.8, 0.5],
        "acceptance_length": length,
        "num_drafts": 50,
        "by_length": {"text": {span: {"acceptance_length": 2.5, "num_drafts": 9} for span in ("0-127", "1024-2047")}},
        "num_tokens": 100,
        "verdict": "drafting can pay: it does",
        "method": "p-eagle",
        "target": "tiny",
        "provenance": provenance(),
    }
