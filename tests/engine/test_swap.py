"""Other weights for the drafter of a running engine: no answer fails or changes, and the drafts are the new ones."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engine_runs import NUM_DRAFT_TOKENS, TREE_NODES, answer
from harness.model_families import family_target, trained_drafter
from harness.pair_heads import random_head
from peagle.checkpoint.card import DrafterCard, TargetIdentity
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.checkpoint.replacement import read_drafter_files
from peagle.drafter.create import create_drafter
from peagle.drafter.model import Drafter
from peagle.drafter.pair_head import PairHead
from peagle.engine.async_engine import AsyncEngine
from peagle.engine.engine import Engine
from peagle.errors import CheckpointError, ConfigError, PeagleError
from peagle.native import packed_linear as linear
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

PROMPTS = [[1, *range(20 + index, 24 + 2 * index)] for index in range(5)]
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
PARAMS = [dataclasses.replace(GREEDY, temperature=float(index % 2), seed=index) for index in range(len(PROMPTS))]
VOCABULARY = 180


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return family_target("llama", seed=3)


@pytest.fixture(scope="module")
def texts(target: HFTarget) -> list[list[int]]:
    return [prompt + list(answer(target, prompt, GREEDY)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(target: HFTarget) -> list[tuple[int, ...]]:
    return [answer(target, prompt, own) for prompt, own in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def good(target: HFTarget, texts: list[list[int]]) -> Drafter:
    return trained_drafter(target, texts, num_draft_tokens=NUM_DRAFT_TOKENS)


def written(
    directory: Path, owner: HFTarget, drafter: Drafter, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    config = drafter.config
    card = DrafterCard(TargetIdentity.of(owner), config.method, config.num_draft_tokens, 64, config.aux_layer_ids)
    save_drafter(drafter, directory, dataclasses.replace(card, **changes), full=False, dtype=dtype)
    return directory


def variant(kind: str, good: Drafter, target: HFTarget) -> tuple[Drafter, dict[str, Any], PairHead | None]:
    """A good drafter of a kind, settings of the engine, and a pair head for its bad twin."""
    if kind == "tree":
        return good, {"tree_nodes": TREE_NODES}, None
    if kind == "budget":
        return good, {"verify_tokens": None}, None
    changes = {"eagle3": {"parallel": False, "mask_token_id": None}, "small vocabulary": {"head": "shared"}}
    config = dataclasses.replace(good.config, **changes.get(kind, {}))
    if kind == "small vocabulary":
        config = dataclasses.replace(config, draft_vocab_size=VOCABULARY)
    made = Drafter(config, target.embedding_VD, target.head_VD)
    state = {name: tensor for name, tensor in good.state_dict().items() if name in made.state_dict()}
    if kind == "small vocabulary":
        state |= {"d2t": torch.arange(VOCABULARY) % 3}
    made.load_state_dict(state)
    if kind == "pair head":
        made.pair_head = random_head(made, seed=1)
    return made.eval().requires_grad_(False), {}, random_head(made, seed=2) if kind == "pair head" else None


def bad_twin(drafter: Drafter, target: HFTarget, pair_head: PairHead | None) -> Drafter:
    """The same network with random weights."""
    bad = create_drafter(target, drafter.config, "random", seed=9, offsets_U=drafter.state_dict().get("d2t"))
    if drafter.config.head == "own":
        bad.lm_head.weight.data.mul_(0.5)  # else it is the target's head, and stored as such
    bad.pair_head = pair_head
    return bad.eval().requires_grad_(False)


def served(engine: Engine, directory: Path) -> list[tuple[int, ...]]:
    """Answers to all prompts, with a swap after some steps."""
    ids = [engine.add(prompt, own) for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
    found: dict[str, tuple[int, ...]] = {}
    for step in range(1000):
        if not engine.has_work:
            break
        if step == 3:
            assert engine.stats().num_running == 4, "requests are running"
            engine.swap_drafter(read_drafter_files(directory))
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        engine.check_integrity()
    return [found[name] for name in ids]


def accepted_by(engine: Engine) -> list[int]:
    """Accepted drafts by position in two answers."""
    before = engine.stats().accepted_per_position
    for prompt in PROMPTS[:2]:
        engine.add(prompt, GREEDY)
    while engine.has_work:
        engine.step()
    return [now - then for now, then in zip(engine.stats().accepted_per_position, before, strict=True)]


def started(target: HFTarget, directory: Path, **settings: Any) -> Engine:
    config = EngineConfig(**{"max_batch": 4, "page_size": 4, "verify_tokens": 0, "reuse_prefixes": False} | settings)
    return Engine(target, load_drafter(directory, target), NUM_DRAFT_TOKENS, config)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack every linear layer, however small and whichever form is faster."""
    choice = linear.ShapeChoice(0, 0, 0, "transposed", 1, None, {})
    monkeypatch.setattr(linear, "MIN_BYTES", 0)
    monkeypatch.setattr(linear, "_choose", lambda *_: choice)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(
    "kind",
    [
        "pair head",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("tree", "chain", "budget", "eagle3", "small vocabulary")
        ),
    ],
)
def test_a_swap_among_running_requests_changes_no_answer_and_drafts_become_those_of_the_new_drafter(
    kind: str, target: HFTarget, good: Drafter, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    drafter, settings, pair_head = variant(kind, good, target)
    bad = bad_twin(drafter, target, pair_head)
    directories = {True: written(tmp_path / "good", target, drafter), False: written(tmp_path / "bad", target, bad)}
    accepted = {}
    for is_good, directory in directories.items() if kind != "budget" else ():  # its choices depend on time
        engine = started(target, directory, **settings)
        accepted[is_good] = accepted_by(engine)
        engine.close()
    engine = started(target, directories[False], **settings)
    try:
        for is_good in (True, False):
            assert served(engine, directories[is_good]) == expected
            if kind != "budget":
                assert accepted_by(engine) == accepted[is_good] != accepted[not is_good]
        assert engine.stats().num_aborted == 0 and engine.stats().num_pages_used == 0
    finally:
        engine.close()


@pytest.fixture(scope="module")
def directory(target: HFTarget, good: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("drafters") / "good", target, good)


@pytest.fixture
def engine(target: HFTarget, directory: Path) -> Iterator[Engine]:
    made = started(target, directory)
    yield made
    made.close()


def test_the_card_and_what_was_learned_of_the_old_drafter_are_replaced(
    engine: Engine, target: HFTarget, good: Drafter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = written(tmp_path / "new", target, good, max_length=8, acceptance={"set": {"per_position": [0.5]}})
    card = engine.swap_drafter(read_drafter_files(new))
    assert engine.drafter is not None and engine.drafter.card is card and card.acceptance["set"]
    accepted_by(engine)
    assert "exceeds the 8 that the drafter was trained for" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 2}, "another network than the served drafter: num_layers is 2, served is 1"),
        ({"aux_layer_ids": (0, 1, 2)}, "aux_layer_ids is \\(0, 1, 2\\), served is"),
        ({"num_draft_tokens": 2}, "between 1 and 2, the depth it was trained for, got 4"),
        ({"draft_vocab_size": 100}, "draft_vocab_size is 100, served is 272"),
    ],
)
def test_another_network_is_refused_and_nothing_changes(
    change: dict[str, Any], message: str, engine: Engine, target: HFTarget, good: Drafter, tmp_path: Path
) -> None:
    config = dataclasses.replace(good.config, **change)
    other = Drafter(config, target.embedding_VD, target.head_VD).eval()
    refused(engine, written(tmp_path / "other", target, other), message)


def test_a_drafter_of_another_target_or_without_a_card_or_with_broken_tensors_is_refused(
    engine: Engine, target: HFTarget, good: Drafter, tmp_path: Path
) -> None:
    identity = dataclasses.replace(TargetIdentity.of(target), weights="0" * 32)
    refused(engine, written(tmp_path / "a", target, good, target=identity), "its weights are not the ones")
    bare = written(tmp_path / "b", target, good)
    (bare / "drafter_card.json").unlink()
    refused(engine, bare, "has no drafter_card.json")
    broken = bad_twin(good, target, None)
    with torch.no_grad():
        broken.norm.weight[0] = float("nan")
    refused(engine, written(tmp_path / "c", target, broken), "'norm.weight' holds NaN")
    headed = bad_twin(good, target, random_head(good))
    refused(engine, written(tmp_path / "d", target, headed), "has a pair head of rank 6, the served drafter no pair")
    refused(engine, tmp_path / "none", "no drafter at|is missing|no directory")


def test_another_draft_vocabulary_is_refused(target: HFTarget, good: Drafter, tmp_path: Path) -> None:
    small, _, _ = variant("small vocabulary", good, target)
    other = bad_twin(small, target, None)
    other.d2t.zero_()
    engine = started(target, written(tmp_path / "small", target, small))
    try:
        refused(engine, written(tmp_path / "other", target, other), "another draft vocabulary")
    finally:
        engine.close()


def refused(engine: Engine, directory: Path, message: str) -> None:
    assert engine.drafter is not None
    before, card = {name: tensor.clone() for name, tensor in engine.drafter.state_dict().items()}, engine.drafter.card
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        engine.swap_drafter(read_drafter_files(directory))
    assert isinstance(caught.value, PeagleError) and caught.value.hint
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.drafter.state_dict().items())
    assert engine.drafter.card is card


def test_an_engine_without_a_drafter_has_nothing_to_replace(target: HFTarget, directory: Path) -> None:
    engine = Engine(target, None, 0, EngineConfig(max_batch=2))
    try:
        with pytest.raises(ConfigError, match="no drafter to replace"):
            engine.swap_drafter(read_drafter_files(directory))
    finally:
        engine.close()


@pytest.mark.parametrize("num_requests", [5, pytest.param(256, marks=pytest.mark.slow)])
def test_streams_go_on_while_drafters_are_swapped_again_and_again(
    num_requests: int,
    target: HFTarget,
    good: Drafter,
    directory: Path,
    expected: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    bad = written(tmp_path / "bad", target, bad_twin(good, target, None))

    async def follow(streams: AsyncEngine, index: int) -> tuple[int, ...]:
        updates = streams.stream(PROMPTS[index % len(PROMPTS)], PARAMS[index % len(PROMPTS)])
        return tuple([token async for update in updates for token in update.token_ids])

    async def main() -> list[tuple[int, ...]]:
        async with AsyncEngine(started(target, directory, max_batch=num_requests)) as streams:
            tasks = [asyncio.create_task(follow(streams, index)) for index in range(num_requests)]
            while not (await streams.stats()).num_running:
                pass
            for new in (bad, directory, bad):
                await streams.swap_drafter(new)
            with pytest.raises(CheckpointError):
                await streams.swap_drafter(tmp_path / "none")
            return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == (expected * num_requests)[:num_requests]
