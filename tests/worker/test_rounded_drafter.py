"""A drafter that computes in integers on a CPU: which one does, and that answers and weights stay as they are."""

import pytest
import torch
from torch import nn

from harness.model_families import trained_drafter
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.linears.joined_linear import joined_groups
from peagle.native.integers import missing_integers
from peagle.native.packed_linear import PackedLinear
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.worker.linear_layers import pack_models, repack

K = 4
PROMPTS = [[1, 117, 115, 200, 17, 9, 33], [5, 6, 7, 8, 9, 10, 11, 12, 13], list(range(3, 120))]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
MINIMUM = "peagle.worker.linear_layers.MIN_ROUNDED_HEAD"
SMALLER: dict[str, object] = {"draft_vocab_size": 208}

runs = pytest.mark.skipif(missing_integers() is not None, reason=str(missing_integers()))


@pytest.fixture
def target() -> HFTarget:
    return tiny_target(num_layers=4)


def kernels(drafter: Drafter) -> list[str]:
    """The kernel of each layer that computes."""
    packed = [*drafter.modules(), *(group.packed for group in joined_groups(drafter))]
    return [each.kernel.name for each in packed if isinstance(each, PackedLinear)]


@runs
@pytest.mark.parametrize("switches", [{}, {"parallel": False}, {"head": "own"}, SMALLER])
def test_answers_with_a_rounded_drafter_are_the_targets_and_its_weights_come_back(
    switches: dict[str, object], target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MINIMUM, 1)
    drafter = tiny_drafter(target, num_draft_tokens=K, **switches)
    expected = [[token for step in decode(target, prompt, PARAMS) for token in step.token_ids] for prompt in PROMPTS]
    state = {name: value.clone() for name, value in drafter.state_dict().items()}
    exact_logits = drafter.logits(x := torch.randn(3, 64))
    with LLM(target, drafter, K, page_size=8, max_batch=3, verify_tokens=0) as llm:
        assert set(kernels(drafter)) == {"integers"} and len(kernels(drafter)) >= 2 * 4 + 1
        assert "run_layers" in drafter.__dict__, "its layers are native"
        logits = drafter.logits(x)
        assert 0 < (logits - exact_logits).abs().max() < 0.05 * exact_logits.abs().max()
        assert list(drafter.state_dict()) == list(state), "the head that serves is no part of the drafter"
        assert [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert not kernels(drafter) and "run_layers" not in drafter.__dict__
    assert all(type(each) is nn.Linear for each in drafter.modules() if isinstance(each, nn.Linear))
    assert torch.equal(drafter.logits(x), exact_logits)
    assert all(torch.equal(value, state[name]) for name, value in drafter.state_dict().items())


@runs
def test_rounded_drafts_are_accepted_as_often_as_exact_ones(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        [*prompt, *(token for step in decode(target, prompt, PARAMS) for token in step.token_ids)] for prompt in PROMPTS
    ]
    drafter = trained_drafter(target, texts, num_draft_tokens=K).requires_grad_(False)
    num_accepted = []
    for minimum in (1, 10**9):
        monkeypatch.setattr(MINIMUM, minimum)
        with LLM(target, drafter, K, page_size=8, max_batch=3, verify_tokens=0) as llm:
            answers = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)]
            num_accepted.append(sum(llm.engine.stats().accepted_per_position))
        assert [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)] == texts
    rounded, exact = num_accepted
    assert exact > 20 and rounded > 0.8 * exact, num_accepted


@runs
@pytest.mark.parametrize("spare", [0, -1])
def test_only_a_drafter_with_a_large_head_computes_in_integers(
    spare: int, target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.native.packed_linear.MIN_BYTES", 1)
    drafter = tiny_drafter(target)
    monkeypatch.setattr(MINIMUM, drafter.head_VD.numel() - spare)
    undo = pack_models(target, drafter, 8, 64)
    try:
        assert ("integers" in kernels(drafter)) == (spare == 0)
        packed = [each for each in target.model.modules() if isinstance(each, PackedLinear)]
        assert packed and all(each.kernel.name != "integers" for each in packed), "the target stays exact"
    finally:
        undo()


def test_where_the_cpu_cannot_the_drafter_shares_the_targets_kernels_and_the_log_says_why(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("peagle.native.packed_linear.MIN_BYTES", 1)
    monkeypatch.setattr(MINIMUM, 1)
    monkeypatch.setattr("peagle.native.integers.missing_integers", lambda: "the CPU lacks avxvnni")
    drafter = tiny_drafter(target)
    with caplog.at_level("INFO"):
        undo = pack_models(target, drafter, 8, 64)
    try:
        assert "the drafter computes in float32: the CPU lacks avxvnni" in caplog.text
        assert "integers" not in kernels(drafter)
        served = drafter._served_head
        assert served is not None and served.func is target.model.get_output_embeddings()
    finally:
        undo()


@runs
def test_after_a_swap_the_new_weights_are_rounded(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MINIMUM, 1)
    drafter, new = (tiny_drafter(target, head="own") for _ in range(2))
    for parameter in new.parameters():
        parameter.copy_(torch.randn_like(parameter))
    undo = pack_models(target, drafter, 8, 64)
    try:
        drafter.load_state_dict(new.state_dict())
        repack(drafter)
        x = torch.randn(3, 64)
        for found, expected in (
            (drafter.logits(x), new.logits(x)),
            (drafter.layers[1].mlp(x), new.layers[1].mlp(x)),
        ):
            assert (found - expected).std() < 0.03 * expected.std()
    finally:
        undo()
