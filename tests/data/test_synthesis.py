"""The target's own questions and answers: which are kept, how often each thing is asked for, and when it ends."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from harness.tiny_models import CHATML, tiny_target, tiny_tokenizer
from peagle.checkpoint.card import TargetIdentity
from peagle.data.asking import Written, loops, num_repeated
from peagle.data.config import SynthesisConfig, Until
from peagle.data.generation import Generator, Job
from peagle.data.prompts import Dialog
from peagle.data.shard_writer import ShardWriter
from peagle.data.shards import open_shards, total
from peagle.data.synthesis import Synthesis, check, estimated_tokens
from peagle.errors import ConfigError, DataError, RequestError

CONFIG = SynthesisConfig(max_length=120, system_prompts=("Be brief.",), temperatures=(0.0, 0.7))


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=2)


class Scripted(NamedTuple):
    job: Job
    token_ids: list[int]
    is_ended: bool


class ScriptedGenerator:
    """Stands where the engine does; its questions and answers are given, so that each way out can be taken."""

    max_length = 120

    def __init__(self, target, questions=(), answers=(), at_once=1):
        self.target, self.at_once = target, at_once
        self.questions, self.answers = iter(questions), iter(answers)
        self.jobs = []

    def run(self, next_jobs):
        while jobs := list(next_jobs(self.at_once)):
            self.jobs += jobs
            found = [
                (job, next(self.questions if isinstance(job.tag, Written) else self.answers, None)) for job in jobs
            ]
            answers = [Scripted(job, ids, ids[-1] == 2) for job, ids in found if ids is not None]
            if not answers:
                return
            yield answers


def spoken(target, text, ended=True):
    return target.tokenizer(text, add_special_tokens=False)["input_ids"] + [2] * ended


def answer(number=0, length=20):
    return [20 + (number + index) % 200 for index in range(length - 1)] + [2]


def run(target, directory, generator, config=CONFIG, until=None, given=()):
    identity = TargetIdentity.of(target)
    with ShardWriter(directory, "synthesize", identity, {}) as writer:
        with ShardWriter(directory / "held_out", "synthesize", identity, {}) as held_out:
            return Synthesis(generator, [writer, held_out], config, until or Until(seconds=60), given).run()


def texts(target, directory):
    return [
        target.tokenizer.decode(shard.token_ids[start:end].tolist())
        for shard in open_shards(directory).shards
        for start, end in itertools.pairwise(shard.offsets.tolist())
    ]


def prompt(text, where="prompts.jsonl:1"):
    return Dialog(where, ({"role": "user", "content": text},))


def test_faulty_questions_are_dropped_and_counted_by_reason(target, tmp_path):
    questions = [
        spoken(target, "What is the use?"),
        spoken(target, "short"),
        spoken(target, "a question that was cut", ended=False),
        spoken(target, "  What is the use?  "),
        spoken(target, "words " * 30),
        spoken(target, "q" + "abcdefgh" * 8),
        spoken(target, "Another question?"),
    ]
    generator = ScriptedGenerator(target, questions, [answer(0), answer(50)])
    counts = run(target, tmp_path, generator)
    assert counts["dropped"] == {
        "question: loops": 2,
        "question: short": 1,
        "question: cut": 1,
        "question: asked before": 1,
    }
    assert counts["num_rows"] == 2 and counts["num_answer_tokens"] == 40
    assert texts(target, tmp_path)[0].startswith(
        "<|im_start|>user\nWhat is the use?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_faulty_answers_and_long_prompts_are_dropped_and_counted_by_reason(target, tmp_path):
    answers = [
        answer(length=11),
        [30, 31, 32, 33] * 12 + [2],
        [*answer(7)[:-1], 9],
        answer(9),
    ]
    questions = [spoken(target, f"the question number {n}") for n in range(4)] + [
        spoken(target, "".join(map(chr, range(40, 110))))
    ]
    counts = run(target, tmp_path, ScriptedGenerator(target, questions, answers))
    assert counts["dropped"] == {
        "answer: short": 1,
        "answer: loops": 1,
        "answer: cut": 1,
        "prompt: too long": 1,
    }
    assert counts["num_rows"] == 1


def test_rows_hold_the_tokens_that_were_asked_and_answered_and_train_the_answer_alone(target, tmp_path):
    generator = ScriptedGenerator(target, [spoken(target, "What is the use?")], [answer(3)])
    run(target, tmp_path, generator)
    (shard,) = open_shards(tmp_path).shards
    (asked,) = [job for job in generator.jobs if not isinstance(job.tag, Written)]
    assert shard.token_ids.tolist() == asked.prompt_ids + answer(3)
    assert shard.loss_mask.tolist() == [False] * len(asked.prompt_ids) + [True] * 20
    assert shard.temperatures.tolist() == pytest.approx([asked.params.temperature])


def test_cut_and_looping_answers_are_kept_on_request(target, tmp_path):
    questions = [spoken(target, f"the question number {n}") for n in range(3)]
    answers = [answer(3)[:-1], [30, 31, 32, 33] * 12 + [2], [30, 31, 32, 33] * 12]
    for number, (kept, num_rows) in enumerate((({"keep_cut": True}, 1), ({"keep_loops": True}, 1))):
        config = SynthesisConfig(max_length=120, system_prompts=("Be brief.",), **kept)
        counts = run(target, tmp_path / str(number), ScriptedGenerator(target, questions, answers), config)
        assert counts["num_rows"] == num_rows
    config = SynthesisConfig(max_length=120, system_prompts=("Be brief.",), keep_cut=True, keep_loops=True)
    assert run(target, tmp_path / "both", ScriptedGenerator(target, questions, answers), config)["num_rows"] == 3
    (shard,) = open_shards(tmp_path / "both").shards
    assert [int(mask.sum()) for mask in np.split(shard.loss_mask, shard.offsets[1:-1])] == [19, 32, 32], "loops are cut"


def test_questions_begin_right_after_the_header_of_a_user_turn_under_every_system_prompt(target, tmp_path):
    config = SynthesisConfig(max_length=120, system_prompts=("Be brief.", ""))
    generator = ScriptedGenerator(target, at_once=40)
    run(target, tmp_path, generator, config)
    begun = {target.tokenizer.decode(job.prompt_ids) for job in generator.jobs}
    assert begun == {"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", "<|im_start|>user\n"}
    params = generator.jobs[0].params
    half_a_row = config.max_length // 2
    assert (params.temperature, params.max_tokens) == (config.question_temperature, half_a_row), (
        "longer ones are dropped"
    )
    assert len({job.params.seed for job in generator.jobs}) == 40, "each has random numbers of its own"


def test_given_prompts_are_answered_once_each_and_at_their_share(target, tmp_path):
    config = SynthesisConfig(max_length=120, system_prompts=("Be brief.",), given_share=0.5)
    given = [prompt(f"given prompt {number}") for number in range(4)] + [prompt("given prompt 0")]
    questions = [spoken(target, f"the question number {n}") for n in range(6)]
    generator = ScriptedGenerator(target, questions, [answer(n) for n in range(20)])
    run(target, tmp_path, generator, config, given=given)
    asked = ["given" if "given prompt" in text else "own" for text in texts(target, tmp_path)]
    assert asked[:7] == ["given", "own", "given", "own", "given", "own", "given"] and asked[7:] == ["own"] * 3


def test_given_prompts_that_say_the_same_are_counted_once_over_all_runs_and_another_system_prompt_says_more(
    target, tmp_path
):
    def under(system_prompt, *texts):
        turns = [{"role": "user", "content": text} for text in texts]
        return Dialog("file:1", [{"role": "system", "content": system_prompt}, *turns])

    config = SynthesisConfig(max_length=120, system_prompts=("Be brief.",), given_share=1.0)
    given = [prompt("a question"), under("Be kind.", "a question"), under("Be rude.", "a question")]
    given += [prompt(" a question "), under("Be kind.", "a question"), under("Be kind.", "a question", "and then?")]
    for num_answers, num_rows in ((1, 1), (5, 3), (5, 3)):
        generator = ScriptedGenerator(target, [], [answer(n) for n in range(num_answers)])
        counts = run(target, tmp_path, generator, config, given=given)
        assert counts["num_rows"] == num_rows and counts["dropped"] == {"prompt: given before": 3}
    head, tail = "<|im_start|>system\n", "<|im_start|>user\na question<|im_end|>\n<|im_start|>assistant\n"
    openings = {text.partition(tail)[0] for text in texts(target, tmp_path)}
    assert openings == {"", f"{head}Be kind.<|im_end|>\n", f"{head}Be rude.<|im_end|>\n"}


def test_a_question_that_was_given_is_not_asked_for_a_second_time(target, tmp_path):
    generator = ScriptedGenerator(target, [spoken(target, "a given question")], [answer()])
    counts = run(target, tmp_path, generator, given=[prompt("a given question")])
    assert counts["num_rows"] == 1 and counts["dropped"] == {"question: asked before": 1}


def test_of_given_conversations_the_first_turn_is_answered(target, tmp_path):
    messages = [("assistant", "Hi"), ("system", "Be kind."), ("user", "first"), ("assistant", "b"), ("user", "second")]
    dialog = Dialog("file:1", [{"role": role, "content": text} for role, text in messages])
    run(target, tmp_path, ScriptedGenerator(target, [], [answer()]), given=[dialog])
    (text,) = texts(target, tmp_path)
    assert text.startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n"
    )


def test_nothing_answered_in_an_earlier_run_is_asked_again(target, tmp_path):
    given = [prompt("given prompt 0"), prompt("given prompt 1")]
    config = SynthesisConfig(max_length=120, system_prompts=("Be brief.",), given_share=1.0)
    first = ScriptedGenerator(target, [spoken(target, "What is the use?")], [answer(n) for n in range(3)])
    run(target, tmp_path, first, config, given=given)
    second = ScriptedGenerator(
        target, [spoken(target, "What is the use?"), spoken(target, "Something new?")], [answer(n) for n in range(3)]
    )
    counts = run(target, tmp_path, second, config, given=given)
    assert counts["num_rows"] == 4 and counts["dropped"] == {"question: asked before": 1}
    assert len(set(texts(target, tmp_path))) == 4
    seeds = [{job.params.seed for job in generator.jobs} for generator in (first, second)]
    assert not seeds[0] & seeds[1], "a second run does not draw the numbers of the first"


def test_greedy_answers_are_set_apart_up_to_the_number_asked_for(target, tmp_path):
    config = SynthesisConfig(max_length=120, system_prompts=("x",), temperatures=(0.0, 0.9), num_held_out=3)
    questions = [spoken(target, f"the question number {n}") for n in range(30)]
    # The first greedy answer is of no use; another takes its place.
    answers = [answer(n) for n in range(30)]
    generator = ScriptedGenerator(target, questions, [[20, 2]] * 2 + answers)
    run(target, tmp_path, generator, config)
    (apart,) = open_shards(tmp_path / "held_out").shards
    assert apart.num_rows == 3 and set(apart.temperatures.tolist()) == {0.0}
    trained = np.concatenate([shard.keys for shard in open_shards(tmp_path).shards])
    assert not set(apart.keys.tolist()) & set(trained.tolist())
    counts = run(target, tmp_path, ScriptedGenerator(target, [spoken(target, "A new one?")], [answer()]), config)
    assert counts["num_rows"] == 29
    assert open_shards(tmp_path / "held_out").counts()["num_rows"] == 3, "a later run adds none"


@pytest.mark.parametrize("at_once", [1, 5, 50])
def test_a_number_of_answers_is_met_exactly(target, tmp_path, at_once):
    questions = [spoken(target, f"the question number {n}") for n in range(60)]
    answers = [answer(n, length=5 if n % 3 else 20) for n in range(60)]
    generator = ScriptedGenerator(target, questions, answers, at_once)
    assert run(target, tmp_path, generator, until=Until(num_answers=7))["num_rows"] == 7
    again = ScriptedGenerator(target, [], [], at_once)
    assert run(target, tmp_path, again, until=Until(num_answers=7))["num_rows"] == 7 and again.jobs == []


def test_a_number_of_tokens_is_reached_and_not_passed_by_much(target, tmp_path):
    questions = [spoken(target, f"the question number {n}") for n in range(60)]
    generator = ScriptedGenerator(target, questions, [answer(n) for n in range(60)], at_once=4)
    counts = run(target, tmp_path, generator, until=Until(num_tokens=210))
    assert 210 <= counts["num_answer_tokens"] <= 210 + 4 * 20


def test_nothing_is_started_after_the_deadline(target, tmp_path):
    generator = ScriptedGenerator(target, [spoken(target, "never asked for")], [])
    run(target, tmp_path, generator, until=Until(seconds=1e-9), given=[prompt("a prompt")])
    assert generator.jobs == []


@pytest.mark.parametrize(
    ("question", "reason"), [("cut", "question: cut"), ("same", "question: asked before"), ("", "prompt: too long")]
)
def test_a_target_of_which_no_question_is_of_use_is_given_up(target, tmp_path, question, reason):
    if question:
        endless = itertools.repeat(spoken(target, f"the {question} question", ended=question != "cut"))
    else:
        endless = (spoken(target, f"{number:06d}" + "".join(map(chr, range(40, 110)))) for number in itertools.count())
    generator = ScriptedGenerator(target, endless, itertools.repeat(answer()), at_once=4)
    with pytest.raises(DataError) as caught:
        run(target, tmp_path, generator)
    assert caught.value.message.startswith("none of the last 51") and f" is usable: {reason} (" in caught.value.message
    assert "max_question_tokens" in caught.value.hint


def test_given_prompts_are_answered_where_no_question_is_of_use(target, tmp_path):
    config = SynthesisConfig(max_length=120, system_prompts=("Be brief.",), given_share=1.0)
    questions = itertools.repeat(spoken(target, "a question that was cut", ended=False))
    generator = ScriptedGenerator(target, questions, itertools.repeat(answer()), at_once=4)
    given = [prompt(f"the prompt number {number}") for number in range(600)]
    assert run(target, tmp_path, generator, config, Until(num_answers=600), given)["num_rows"] == 600


def test_a_target_of_which_no_answer_is_of_use_is_given_up(target, tmp_path):
    questions = [spoken(target, f"the question number {n}") for n in range(200)]
    generator = ScriptedGenerator(target, questions, [answer(n)[:-1] for n in range(200)])
    with pytest.raises(DataError) as caught:
        run(target, tmp_path, generator)
    assert caught.value.message == "none of the first 64 answers is usable: answer: cut (64)"
    assert "--keep-cut" in caught.value.hint


def test_many_cut_answers_are_said(target, tmp_path, caplog):
    questions = [spoken(target, f"the question number {n}") for n in range(80)]
    answers = [answer(n)[: None if n % 4 == 0 else -1] for n in range(80)]
    run(target, tmp_path, ScriptedGenerator(target, questions, answers))
    assert "48 of the first 64 answers were dropped because they reach max_length 120" in caplog.text


def on_template(target, template, action):
    tokenizer, target.tokenizer = target.tokenizer, tiny_tokenizer(chat_template=template)
    try:
        return action()
    finally:
        target.tokenizer = tokenizer


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML


def test_a_template_that_takes_no_system_message_is_used_without_and_that_is_said(target, tmp_path, caplog):
    config = SynthesisConfig(max_length=120, system_prompts=("", "a", "b"))
    generator = ScriptedGenerator(target)
    caplog.set_level("INFO")
    on_template(target, NO_SYSTEM, lambda: run(target, tmp_path, generator, config))
    assert "using 1 of the 3 system prompts" in caplog.text and "no system here" in caplog.text
    assert target.tokenizer.decode(generator.jobs[0].prompt_ids) == "<|im_start|>user\n"
    with pytest.raises(RequestError, match="no system here"):
        on_template(target, NO_SYSTEM, lambda: check(target, CONFIG))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML.replace("<|im_end|>", ""), "the chat template puts no end-of-turn token after an answer"),
        (
            CHATML.replace(
                "message['content'] + '<|im_end|>'", "message['content'] + ('<|im_end|>' if loop.index > 1 else ' END')"
            ),
            "puts no end-of-turn token after a user message, only ' END\\n",
        ),
    ],
)
def test_templates_without_boundaries_are_refused_with_the_reason(target, template, words):
    plain = SynthesisConfig(max_length=120, system_prompts=("",))
    with pytest.raises(DataError) as caught:
        on_template(target, template, lambda: check(target, plain))
    assert words in caught.value.message


def test_a_given_prompt_that_the_template_refuses_is_named_by_its_line(target, tmp_path):
    dialog = Dialog("file:7", [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    config = SynthesisConfig(max_length=120, system_prompts=("",))
    with pytest.raises(DataError, match="file:7: the target's chat template refuses"):
        on_template(target, NO_SYSTEM, lambda: run(target, tmp_path, ScriptedGenerator(target), config, given=[dialog]))


def test_an_end_must_be_named_and_be_possible(target):
    with pytest.raises(ConfigError, match="no stopping condition"):
        Until()
    with pytest.raises(ConfigError, match="num_answers must be above 0, got 0"):
        Until(num_answers=0)
    with pytest.raises(ConfigError, match="max_length 513 exceeds the target's 512"):
        check(target, SynthesisConfig(max_length=513))
    with pytest.raises(ConfigError, match=r"max_length 40 leaves no room for a question: .* takes \d+ tokens"):
        check(target, SynthesisConfig(max_length=40, system_prompts=("", "Be brief, and then some more.")))


def test_the_estimate_is_of_what_is_still_to_be_written(target):
    nothing = total([])
    assert estimated_tokens(target, CONFIG, Until(num_answers=10, num_tokens=10**9), nothing) == 11 * 120
    assert estimated_tokens(target, CONFIG, Until(num_tokens=1000), nothing) == 2000 + 120
    written = nothing | {"num_rows": 4, "num_tokens": 470, "num_answer_tokens": 300}
    assert estimated_tokens(target, CONFIG, Until(num_answers=10), written) == 7 * 120
    assert estimated_tokens(target, CONFIG, Until(num_tokens=1000), written) == 1400 + 120
    assert estimated_tokens(target, CONFIG, Until(num_answers=3), written) == 120, "there is enough"
    # Seconds are those of the run, whatever others have written.
    seconds = Until(seconds=2)
    assert estimated_tokens(target, CONFIG, seconds, written) == estimated_tokens(target, CONFIG, seconds, nothing)


def test_what_a_loop_repeats_more_than_three_times_is_counted():
    words = np.arange(100, dtype=np.int32)
    for passage, num_times, num_more in ((50, 3, 0), (50, 4, 50), (3, 20, 28), (1, 40, 8)):
        looping = np.concatenate((words[:40], 200 + np.tile(words[:passage], num_times)))
        assert num_repeated(looping) == num_more
    assert num_repeated(words) == 0


def test_loops_are_repetitions_at_the_end_and_nothing_else():
    words = np.random.default_rng(0).integers(0, 1000, 200).astype(np.int32)
    once, twice = words[:50], np.tile(words[:50], 2)
    assert not loops(words) and not loops(once) and not loops(words[:3]) and not loops(words[:0])
    assert not loops(twice), "a passage that comes twice"
    assert loops(np.concatenate((words, np.tile(words[:50], 3))))
    assert loops(np.concatenate((words, np.full(40, 7, np.int32))))
    assert not loops(np.concatenate((words, np.full(9, 7, np.int32)))), "a few dashes"
    assert loops(np.concatenate((words, np.tile(words[:3], 14)[:-1])))


@pytest.mark.slow
def test_a_target_writes_its_own_questions_and_answers_through_the_engine(target, tmp_path):
    # At this temperature a random model ends a text of a few hundred tokens about every second time.
    config = SynthesisConfig(max_length=400, temperatures=(9.0,), question_temperature=9.0, system_prompts=("", "Be."))
    with Generator(target, max_length=400, max_batch=8) as feed:
        counts = run(target, tmp_path, feed, config, Until(num_answers=2), [prompt("the user asks")])
        again = run(target, tmp_path, feed, config, Until(num_answers=3), [prompt("the user asks")])
    assert (counts["num_rows"], again["num_rows"]) == (2, 3) and again["dropped"]
    for shard in open_shards(tmp_path).shards:
        assert shard.token_ids[shard.offsets[1:] - 1].tolist() == [2] * shard.num_rows, "every answer has its end"
    assert len(set(texts(target, tmp_path))) == 3
