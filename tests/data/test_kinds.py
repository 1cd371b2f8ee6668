"""Kinds of text: their shares, the documents they are about, and the conversations that come of them."""

import contextlib
import gzip
import itertools
import json
import random
from collections import Counter

import pytest

from harness.tiny_models import tiny_target
from peagle.checkpoint.card import TargetIdentity
from peagle.data.asking import LONG_REQUEST, Written
from peagle.data.config import SynthesisConfig, Until
from peagle.data.documents import CODE, TEXT, Shelf, read_documents
from peagle.data.generation import Answer
from peagle.data.inspection import inspect
from peagle.data.kinds import DOCUMENTS, KINDS, TOPICS, read_shares
from peagle.data.shard_writer import ShardWriter
from peagle.data.shards import open_shards
from peagle.data.synthesis import Synthesis
from peagle.errors import ConfigError, DataError

END = 2
TEXT_OF_WORDS = "the river runs past the old town where people buy bread and talk about the weather of the day"
WORDS = TEXT_OF_WORDS.split()


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=2)


class Author:
    """Stands where the engine does: writes a new text for every job, as long as its stage asks for."""

    def __init__(self, target, at_once=8, spoiled=()):
        self.target, self.at_once, self.spoiled = target, at_once, spoiled
        self.jobs, self.numbers = [], itertools.count()

    def text(self, job):
        chance = random.Random(next(self.numbers))
        written = job.tag if isinstance(job.tag, Written) else None
        if written is not None and written.kind in self.spoiled:
            return "short"
        if written is not None and written.stage == "document":
            body = " ".join(chance.choices(WORDS, k=60)) + "."
            return f"Here:\n```python\n{body}\n```\nDone." if KINDS[written.kind].source == CODE else body
        return " ".join(chance.choices(WORDS, k=12))

    def run(self, next_jobs):
        while jobs := list(next_jobs(self.at_once)):
            self.jobs += jobs
            yield [self.answered(job) for job in jobs]

    def answered(self, job):
        token_ids = [*self.target.tokenizer(self.text(job), add_special_tokens=False)["input_ids"], END]
        return Answer(job, token_ids[: job.params.max_tokens], len(token_ids) <= job.params.max_tokens)


def run(target, directory, author, until, **settings):
    config = SynthesisConfig(max_length=500, system_prompts=("Be brief.",), min_answer_tokens=4, **settings)
    with ShardWriter(directory, "synthesize", TargetIdentity.of(target), config.described()) as writer:
        counts = Synthesis(author, [writer], config, until).run()
        writer.finish()
    return counts


def conversations(target, directory, kind):
    shards = open_shards(directory).shards
    return [
        (target.tokenizer.decode(shard.token_ids[start:end].tolist()), shard.loss_mask[start:end])
        for shard in shards
        for number, (start, end) in enumerate(itertools.pairwise(shard.offsets.tolist()))
        if shard.kinds[shard.row_kinds[number]] == kind
    ]


def test_shares_are_read_and_sum_to_one():
    assert read_shares("summary=1, chat=3", 512) == {"summary": 0.25, "chat": 0.75}
    assert read_shares("chat", 64) == {"chat": 1.0} == read_shares("chat=0.3,code=0", 64)
    assert sum(read_shares(None, 2048).values()) == pytest.approx(1) and set(read_shares(None, 2048)) == set(KINDS)
    assert read_shares(None, 255) == {"chat": 1.0}, "documents do not fit"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sumary=1", "unknown kind 'sumary'"),
        ("chat=x", "'x' is not a number"),
        ("chat=-1", "the share of 'chat' must be 0 or more"),
        ("chat=1,chat=2", "'chat' is given twice"),
        ("", "has no share above 0"),
        ("chat=0", "has no share above 0"),
    ],
)
def test_bad_shares_are_refused(text, words):
    with pytest.raises(ConfigError) as caught:
        SynthesisConfig(kinds=text)
    assert words in caught.value.message and caught.value.hint


def test_a_kind_that_needs_documents_is_refused_for_short_rows():
    with pytest.raises(ConfigError, match="kind 'summary' requires rows of 256 tokens, but max_length is 128"):
        SynthesisConfig(kinds="summary", max_length=128)


def test_conversations_have_their_shares_are_recorded_and_are_inspected(target, tmp_path):
    counts = run(target, tmp_path, Author(target), Until(num_answers=100))
    expected = {name: round(100 * kind.share) for name, kind in KINDS.items()}
    assert counts["kinds"] == pytest.approx(expected, abs=2) and sum(counts["kinds"].values()) == 100
    more = run(target, tmp_path, Author(target), Until(num_answers=140))
    assert more["kinds"]["chat"] == pytest.approx(56, abs=2), "a later run goes on with the same shares"
    report = inspect(tmp_path, target.tokenizer)
    assert {name: found["num_conversations"] for name, found in report["kinds"].items()} == more["kinds"]
    assert sum(found["num_tokens"] for found in report["kinds"].values()) == report["num_tokens"]
    assert sum(found["num_trained_tokens"] for found in report["kinds"].values()) == report["num_trained_tokens"]
    assert report["kinds"]["chat"]["share"] == pytest.approx(0.4, abs=0.02)
    assert report["settings"]["kinds"]["chat"] == 0.4


def test_prompts_about_documents_hold_an_instruction_and_what_the_target_wrote(target, tmp_path):
    author = Author(target)
    run(target, tmp_path, author, Until(num_answers=30), kinds="summary=1,code=1,question=1")
    for text, mask in conversations(target, tmp_path, "summary"):
        assert any(instruction in text for instruction in KINDS["summary"].instructions) and not mask[:100].any()
    for text, _ in conversations(target, tmp_path, "code"):
        assert any(instruction in text for instruction in KINDS["code"].instructions)
        assert "Here:" not in text and "```" not in text, "only the code of the answer"
    for text, _ in conversations(target, tmp_path, "question"):
        assert "\n\nQuestion: " in text
    stages = Counter((job.tag.kind, job.tag.stage) for job in author.jobs if isinstance(job.tag, Written))
    assert stages["question", "about"] == 10 and stages["summary", "about"] == 0
    documents = stages["question", "document"] + stages["summary", "document"]
    assert 20 / 3 <= documents < 20, "a document leads several prompts"
    openings = {target.tokenizer.decode(job.prompt_ids) for job in author.jobs if isinstance(job.tag, Written)}
    for request in (TOPICS[CODE][0], DOCUMENTS[CODE][0], DOCUMENTS[TEXT][0]):
        assert any(request in opening for opening in openings)


def test_a_question_about_documents_is_its_first_line(target, tmp_path):
    class Chatty(Author):
        def text(self, job):
            is_about = isinstance(job.tag, Written) and job.tag.stage == "about"
            return super().text(job) + ("?\nResponse: the river" * 9 if is_about else "")

    run(target, tmp_path, Chatty(target), Until(num_answers=4), kinds="question")
    for text, _ in conversations(target, tmp_path, "question"):
        assert "Response" not in text and text.rpartition("Question: ")[2].split("<|im_end|>")[0].endswith("?")


def test_conversations_of_several_turns_train_every_answer(target, tmp_path):
    run(target, tmp_path, Author(target), Until(num_answers=12), kinds="turns", max_turns=3)
    turns = conversations(target, tmp_path, "turns")
    numbers = {text.count("<|im_start|>assistant\n") for text, _ in turns}
    assert len(turns) == 12 and numbers == {2, 3}
    for text, mask in turns:
        starts = int((mask[1:] & ~mask[:-1]).sum())
        assert starts == text.count("<|im_start|>assistant\n") == text.count("<|im_start|>user\n") and mask[-1]


def test_a_conversation_ends_before_a_follow_up_that_cannot_be_used(target, tmp_path):
    class Silent(Author):
        def text(self, job):
            return "no" if getattr(job.tag, "is_asking", False) else super().text(job)

    counts = run(target, tmp_path, Silent(target), Until(num_answers=3), kinds="turns")
    assert counts["num_rows"] == 3 and not counts["dropped"]
    assert all(mask[-1] and text.count("assistant\n") == 1 for text, mask in conversations(target, tmp_path, "turns"))


def test_held_out_conversations_are_of_every_kind(target, tmp_path):
    config = SynthesisConfig(
        max_length=500,
        system_prompts=("Be brief.",),
        min_answer_tokens=4,
        kinds="chat=2,summary=1,code=1",
        num_held_out=8,
        temperatures=(0.0,),
    )
    identity = TargetIdentity.of(target)
    directories = [tmp_path, tmp_path / "held_out"]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(ShardWriter(each, "synthesize", identity, {})) for each in directories]
        Synthesis(Author(target), writers, config, Until(num_answers=40)).run()
        assert writers[1].counts["kinds"] == {"chat": 4, "summary": 2, "code": 2}


@pytest.mark.parametrize("keep_cut", [False, True])
def test_long_answers_are_written_in_pieces_up_to_the_end_of_the_row(target, tmp_path, keep_cut):
    class Endless(Author):
        def answered(self, job):
            if isinstance(job.tag, Written):
                return super().answered(job)
            chance = random.Random(next(self.numbers))
            return Answer(job, [chance.randrange(20, 250) for _ in range(job.params.max_tokens)], False)

    author = Endless(target)
    settings = {"kinds": "long", "max_answer_tokens": 60, "keep_cut": keep_cut}
    counts = run(target, tmp_path, author, Until(num_answers=2), **settings)
    assert counts["num_rows"] == 2 and not counts["dropped"]
    for text, mask in conversations(target, tmp_path, "long"):
        assert LONG_REQUEST in text and len(mask) > 490 and int((mask[1:] & ~mask[:-1]).sum()) == 1
    sizes = [job.params.max_tokens for job in author.jobs if not isinstance(job.tag, Written)]
    assert len(sizes) >= 10 and max(sizes) == 60, "loops are found after each piece"


@pytest.mark.parametrize(("keep_loops", "num_tokens"), [(False, 60), (True, 92)])
def test_a_long_answer_ends_with_the_piece_that_loops(target, tmp_path, keep_loops, num_tokens):
    class Looping(Author):
        def answered(self, job):
            if isinstance(job.tag, Written):
                return super().answered(job)
            is_first = not job.tag.spans
            return Answer(job, list(range(20, 80)) if is_first else [30, 31, 32] * 20, False)

    settings = {"kinds": "long", "max_answer_tokens": 60, "keep_cut": True, "keep_loops": keep_loops}
    run(target, tmp_path, Looping(target), Until(num_answers=2), **settings)
    assert [int(mask.sum()) for _, mask in conversations(target, tmp_path, "long")] == [num_tokens] * 2


def test_a_kind_of_which_nothing_is_usable_is_given_up_and_that_is_said(target, tmp_path, caplog):
    author = Author(target, spoiled=("summary",))
    counts = run(target, tmp_path, author, Until(num_answers=40), kinds="chat=1,summary=1")
    assert counts["kinds"] == {"chat": 40} and counts["dropped"]["question: short"] >= 64
    assert "kind summary: none of the first 64 is usable; going on without it" in caplog.text


def test_faulty_documents_are_dropped_and_counted_by_reason(target, tmp_path):
    texts = iter(["too short", "the same words " * 40, "no block of code in it, but " + " ".join(WORDS * 2)])

    class Careless(Author):
        def text(self, job):
            is_document = isinstance(job.tag, Written) and job.tag.stage == "document"
            return next(texts, None) or super().text(job) if is_document else super().text(job)

    counts = run(target, tmp_path, Careless(target, at_once=1), Until(num_answers=6), kinds="summary=1,code=1")
    assert counts["dropped"]["document: short"] == 1 or counts["dropped"]["document: no code"] >= 1
    assert set(counts["dropped"]) <= {"document: short", "document: loops", "document: no code"}


def test_given_documents_are_used_instead_of_written_ones(target, tmp_path):
    paragraphs = [f"Paragraph {number} says something new about it." for number in range(60)]
    (tmp_path / "report.md").write_text("\n\n".join(paragraphs))
    (tmp_path / "tool.py").write_text("def tool():\n    return 1\n" * 12)
    rows = "".join(json.dumps({"text": f"Row {number}: {' '.join(WORDS)}."}) + "\n" for number in range(3))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    paths = (tmp_path / "report.md", tmp_path / "tool.py", tmp_path / "rows.jsonl.gz")
    found = read_documents(paths)
    assert [len(found[source]) for source in (TEXT, CODE)] == [4, 1]
    author = Author(target)
    run(target, tmp_path / "out", author, Until(num_answers=12), kinds="summary=3,code=1", documents=paths)
    assert not any(isinstance(job.tag, Written) for job in author.jobs)
    summaries = [text for text, _ in conversations(target, tmp_path / "out", "summary")]
    assert any("Paragraph" in text for text in summaries) and any("Row 1" in text for text in summaries)
    assert all("def tool" in text for text, _ in conversations(target, tmp_path / "out", "code"))
    manifest = open_shards(tmp_path / "out").manifest
    assert [file["name"] for file in manifest["settings"]["documents"]] == [path.name for path in paths]


def test_a_row_without_a_document_is_refused_by_its_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: no document found; keys found: body"):
        read_documents([tmp_path / "rows.jsonl"])


def test_passages_fill_the_length_asked_for_and_begin_and_end_with_paragraphs(target):
    paragraphs = [f"Paragraph {number} is here." for number in range(100)]
    shelf = Shelf(target.tokenizer, random.Random(0), ["\n\n".join(paragraphs)], 1)
    (passage,) = shelf.passages(300, is_single=True)
    assert set(passage.split("\n\n")) <= set(paragraphs) and len(target.tokenizer(passage)["input_ids"]) > 150
    shelf = Shelf(target.tokenizer, random.Random(0), (), 2)
    for number in range(20):
        shelf.add(f"Document {number} " + " ".join(WORDS))
    several = shelf.passages(600)
    assert 3 <= len(several) == len(set(several))
    assert sum(len(target.tokenizer(text)["input_ids"]) for text in several) <= 600
