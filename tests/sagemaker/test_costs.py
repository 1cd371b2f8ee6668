"""What `deploy sagemaker --dry-run` says about cost."""

import json

from harness.sagemaker_runtime import REGION, ROLE

WORDS = ("deploy", "sagemaker", "gpt-oss-20b", "--role", ROLE, "--region", REGION, "--dry-run")
SPEEDS = {"none": 100.0, "p-eagle": 250.0}


def document(accelerator):
    cells = [
        {
            "label": method,
            "method": method,
            "concurrency": 1,
            "output_tokens_per_second": speed,
            "time_per_output_token_ms": {"p95": 1e3 / speed},
            "acceptance_length": None if method == "none" else 3.0,
            "speedup": speed / SPEEDS["none"],
        }
        for method, speed in SPEEDS.items()
    ]
    return {"cells": cells, "provenance": {"hardware": {"accelerator": accelerator}}}


def test_a_dry_run_shows_what_the_endpoint_costs(peagle, tmp_path):
    shown = peagle(*WORDS, "--max-instances", 4)
    assert "cost: $4.20 per hour, $3,068.85 a month, at most $16.82 when scaled out; 1 x $4.20 per hour" in shown.err
    assert (
        "for ml.g7e.2xlarge (SageMaker training rates, us-east-1, as a public repository quotes them, 2026-06-19)"
        in shown.err
    )
    assert all(json.loads(line) for line in shown.out.splitlines()), "the calls stay alone on stdout"
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document("NVIDIA RTX PRO 6000 Blackwell Server Edition")))
    shown = peagle(*WORDS, "--measured", file, "--price-per-hour", 4.5)
    assert shown.status == 0 and "concurrency 1: $12.50 per million output tokens plain, $5.00" in shown.err
    file.write_text(json.dumps(document("NVIDIA H200")))
    refused = peagle(*WORDS, "--measured", file)
    assert refused.status == 2 and "has RTX PRO 6000 GPUs, but this was measured on NVIDIA H200" in refused.err
    file.write_text("{}")
    assert "is not a result of `peagle bench`" in peagle(*WORDS, "--measured", file).err
    unknown = peagle(*WORDS, "--instance", "ml.g6.24xlarge")
    assert unknown.status == 0 and "cost: no price of ml.g6.24xlarge is known" in unknown.err
