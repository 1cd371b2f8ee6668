"""Log-probabilities of a launch reach the host in one copy."""

from typing import Any

import pytest
import torch

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.engine.engine import Engine
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.worker.transfers import Transfers

PROMPTS = [[5, 6, 7], [9, 4], [11, 12, 13, 14]]


def test_a_launch_copies_its_logprobs_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(num_layers=4)
    engine = Engine(target, tiny_drafter(target), 3, EngineConfig(max_batch=4, page_size=8))
    copies: list[str] = []
    to, fetch, launch = torch.Tensor.to, Transfers.fetch, engine.runner.launch
    per_launch = []

    def counted_to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args and args[0] == "cpu":
            copies.append("to")
        return to(self, *args, **options)

    def counted_fetch(self: Transfers, source: torch.Tensor) -> torch.Tensor:
        copies.append("fetch")
        return fetch(self, source)

    def counted_launch(plan: Any) -> Any:
        copies.clear()
        result = launch(plan)
        per_launch.append((len(copies), len(result.passes)))
        return result

    monkeypatch.setattr(torch.Tensor, "to", counted_to)
    monkeypatch.setattr(Transfers, "fetch", counted_fetch)
    monkeypatch.setattr(engine.runner, "launch", counted_launch)
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(max_tokens=8, logprobs=index, prompt_logprobs=2 - index, ignore_eos=True))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.close()
    assert {tuple(len(each.top) for each in output.outputs[0].logprobs or ()) for output in outputs} == {
        (num_top,) * 8 for num_top in range(3)
    }
    assert all(num_copies <= num_passes + 1 for num_copies, num_passes in per_launch), per_launch
