"""Where the target's states come from: the target itself, or a disk that remembers them to the bit."""

import json
import logging

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.model_families import BASE, family_target
from harness.tiny_models import tiny_target, tiny_tokenizer
from harness.tiny_training import ignore, metrics_of, new_trainer, settings
from peagle.data.conversations import Conversation
from peagle.errors import CapacityError, CheckpointError, ConfigError
from peagle.objective.batches import Batches
from peagle.targets.hf import HFTarget
from peagle.training import feature_store
from peagle.training.distributed import World
from peagle.training.feature_store import FeatureStore, States
from peagle.training.features import CachedFeatures, OnlineFeatures, features_for, is_worth_capturing


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=7)


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(feature_store, "SHARD_BYTES", 30_000)  # some thirty tokens


def mixed(num_rows=12, seed=0):
    chance = np.random.default_rng(seed)
    lengths = chance.integers(4, 24, num_rows)
    return [Conversation(chance.integers(3, 260, n).astype(np.int32), np.arange(n) >= 2) for n in lengths]


def cached_settings(tmp_path, **changes):
    return settings(tmp_path / "run", features="cached", features_directory=tmp_path / "kept", **changes)


def test_logits_are_given_where_there_is_a_label(target, tmp_path):
    config = settings(tmp_path)
    batch = Batches(mixed(), config).make(0)
    features = OnlineFeatures(target)(batch)
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 1])
    logits = features.judge_logits(rows, columns)
    for index, (row, column) in enumerate([(0, 3), (1, 0), (1, 1)]):
        start = column - int(batch.position_BT[row, column])
        alone = target.forward(batch.token_ids_BT[row : row + 1, start : column + 1]).logits_BTV[0, -1]
        torch.testing.assert_close(logits[index], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt-oss", "gemma2"])
def test_states_from_disk_are_those_of_the_target(family, tmp_path):
    target = family_target(family)
    config = cached_settings(tmp_path, batch_size=3)
    batch = Batches(mixed(), config).make(1)
    online, cached = OnlineFeatures(target)(batch), features_for(target, config, mixed(), World())
    assert isinstance(cached, CachedFeatures)
    cached.prepare(batch)
    features = cached(batch)
    is_text = batch.document_BT >= 0
    for given, expected in zip(features[:2], online[:2], strict=True):
        torch.testing.assert_close(given[is_text], expected[is_text], atol=1e-4, rtol=1e-4)
        assert not given[~is_text].any()
    places = is_text.nonzero()[::3].unbind(1)
    torch.testing.assert_close(features.judge_logits(*places), online.judge_logits(*places), atol=1e-4, rtol=1e-4)


def test_half_precision_is_kept_as_it_is(tmp_path):
    target = tiny_target(num_layers=7)
    target.model.to(torch.bfloat16)
    config = cached_settings(tmp_path)
    batch = Batches(mixed(), config).make(0)
    features = features_for(target, config, mixed(), World())(batch)
    assert features.aux_hidden_BTA.dtype == features.last_hidden_BTD.dtype == torch.bfloat16


def test_a_run_on_cached_features_has_the_losses_of_one_on_the_target_itself(target, tmp_path):
    changes = {"log_every": 1, "num_steps": 4, "batch_size": 4, "micro_batch_size": 2}
    online, cached = settings(tmp_path / "online", **changes), cached_settings(tmp_path, **changes)
    new_trainer(target, online).train(mixed(), ignore)
    trainer = new_trainer(target, cached)
    trainer.features_of = features_for(target, cached, mixed(), World())
    trainer.train(mixed(), ignore)
    losses = [[line["loss"] for line in metrics_of(config)] for config in (online, cached)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def new_store(target, directory, rows=None):
    return FeatureStore(directory, target, mixed() if rows is None else rows, max_length=16)


def counting(target):
    """Features of rows, and how many times they were asked for."""
    source, calls = OnlineFeatures(target), []

    def states_of(text):
        calls.append(text)
        return States(*source(text)[:2])

    return states_of, calls


def test_what_was_written_is_not_made_again_after_a_stop(target, tmp_path):
    store = new_store(target, tmp_path)
    assert store.num_shards > 3
    states_of, calls = counting(target)

    class Killed(BaseException):
        pass

    def stopping(text):
        if len(store.missing()) == store.num_shards - 2:
            raise Killed
        return states_of(text)

    with pytest.raises(Killed):
        store.complete(stopping, 2, World())
    num_before, done = len(calls), store.num_shards - len(store.missing())
    again = new_store(target, tmp_path)
    again.complete(states_of, 2, World())
    assert done == 2 and again.missing() == []
    in_one_go, other_calls = counting(target)
    new_store(target, tmp_path / "other").complete(in_one_go, 2, World())
    assert num_before < len(calls) == len(other_calls)
    for path in sorted((tmp_path / "other").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_the_size_is_said_before_anything_is_written_and_is_right(target, tmp_path, caplog):
    store = new_store(target, tmp_path)
    with caplog.at_level(logging.INFO, logger="peagle"):
        store.complete(counting(target)[0], 2, World())
    first = caplog.records[0].getMessage()
    num_tokens = store.lengths.sum()
    assert first.startswith(f"disk: at most about {num_tokens}.0 KiB for the features of {num_tokens} tokens, ")
    assert "GiB free" in first and store.num_bytes == 1024 * num_tokens
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert store.num_bytes <= written <= store.num_bytes + 300 * store.num_shards


def test_what_does_not_fit_on_the_disk_is_refused_before_anything_is_written(target, tmp_path):
    endless = np.broadcast_to(np.int32(5), (10**12,))
    rows = [Conversation(endless, np.broadcast_to(np.True_, (10**12,)))]
    store = FeatureStore.__new__(FeatureStore)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_store, "contents_digest", lambda *_: "of a terabyte of text")
        store.__init__(tmp_path / "new", target, rows, max_length=10**12)
    with pytest.raises(CapacityError) as caught:
        store.complete(counting(target)[0], 2, World())
    assert "at most about 953674.3 GiB for the features of 1,000,000,000,000 tokens, " in caught.value.message
    assert "--features online" in caught.value.hint
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_up_is_said_and_keeps_what_was_written(target, tmp_path):
    store = new_store(target, tmp_path)
    (tmp_path / "features-00002.safetensors.tmp").symlink_to("/dev/full")
    with pytest.raises(CapacityError) as caught:
        store.complete(counting(target)[0], 2, World())
    assert "cannot write " in caught.value.message and "features-00002.safetensors (" in caught.value.message
    assert caught.value.message.endswith("the 2 files before it are intact")
    assert len(list(tmp_path.glob("*.safetensors"))) == 2 and not list(tmp_path.glob("*.tmp"))


def test_features_of_another_target_other_data_or_other_layers_are_refused(target, tmp_path):
    new_store(target, tmp_path).complete(counting(target)[0], 2, World())
    states_of = counting(target)[0]
    for other, word in (
        (new_store(tiny_target(num_layers=7, seed=1), tmp_path), "target was"),
        (new_store(target, tmp_path, mixed(seed=1)), "data was"),
        (new_store(target, tmp_path, mixed()[:-1]), "num_tokens was"),
    ):
        with pytest.raises(CheckpointError) as caught:
            other.complete(states_of, 2, World())
        assert "caches features of another run" in caught.value.message and word in caught.value.message
        assert "another features_directory" in caught.value.hint
    tapped = tiny_target(num_layers=7)
    tapped.tap((1, 2, 3))
    with pytest.raises(CheckpointError, match=r"aux_layer_ids was \[2, 3, 4\], is \[1, 2, 3\]"):
        new_store(tapped, tmp_path).complete(states_of, 2, World())


def test_a_manifest_that_is_gone_or_damaged_is_refused(target, tmp_path):
    store = new_store(target, tmp_path)
    store.complete(counting(target)[0], 2, World())
    assert json.loads((tmp_path / "manifest.json").read_text())["dtype"] == "float32"
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest\.json"):
        store.complete(counting(target)[0], 2, World())
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="has features but no manifest"):
        store.complete(counting(target)[0], 2, World())


def test_a_damaged_file_is_named(target, tmp_path):
    store = new_store(target, tmp_path)
    store.complete(counting(target)[0], 2, World())
    (tmp_path / "features-00000.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError) as caught:
        store.read([(0,)])
    assert "features-00000.safetensors: " in caught.value.message
    assert caught.value.hint == "delete it; the next run writes it again"


def test_a_head_that_is_not_known_cannot_be_cached(tmp_path):
    class Odd(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.sinh()
            return output

    torch.manual_seed(0)
    target = HFTarget(Odd(LlamaConfig(**BASE)), tiny_tokenizer(), name="odd")
    with pytest.raises(ConfigError) as caught:
        features_for(target, cached_settings(tmp_path), mixed(), World())
    assert caught.value.message.startswith("cannot cache features of Odd: its head cannot run separately")
    assert caught.value.hint == "use --features online"


def test_on_a_cpu_nothing_is_recorded_as_a_graph(target):
    assert not is_worth_capturing(target)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("compiles", [False, True])
def test_a_recorded_pass_gives_what_a_launched_one_does_batch_after_batch(tmp_path, compiles):
    target = tiny_target(num_layers=7)
    target.model.to("cuda")
    assert is_worth_capturing(target)
    config = settings(tmp_path, batch_size=3, max_length=256)
    batches = Batches(mixed(300), config)
    launched, recorded = (OnlineFeatures(target, compiles=compiles, captures=on) for on in (False, True))
    for step in range(3):
        batch = batches.make(step).to(target.device)
        expected, given = launched(batch), recorded(batch)
        is_text = batch.document_BT >= 0
        for one, other in zip(given[:2], expected[:2], strict=True):
            torch.testing.assert_close(one[is_text], other[is_text], atol=1e-3, rtol=1e-3)
    assert recorded._captures, "it was not given up"


@pytest.mark.gpu
def test_a_pass_that_waits_for_the_device_is_launched_instead_and_it_is_said(tmp_path, caplog):
    target = tiny_target(num_layers=7)
    target.model.to("cuda")
    target.layers[3].register_forward_hook(lambda module, inputs, output: print(float(inputs[0].sum())))
    features_of = OnlineFeatures(target, compiles=False, captures=True)
    batch = Batches(mixed(), settings(tmp_path)).make(0).to(target.device)
    with caplog.at_level(logging.WARNING, logger="peagle"):
        features = features_of(batch)
    assert "cannot capture the target's forward as a CUDA graph" in caplog.text
    assert features.aux_hidden_BTA.isfinite().all()
