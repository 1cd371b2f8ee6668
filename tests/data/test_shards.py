"""Shards: what is written comes back, survives whatever stops the writer, and is refused where it does not belong."""

import contextlib
import json
import resource
import shutil

import numpy as np
import pytest

from harness.tiny_models import tiny_target, tiny_tokenizer
from peagle.checkpoint.card import TargetIdentity
from peagle.data.conversations import read_conversations
from peagle.data.shard_writer import ShardWriter
from peagle.data.shards import Drop, Row, check_disk, check_target, open_shards, read_manifest
from peagle.errors import CapacityError, ConfigError, DataError

IDENTITY = TargetIdentity("tiny", "weights", "tokenizer", "template")
SETTINGS = {"temperatures": (0.0, 1.0), "seed": 0}


def row(key, length=10, temperature=0.0):
    token_ids = (np.arange(length) + key).astype(np.int32)
    return Row(key, token_ids, ((length // 2, length),), temperature)


def writer(directory, *, kind="synthesize", identity=IDENTITY, settings=SETTINGS, **options):
    return ShardWriter(directory, kind, identity, settings, **options)


def rows_of(directory):
    """Key, ids, mask and temperature of each row, as plain values."""
    found = []
    for shard in open_shards(directory).shards:
        for number, (start, end) in enumerate(zip(shard.offsets[:-1], shard.offsets[1:], strict=True)):
            ids, mask = shard.token_ids[start:end].tolist(), shard.loss_mask[start:end].tolist()
            found.append((int(shard.keys[number]), ids, mask, float(shard.temperatures[number])))
    return found


def expected(*rows):
    def mask(one):
        return [any(start <= index < end for start, end in one.spans) for index in range(len(one.token_ids))]

    return [(one.key, one.token_ids.tolist(), mask(one), one.temperature) for one in rows]


@pytest.mark.parametrize("shard_tokens", [1, 25, 10_000])
def test_rows_come_back_as_they_were_written_whatever_the_size_of_shards(tmp_path, shard_tokens):
    rows = [row(key, 3 + key, temperature=key / 2) for key in range(9)]
    rows.append(Row(70, np.arange(12, dtype=np.int32), ((3, 5), (8, 12)), 1.0))
    with writer(tmp_path, shard_tokens=shard_tokens) as out:
        for one in rows:
            out.append([one], [Drop("question: cut"), Drop("answer: loops", 1000 + one.key)])
        out.finish()
    assert rows_of(tmp_path) == expected(*rows)
    manifest = read_manifest(tmp_path)
    assert manifest["is_complete"] and manifest["num_rows"] == 10
    assert manifest["num_tokens"] == sum(shard["num_tokens"] for shard in manifest["shards"])
    assert manifest["dropped"] == {"question: cut": 10, "answer: loops": 10}
    assert not list(tmp_path.glob("*.jsonl")) and not list(tmp_path.glob("*.tmp"))
    assert len(manifest["shards"]) == len(list(tmp_path.glob("*.safetensors")))


def test_the_manifest_tells_target_settings_counts_and_where_it_came_from(tmp_path):
    with writer(tmp_path) as out:
        out.append([row(1), row(2)])
        out.finish()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["target"] == vars(IDENTITY) and manifest["kind"] == "synthesize"
    assert manifest["settings"] == {"temperatures": [0.0, 1.0], "seed": 0}
    (shard,) = manifest["shards"]
    assert (shard["name"], shard["num_rows"], shard["num_answer_tokens"]) == ("shard-00000.safetensors", 2, 10)
    assert manifest["runs"][0]["versions"]["peagle"] and manifest["runs"][0]["command"]


def test_shards_are_plain_safetensors_without_pickle(tmp_path):
    from safetensors.numpy import load_file

    with writer(tmp_path) as out:
        out.append([row(5)])
        out.finish()
    arrays = load_file(tmp_path / "shard-00000.safetensors")
    assert arrays["token_ids"].tolist() == row(5).token_ids.tolist() and arrays["keys"].tolist() == [5]


def test_rows_of_sealed_shards_lie_on_the_disk_and_not_in_memory(tmp_path):
    with writer(tmp_path) as out:
        out.append([row(5)])
        out.finish()
    (shard,) = open_shards(tmp_path).shards
    assert not shard.token_ids.flags.owndata and not shard.token_ids.flags.writeable


def test_a_writer_that_was_left_without_a_word_is_gone_on_with(tmp_path):
    rows = [row(key) for key in range(7)]
    with writer(tmp_path, shard_tokens=30) as out:
        out.append(rows[:4], [Drop("prompt: too long", 50)])
    assert rows_of(tmp_path) == expected(*rows[:4]), "the open shard is read, too"
    assert not read_manifest(tmp_path)["is_complete"]
    with writer(tmp_path, shard_tokens=30) as out:
        assert out.keys == {0, 1, 2, 3, 50} and out.num_runs == 2
        assert out.counts["num_rows"] == 4 and out.counts["dropped"] == {"prompt: too long": 1}
        out.append(rows[4:])
        out.finish()
    assert rows_of(tmp_path) == expected(*rows)


@pytest.mark.parametrize("kept_share", [0.1, 0.5, 0.99])
def test_a_line_that_was_cut_off_is_dropped_and_the_next_one_begins_cleanly(tmp_path, kept_share):
    with writer(tmp_path) as out:
        out.append([row(1)])
        lines = tmp_path / "shard-00000.jsonl"
        length = lines.stat().st_size
        out.append([row(2)])
    content = lines.read_bytes()
    lines.write_bytes(content[: length + int(kept_share * (len(content) - length))])
    assert rows_of(tmp_path) == expected(row(1))
    with writer(tmp_path) as out:
        assert out.keys == {1}
        out.append([row(3)])
    assert rows_of(tmp_path) == expected(row(1), row(3))


def test_a_stop_between_sealing_and_naming_a_shard_loses_and_repeats_nothing(tmp_path):
    with writer(tmp_path) as out:
        out.append([row(1), row(2)])
    unsealed = tmp_path / "before"
    shutil.copytree(tmp_path, unsealed)
    with writer(tmp_path) as out:
        out.seal()
    # The shard is there and the manifest does not name it yet.
    shutil.copy(tmp_path / "shard-00000.safetensors", unsealed)
    (unsealed / "shard-00000.safetensors.tmp").write_bytes(b"half")
    with writer(unsealed) as out:
        assert out.keys == {1, 2}
        out.finish()
    assert rows_of(unsealed) == expected(row(1), row(2))


def test_a_stop_between_naming_a_shard_and_removing_its_lines_repeats_nothing(tmp_path):
    with writer(tmp_path) as out:
        out.append([row(1), row(2)])
        lines = (tmp_path / "shard-00000.jsonl").read_bytes()
        out.seal()
    (tmp_path / "shard-00000.jsonl").write_bytes(lines)
    assert rows_of(tmp_path) == expected(row(1), row(2))
    with writer(tmp_path) as out:
        assert out.counts["num_rows"] == 2
        out.finish()
    assert rows_of(tmp_path) == expected(row(1), row(2))


def test_a_finished_set_can_be_added_to(tmp_path):
    with writer(tmp_path) as out:
        out.append([row(1)])
        out.finish()
    with writer(tmp_path) as out:
        out.append([row(2)])
        out.finish()
    assert rows_of(tmp_path) == expected(row(1), row(2)) and len(read_manifest(tmp_path)["shards"]) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": SETTINGS | {"seed": 3}}, "seed was 0, is 3"),
        ({"settings": {"seed": 0}}, "temperatures was [0.0, 1.0], is None"),
        ({"kind": "regenerate"}, "it was written by synthesize, not regenerate"),
        (
            {"identity": TargetIdentity("other", "w", "tokenizer", "template")},
            "the target's weights: was 'tiny', is 'other'",
        ),
    ],
)
def test_a_directory_made_otherwise_is_not_added_to(tmp_path, change, words):
    with writer(tmp_path) as out:
        out.append([row(1)])
    with pytest.raises(ConfigError) as caught:
        writer(tmp_path, **change)
    assert words in caught.value.message and "a new --output" in caught.value.hint
    with writer(tmp_path) as out:
        assert out.num_runs == 2, "the one that was refused has left no trace"


def test_a_directory_is_written_by_one_process_at_a_time(tmp_path):
    with writer(tmp_path), pytest.raises(ConfigError, match="another process is writing to"):
        writer(tmp_path)
    with writer(tmp_path):
        pass


@contextlib.contextmanager
def largest_file(num_bytes):
    """No file may grow beyond this, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def append_one_by_one(out, number):
    for key in range(number):
        out.append([row(key)])


def test_a_full_disk_is_explained_and_loses_nothing(tmp_path):
    with writer(tmp_path) as out:
        with pytest.raises(CapacityError) as caught, largest_file(3000):
            append_one_by_one(out, 100)
        num_rows = out.counts["num_rows"]
        assert 5 < num_rows < 100
    assert caught.value.message.startswith(f"cannot write to {tmp_path}: ")
    assert f"the {num_rows} finished rows ({5 * num_rows:,} answer tokens) are saved" in caught.value.message
    assert "rerun the command to resume" in caught.value.hint
    assert rows_of(tmp_path) == expected(*(row(key) for key in range(num_rows)))
    with writer(tmp_path) as out:
        out.append([row(key) for key in range(num_rows, 100)])
        out.finish()
    assert rows_of(tmp_path) == expected(*(row(key) for key in range(100)))


def test_a_disk_that_is_full_when_a_shard_is_sealed_loses_nothing(tmp_path):
    rows = [row(key, 200) for key in range(3)]
    with writer(tmp_path) as out:
        out.append(rows)
        with pytest.raises(CapacityError, match="the 3 finished rows"), largest_file(1500):
            out.seal()
    assert not list(tmp_path.glob("*.tmp")) and rows_of(tmp_path) == expected(*rows)
    with writer(tmp_path) as out:
        out.finish()
    assert rows_of(tmp_path) == expected(*rows)


def test_a_disk_too_small_for_the_estimate_is_refused_before_the_start(tmp_path, caplog):
    with caplog.at_level("INFO", logger="peagle"):
        check_disk(tmp_path / "new" / "folder", 1000)
    assert "disk: at most about 13.7 KiB for 1,000 tokens, " in caplog.text
    with pytest.raises(
        CapacityError, match=r"the disk is too small: at most about \d+\.\d GiB for 1,000,000,000,000,000 t"
    ):
        check_disk(tmp_path, 10**15)


def damaged(directory, name, content):
    (directory / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_shards(directory)
    return caught.value.message


def test_damaged_directories_are_refused_with_the_file(tmp_path):
    with writer(tmp_path) as out:
        out.append([row(1)])
        out.finish()
    name = "shard-00000.safetensors"
    shard, manifest = (tmp_path / name).read_bytes(), (tmp_path / "manifest.json").read_bytes()
    assert f"cannot read {tmp_path / name}: {len(shard) - 1} bytes" in damaged(tmp_path, name, shard[:-1])
    assert f"cannot read {tmp_path / name}: " in damaged(tmp_path, name, b"\xff" * len(shard))
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"is missing, but listed in manifest\.json"):
        open_shards(tmp_path)
    (tmp_path / name).write_bytes(shard)
    assert "manifest.json: " in damaged(tmp_path, "manifest.json", manifest[:-9])
    other = manifest.replace(b"peagle-shards-1", b"peagle-shards-9")
    assert "has format 'peagle-shards-9'; this version reads 'peagle-shards-1'" in damaged(
        tmp_path, "manifest.json", other
    )
    nobody = json.dumps(json.loads(manifest) | {"target": {}}).encode()
    assert "does not identify the target" in damaged(tmp_path, "manifest.json", nobody)


def test_a_shard_put_among_those_of_another_target_is_refused(tmp_path):
    for name, weights in (("ours", "weights"), ("theirs", "others!")):
        with writer(tmp_path / name, identity=TargetIdentity("tiny", weights, "tokenizer", "template")) as out:
            out.append([row(1)])
            out.finish()
    shutil.copy(tmp_path / "theirs" / "shard-00000.safetensors", tmp_path / "ours")
    with pytest.raises(DataError, match=r"was written by another target than the one in manifest\.json"):
        open_shards(tmp_path / "ours")


def test_shards_of_another_target_are_refused_with_what_differs(tmp_path):
    target = tiny_target(num_layers=2)
    with writer(tmp_path, identity=TargetIdentity.of(target)) as out:
        out.append([row(1)])
        out.finish()
    check_target(tmp_path, target)
    stranger = tiny_target(num_layers=2, seed=9)
    with pytest.raises(DataError) as caught:
        check_target(tmp_path, stranger)
    assert caught.value.message.endswith("was written by target 'tiny', not by 'tiny': the weights differ")
    assert "generate the data with this target" in caught.value.hint
    target.tokenizer = tiny_tokenizer(chat_template="{{ messages[0]['content'] }}")
    with pytest.raises(DataError, match="the chat template differs"):
        check_target(tmp_path, target)
    other_tokenizer = tiny_tokenizer()
    other_tokenizer.add_tokens(["<new>"])
    with pytest.raises(DataError, match="which has another tokenizer"):
        read_conversations(tmp_path, other_tokenizer, max_length=99)
