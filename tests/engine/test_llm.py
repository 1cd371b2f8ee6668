"""`peagle.LLM`: what it takes, what it gives back, and that it leaves target and engine as they should be."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import peagle
from harness.model_families import sequential
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.card import DrafterCard, TargetIdentity
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.checks import check_drafts
from peagle.engine.llm import LLM
from peagle.engine.outputs import RequestOutput
from peagle.errors import CapacityError, ConfigError, EngineDeadError, RequestError, TargetError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import TREE_DEPTH, TREE_NODES, EngineConfig
from peagle.targets.hf import HFTarget
from peagle.tokenizer import render_chat

PROMPTS = [[5, 6, 7], list(range(20, 60)), [100]]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
K = 3


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(num_layers=4)


@pytest.fixture(scope="module")
def drafter(target: HFTarget) -> Drafter:
    return tiny_drafter(target)


@pytest.fixture(scope="module")
def reference(target: HFTarget) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Greedy answers by prompt, made before any engine has the target."""
    return {tuple(prompt): plain(target, prompt, PARAMS) for prompt in PROMPTS}


@pytest.fixture
def llm(target: HFTarget, drafter: Drafter, reference: object) -> Iterator[LLM]:
    with LLM(target, drafter, K, max_batch=4, page_size=8) as made:
        yield made
        assert not made.engine.has_work and made.engine.stats().num_pages_used == 0, "something is left behind"


def plain(target: HFTarget, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    return tuple(token for step in decode(target, prompt, params) for token in step.token_ids)


def ids(output: RequestOutput, index: int = 0) -> tuple[int, ...]:
    return output.outputs[index].token_ids


def test_lists_of_token_ids_are_answered_in_their_order(
    llm: LLM, reference: dict[tuple[int, ...], tuple[int, ...]]
) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_token_ids == tuple(prompt)
        (answer,) = output.outputs
        assert answer.token_ids == reference[tuple(prompt)]
        assert output.text == answer.text == llm.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert (answer.index, answer.finish_reason, answer.logprobs) == (0, "length", None)
        metrics = output.metrics
        assert metrics.first_token_at is not None and metrics.finished_at is not None
        assert metrics.arrived <= metrics.first_token_at <= metrics.finished_at
        assert metrics.acceptance.num_drafts > 0 and metrics.acceptance.acceptance_length >= 1


def test_one_prompt_of_either_kind_gives_a_list_of_one(llm: LLM) -> None:
    text = "the user"
    (by_text,) = llm.generate(text, PARAMS)
    (by_ids,) = llm.generate(llm.tokenizer(text)["input_ids"], PARAMS)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids and ids(by_text) == ids(by_ids)
    mixed = llm.generate([text, PROMPTS[0]], PARAMS)
    assert ids(mixed[0]) == ids(by_text)
    assert llm.generate([], PARAMS) == []


def test_the_default_parameters_are_the_usual_ones(llm: LLM) -> None:
    (output,) = llm.generate("the user")
    assert len(ids(output)) == SamplingParams().max_tokens or output.outputs[0].finish_reason == "stop"


def test_conversations_go_through_the_chat_template(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "the user"}]
    (one,) = llm.chat(messages, PARAMS)
    assert one.prompt_token_ids == tuple(render_chat(llm.tokenizer, messages))
    outputs = llm.chat([messages, messages[1:]], PARAMS)
    assert [output.prompt_token_ids for output in outputs] == [
        one.prompt_token_ids,
        tuple(render_chat(llm.tokenizer, messages[1:])),
    ]
    assert ids(outputs[0]) == ids(one)


def test_each_prompt_can_have_parameters_of_its_own(llm: LLM) -> None:
    params = [replace(PARAMS, max_tokens=number) for number in (1, 2, 9)]
    assert [len(ids(output)) for output in llm.generate(PROMPTS, params)] == [1, 2, 9]
    with pytest.raises(RequestError, match="3 prompts but 2 sampling parameters"):
        llm.generate(PROMPTS, params[:2])


def test_several_answers_are_those_of_consecutive_seeds(llm: LLM) -> None:
    params = replace(PARAMS, temperature=1.0, seed=7, n=3)
    (output,) = llm.generate([PROMPTS[1]], params)
    alone = [llm.generate([PROMPTS[1]], replace(params, seed=seed, n=1))[0] for seed in (7, 8, 9)]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert [ids(output, index) for index in range(3)] == [ids(each) for each in alone]
    assert len({ids(each) for each in alone}) == 3
    assert llm.engine.stats().num_finished == 4, "a request counts once, however many answers it wants"


@pytest.mark.parametrize("num_draft_tokens", [None, 0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_the_targets_own(
    target: HFTarget, drafter: Drafter, num_draft_tokens: int | None, temperature: float
) -> None:
    params = replace(PARAMS, logprobs=4, temperature=temperature, top_k=5, num_draft_tokens=num_draft_tokens)
    with LLM(target, drafter, K, max_batch=2) as llm:
        (output,) = llm.generate([PROMPTS[0]], params)
    (answer,) = output.outputs
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    text = torch.tensor([[*PROMPTS[0], *answer.token_ids]])
    logprobs_TV = target.forward(text).logits_BTV[0, len(PROMPTS[0]) - 1 :].float().log_softmax(-1)
    for position, (token_id, row) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        assert row.logprob == pytest.approx(float(logprobs_TV[position, token_id]), abs=1e-4)
        assert list(row.top.values()) == pytest.approx(logprobs_TV[position].topk(4).values.tolist(), abs=1e-4)
        assert not math.isnan(row.logprob)


def test_stop_strings_and_stop_tokens_end_answers(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[2]], replace(PARAMS, max_tokens=40))
    stop = whole.text[7:9]
    (cut,) = llm.generate([PROMPTS[2]], replace(PARAMS, max_tokens=40, stop=(stop, "nowhere to be found")))
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.outputs[0].finish_reason == "stop"
    assert ids(whole)[: len(ids(cut))] == ids(cut)
    token_id = ids(whole)[5]
    (cut,) = llm.generate([PROMPTS[2]], replace(PARAMS, max_tokens=40, stop_token_ids=(token_id,)))
    assert ids(cut) == ids(whole)[: ids(whole).index(token_id) + 1] and cut.outputs[0].finish_reason == "stop"


def test_one_request_can_do_without_drafts(llm: LLM) -> None:
    drafted, bare, fewer = llm.generate(
        [PROMPTS[1]] * 3, [PARAMS, replace(PARAMS, num_draft_tokens=0), replace(PARAMS, num_draft_tokens=1)]
    )
    assert ids(drafted) == ids(bare) == ids(fewer)
    assert drafted.metrics.acceptance.num_drafts > 0 and bare.metrics.acceptance.num_drafts == 0
    assert fewer.metrics.acceptance.accepted_per_position[1:] == (0,) * (K - 1), "one draft token has one position"
    with pytest.raises(RequestError, match="num_draft_tokens=4 exceeds the engine's 3"):
        llm.generate([PROMPTS[1]], replace(PARAMS, num_draft_tokens=4))


def test_a_refused_prompt_leaves_none_of_the_others_behind(
    llm: LLM, reference: dict[tuple[int, ...], tuple[int, ...]]
) -> None:
    for wrong, message in (([], "the prompt is empty"), ([999], "between 0 and 287"), ([5] * 600, "600 tokens")):
        with pytest.raises(RequestError, match=message):
            llm.generate([PROMPTS[0], wrong, PROMPTS[1]], PARAMS)
        assert not llm.engine.has_work
    assert ids(llm.generate([PROMPTS[0]], PARAMS)[0]) == reference[tuple(PROMPTS[0])]


def test_answers_named_like_another_request_are_refused_whole(llm: LLM) -> None:
    llm.engine.add([5], PARAMS, request_id="a/1")
    with pytest.raises(RequestError, match="'a/1' is already being served"):
        llm.engine.add([5], replace(PARAMS, n=3), request_id="a")
    assert len(llm.engine.scheduler.waiting) == 1
    assert llm.engine.abort("a/1") and not llm.engine.abort("a")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bach": 4}, "unknown setting 'max_bach'\nhint: did you mean 'max_batch'?"),
        (
            {"xyz": 4},
            "unknown setting 'xyz'\nhint: known: assumed_acceptance, capture_adjusted, captured_batches, eager",
        ),
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"max_length": 1024}, "max_length=1024 exceeds the 512 tokens of target 'tiny'"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0, got -1"),
        ({"num_draft_tokens": 5}, "between 1 and 4, the depth it was trained for, got 5"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 contradicts the given drafter"),
    ],
)
def test_impossible_settings_are_refused_and_leave_the_target_alone(
    target: HFTarget, drafter: Drafter, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(target, drafter, **settings)  # type: ignore[arg-type]
    assert message in str(caught.value)
    target.forward(torch.tensor([[5]]))


def test_pages_that_cannot_hold_one_text_are_refused_and_leave_the_target_alone(target: HFTarget) -> None:
    with pytest.raises(CapacityError, match="room for 2 pages of 8 tokens"):
        LLM(target, None, num_pages=2, page_size=8, max_length=64)
    target.forward(torch.tensor([[5]]))


def test_a_target_without_a_shipped_drafter_decodes_plainly(
    target: HFTarget, reference: dict[tuple[int, ...], tuple[int, ...]]
) -> None:
    with LLM(target, max_batch=2) as llm:
        assert llm.drafter is None and llm.engine.num_draft_tokens == 0
        assert ids(llm.generate([PROMPTS[0]], PARAMS)[0]) == reference[tuple(PROMPTS[0])]
    with pytest.raises(ConfigError, match="no drafter ships for 'tiny'"):
        LLM(target, num_draft_tokens=3)


def test_without_a_number_a_drafter_drafts_trees_if_it_can(target: HFTarget, drafter: Drafter) -> None:
    depth, config = check_drafts(drafter, None, EngineConfig(max_batch=3))
    assert depth == min(TREE_DEPTH, drafter.config.num_draft_tokens)
    assert config == EngineConfig(max_batch=3, tree_nodes=TREE_NODES)
    usual = drafter.config.usual_num_draft_tokens
    assert check_drafts(drafter, None, EngineConfig(tree_nodes=5)) == (usual, EngineConfig(tree_nodes=5))
    assert check_drafts(sequential(drafter, target), None, EngineConfig()) == (usual, EngineConfig())


def test_a_target_in_use_is_refused_and_the_engine_that_has_it_goes_on(
    llm: LLM, target: HFTarget, reference: dict[tuple[int, ...], tuple[int, ...]]
) -> None:
    for use in (lambda: LLM(target, None), lambda: target.forward(torch.tensor([[5]]))):
        with pytest.raises(TargetError, match="target 'tiny' is in use by an engine\nhint: close that engine first"):
            use()
    assert ids(llm.generate([PROMPTS[0]], PARAMS)[0]) == reference[tuple(PROMPTS[0])]


def test_a_drafter_reads_the_layers_it_was_made_for_whatever_was_loaded_since(
    target: HFTarget, drafter: Drafter, reference: dict[tuple[int, ...], tuple[int, ...]]
) -> None:
    target.tap((1,))
    try:
        with LLM(target, drafter, K, max_batch=2) as llm:
            assert ids(llm.generate([PROMPTS[0]], PARAMS)[0]) == reference[tuple(PROMPTS[0])]
    finally:
        target.tap(drafter.config.aux_layer_ids)


def test_closing_gives_the_target_back_as_it_was(target: HFTarget, drafter: Drafter) -> None:
    text = torch.tensor([PROMPTS[1]])
    before, names = target.forward(text), set(target.model.state_dict())
    llm = LLM(target, drafter, K, max_batch=2)
    llm.generate(PROMPTS, PARAMS)
    llm.close()
    llm.close()
    after = target.forward(text)
    assert torch.equal(after.logits_BTV, before.logits_BTV) and torch.equal(after.aux_hidden_BTA, before.aux_hidden_BTA)
    assert set(target.model.state_dict()) == names
    assert all("forward" not in module.__dict__ for module in target.model.modules())
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        llm.generate([PROMPTS[0]], PARAMS)


PLACES = ["scheduler.plan", "scheduler.commit", "scheduler.finish", "runner.launch", "runner._decode", "_process"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_before", [True, False])
def test_an_interrupt_at_any_place_leaves_the_engine_usable(
    llm: LLM,
    reference: dict[tuple[int, ...], tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    is_before: bool,
) -> None:
    owner: object = llm.engine
    *path, name = place.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, num_calls = getattr(owner, name), 0

    def interrupted(*args: object) -> object:
        nonlocal num_calls
        num_calls += 1
        result = None if is_before and num_calls == 3 else original(*args)
        if num_calls == 3:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    assert [ids(output) for output in llm.generate(PROMPTS, PARAMS)] == [reference[tuple(each)] for each in PROMPTS]


def test_the_package_offers_it() -> None:
    assert peagle.LLM is LLM and peagle.RequestOutput is RequestOutput


def test_a_sequence_beyond_the_drafters_trained_length_is_warned_of_once(
    target: HFTarget, drafter: Drafter, reference: object, caplog: pytest.LogCaptureFixture
) -> None:
    config = drafter.config
    card = DrafterCard(TargetIdentity.of(target), config.method, config.num_draft_tokens, 40, config.aux_layer_ids)
    drafter.card = card
    try:
        with LLM(target, drafter, K, max_batch=4, page_size=8) as llm:
            llm.generate([[5, 6, 7]], PARAMS)
            assert not warnings(caplog), "19 tokens are within the 40 of the card"
            llm.generate([list(range(20, 58)), list(range(20, 80))], PARAMS)
            llm.generate([list(range(20, 90))], PARAMS)
    finally:
        drafter.card = None
    (message,) = warnings(caplog)
    assert message.startswith("a sequence of 60 tokens exceeds the 40 that the drafter was trained for")
    assert "peagle eval --prompts FILE" in message and "peagle train --max-length 64" in message


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
