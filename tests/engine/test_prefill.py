"""What prefill leaves in the memories does not depend on the pieces in which a prompt was run."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.model_families import sequential
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.outputs import Update
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.scheduling.prefill_pace import PrefillPace
from peagle.targets.hf import HFTarget
from peagle.worker import runner

PROMPT = random.Random(1).choices(range(3, 260), k=40)
NUM_DRAFT_TOKENS = 4


def drafter_for(target: HFTarget, method: str) -> Drafter:
    drafter = tiny_drafter(target)
    return drafter if method == "p-eagle" else sequential(drafter, target)


def drafter_keys(method: str, prefill_tokens: int) -> list[Tensor]:
    """The drafter's keys of the prompt's tokens, layer by layer, after its prefill."""
    target = tiny_target(num_layers=4)
    config = EngineConfig(page_size=8, prefill_tokens=prefill_tokens, max_batch=2)
    engine = Engine(target, drafter_for(target, method), NUM_DRAFT_TOKENS, config)
    engine.add(PROMPT, SamplingParams(max_tokens=4))
    while not engine.stats().num_output_tokens:
        engine.step()
    (request,) = engine.scheduler.running
    pages = request.pages[: len(PROMPT) // 8]
    keys = [key[pages].flatten(0, 1)[1:].clone() for key, _ in engine.runner.kv_cache.drafter_memory]
    engine.close()
    return keys


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_chunks_leave_the_drafter_what_one_pass_does(method: str) -> None:
    for whole, pieces in zip(drafter_keys(method, 2048), drafter_keys(method, 16), strict=True):
        torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)


def test_products_are_packed_for_the_most_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    pack = runner.pack_models
    monkeypatch.setattr(runner, "pack_models", lambda *arguments: asked.append(arguments[2:]) or pack(*arguments))
    target = tiny_target(num_layers=4)
    Engine(target, tiny_drafter(target), NUM_DRAFT_TOKENS, EngineConfig(max_batch=3)).close()
    Engine(target, None, 0, EngineConfig(max_batch=3)).close()
    assert asked == [(5, 24), (3, 3)], "a draft pass reads K accepted tokens and K placeholders of each request"


def test_the_first_token_leaves_before_its_drafts_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(num_layers=4)
    engine = Engine(target, tiny_drafter(target), NUM_DRAFT_TOKENS, EngineConfig(page_size=8))
    monkeypatch.setattr(PrefillPace, "num_tokens", 2 * len(PROMPT))  # both prompts in one pass
    events: list[str] = []
    drafting = engine.runner.prefill.drafting
    assert drafting is not None
    run_layers = drafting._run_layers
    monkeypatch.setattr(drafting, "_run_layers", lambda batch: events.append("drafter") or run_layers(batch))
    engine.add(PROMPT, SamplingParams(max_tokens=4), on_update=lambda update: events.append("token"))
    engine.add(PROMPT[::-1], SamplingParams(max_tokens=1), on_update=lambda update: events.append("only token"))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    engine.close()
    assert events[:3] == ["token", "only token", "drafter"]


def test_on_a_cpu_a_long_prompt_does_not_stall_the_streams_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(num_layers=4)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    long = random.Random(2).choices(range(3, 260), k=120)
    alone = [
        tuple(token_id for step in decode(target, prompt, params) for token_id in step.token_ids)
        for prompt in (PROMPT, long)
    ]
    engine = Engine(target, tiny_drafter(target), NUM_DRAFT_TOKENS, EngineConfig(page_size=8))
    assert engine.pace is not None
    launch, sizes = engine.runner.launch, []
    monkeypatch.setattr(engine.runner, "launch", lambda plan: sizes.append(plan.num_prompt_tokens) or launch(plan))
    monkeypatch.setattr(PrefillPace, "num_tokens", 16)

    def answer(prompts: list[list[int]], on_update: Callable[[Update], None] | None) -> list[tuple[int, ...]]:
        sizes.clear()
        engine.reset()  # no pages to reuse
        outputs, waiting = {}, list(prompts)
        while waiting or engine.has_work:
            if waiting:  # one per step, so the second finds the first decoding
                engine.add(waiting.pop(0), params, request_id=str(len(waiting)), on_update=on_update)
            outputs |= {output.request_id: output for output in engine.step()}
        return [outputs[name].outputs[0].token_ids for name in sorted(outputs, reverse=True)]

    assert answer([long], lambda _: None) == alone[1:]
    assert sizes[0] == 120, "nothing else runs"
    assert answer([PROMPT, long], lambda _: None) == alone
    assert sizes[:9] == [40, *[16] * 7, 8]
    assert answer([PROMPT, long], None) == alone
    assert sizes[:2] == [40, 120], "nobody follows the answers"
    engine.close()


def test_the_engine_times_its_prefill_passes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(num_layers=4)
    engine = Engine(target, tiny_drafter(target), NUM_DRAFT_TOKENS, EngineConfig(page_size=8, prefill_tokens=30))
    observed: list[tuple[int, float]] = []
    monkeypatch.setattr(PrefillPace, "observe", lambda _, *values: observed.append(values))
    engine.add(PROMPT, SamplingParams(max_tokens=4))
    while engine.has_work:
        engine.step()
    engine.close()
    assert [num_tokens for num_tokens, _ in observed] == [30, 10] and all(seconds > 0 for _, seconds in observed)
