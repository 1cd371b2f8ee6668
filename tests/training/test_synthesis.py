"""The seated generator against transformers, and which of the target's own questions and answers are kept."""

import time

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from peagle.errors import ConfigError, RequestError, TargetError
from peagle.targets.hf import HFTarget
from peagle.training.synthesis import (
    Job,
    SeatedGenerator,
    SynthesisConfig,
    SynthesisCounts,
    answer_greedily,
    synthesize,
)
from tiny import tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=3)


def prompts(*lengths):
    chance = torch.Generator().manual_seed(3)
    return [torch.randint(3, 260, (length,), generator=chance).tolist() for length in lengths]


def generated(target, prompt_ids, max_tokens):
    output = target.model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    return output[0, len(prompt_ids) :].tolist()


def test_greedy_answers_equal_those_of_transformers_with_more_jobs_than_seats(target):
    asked = prompts(1, 5, 17, 9, 2, 30, 4, 11)
    expected = {tuple(prompt): generated(target, prompt, 20) for prompt in asked}
    with SeatedGenerator(target, num_seats=3, max_length=64) as generator:
        rows = list(answer_greedily(generator, asked, max_tokens=20))
    assert len(rows) == len(asked)
    for row in rows:
        assert row["answer_ids"] == expected[tuple(row["prompt_ids"])]
    assert {row["temperature"] for row in rows} == {0.0}


def test_an_answer_ends_with_the_end_token_and_keeps_it(target):
    prompt = prompts(6)[0]
    answer = generated(target, prompt, 12)
    target_ids, target.eos_token_ids = target.eos_token_ids, frozenset({answer[4]})
    try:
        with SeatedGenerator(target, num_seats=2, max_length=64) as generator:
            (row,) = answer_greedily(generator, [prompt], max_tokens=30)
    finally:
        target.eos_token_ids = target_ids
    assert row["answer_ids"] == answer[: answer.index(answer[4]) + 1]


def test_an_answer_ends_where_its_seat_does(target):
    prompt = prompts(6)[0]
    with SeatedGenerator(target, num_seats=1, max_length=16) as generator:
        rows = list(answer_greedily(generator, [prompt, prompts(15)[0]], max_tokens=100))
    assert [len(row["answer_ids"]) for row in rows] == [10, 1]


def test_no_jobs_give_no_answers(target):
    with SeatedGenerator(target, num_seats=2, max_length=16) as generator:
        assert list(answer_greedily(generator, [], max_tokens=4)) == []


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_sampled_tokens_follow_the_targets_distribution(target, temperature):
    prompt, num_draws = prompts(8)[0], 1500
    logits = target.forward(torch.tensor([prompt])).logits_BTV[0, -1]
    probs = torch.softmax(logits / temperature, -1)
    with SeatedGenerator(target, num_seats=250, max_length=10) as generator:
        jobs = iter([Job(prompt, temperature, 1)] * num_draws)
        drawn = [tokens for _, tokens in generator.run(lambda: next(jobs, None))]
    assert len(drawn) == num_draws and {len(tokens) for tokens in drawn} == {1}
    counts = torch.bincount(torch.tensor(drawn)[:, 0], minlength=len(probs)).double()
    order = probs.argsort(descending=True)
    groups = [order[:1], order[1:3], order[3:10], order[10:40], order[40:]]
    expected = torch.stack([probs[group].sum() for group in groups]).double() * num_draws
    observed = torch.stack([counts[group].sum() for group in groups])
    is_large = expected > 5
    chi_square = float(((observed - expected) ** 2 / expected)[is_large].sum())
    assert is_large.sum() >= 3 and chi_square < 20, f"{observed.tolist()} against {expected.tolist()}"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_targets_own_attention_is_back_after_closing(implementation):
    target = tiny_target(num_layers=2)
    target.model.set_attn_implementation(implementation)
    token_ids = torch.tensor(prompts(7))
    before = target.forward(token_ids).logits_BTV
    generator = SeatedGenerator(target, num_seats=1, max_length=16)
    assert target.model.config._attn_implementation == "peagle_seats"
    generator.close()
    assert target.model.config._attn_implementation == implementation
    assert torch.equal(target.forward(token_ids).logits_BTV, before)
    with pytest.raises(KeyboardInterrupt), SeatedGenerator(target, num_seats=1, max_length=16):
        raise KeyboardInterrupt
    assert target.model.config._attn_implementation == implementation


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job([], 0.0, 4), "between 1 and 15 tokens, got 0"),
        (Job([5] * 16, 0.0, 4), "between 1 and 15 tokens, got 16"),
        (Job([5], 0.0, 0), "max_tokens must be at least 1"),
        (Job([5], -1.0, 4), "the temperature at least 0, got 4 and -1.0"),
    ],
)
def test_a_job_that_cannot_be_seated_is_refused(target, job, words):
    with SeatedGenerator(target, num_seats=1, max_length=16) as generator:
        jobs = iter([job])
        with pytest.raises(RequestError) as caught:
            list(generator.run(lambda: next(jobs, None)))
    assert words in caught.value.message


def test_seats_longer_than_the_target_are_refused(target):
    for num_seats, max_length in ((0, 16), (1, 513), (1, 1)):
        with pytest.raises(ConfigError, match="max_length between 2 and the target's 512"):
            SeatedGenerator(target, num_seats, max_length)


def windowed_target(window):
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=288,
        max_position_embeddings=64,
        sliding_window=window,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return HFTarget(MistralForCausalLM(config), tiny_tokenizer(), name="windowed")


def test_a_window_that_would_matter_is_refused_and_one_that_cannot_is_not():
    prompt = prompts(5)[0]
    with SeatedGenerator(windowed_target(8), num_seats=1, max_length=16) as generator:
        with pytest.raises(TargetError, match="MistralForCausalLM attends with a sliding window"):
            list(answer_greedily(generator, [prompt], max_tokens=4))
    wide = windowed_target(32)
    expected = generated(wide, prompt, 8)
    with SeatedGenerator(wide, num_seats=1, max_length=16) as generator:
        assert [row["answer_ids"] for row in answer_greedily(generator, [prompt], 8)] == [expected]


class ScriptedGenerator:
    """Stands where the seats do; its questions and answers are given, so that each way out can be taken."""

    def __init__(self, target, questions, answers, max_length=120):
        self.target, self.max_length = target, max_length
        self.questions, self.answers = iter(questions), iter(answers)
        self.jobs = []

    def run(self, next_job):
        while (job := next_job()) is not None:
            self.jobs.append(job)
            tokens = next(self.questions if job.tag == "question" else self.answers, None)
            if tokens is None:
                return
            yield job, tokens


CONFIG = SynthesisConfig(system_prompts=("Be brief.",), answer_temperatures=(0.0, 0.7))


def spoken(target, text, ended=True):
    return target.tokenizer(text, add_special_tokens=False)["input_ids"] + [2] * ended


def test_short_cut_repeated_and_long_questions_are_dropped_and_counted(target):
    questions = [
        spoken(target, "What is the use?"),
        spoken(target, "short"),
        spoken(target, "a question that was cut", ended=False),
        spoken(target, "  What is the use?  "),
        spoken(target, "words " * 30),
        spoken(target, "Another question?"),
    ]
    answers = [list(range(20, 40)), list(range(20, 30))]
    generator, counts = ScriptedGenerator(target, questions, answers), SynthesisCounts()
    rows = list(synthesize(generator, CONFIG, [], 60, counts))
    assert counts.dropped == {"question": 2, "repeated": 1, "long": 1, "answer": 1}
    assert counts.questions == 3 and counts.answers == 1 and counts.answer_tokens == 20
    (row,) = rows
    asked = "<|im_start|>user\nWhat is the use?<|im_end|>\n<|im_start|>assistant\n"
    assert target.tokenizer.decode(row["prompt_ids"]) == asked
    assert row["answer_ids"] == list(range(20, 40)) and row["temperature"] in CONFIG.answer_temperatures


def test_questions_begin_right_after_the_header_of_a_user_turn(target):
    generator = ScriptedGenerator(target, [], [])
    assert list(synthesize(generator, CONFIG, [], 60, SynthesisCounts())) == []
    (job,) = generator.jobs
    assert target.tokenizer.decode(job.prompt_ids) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert (job.temperature, job.max_tokens) == (CONFIG.question_temperature, CONFIG.max_question_tokens)


def test_given_prompts_are_answered_each_once_even_an_empty_one(target):
    config = SynthesisConfig(given_share=1.0, system_prompts=CONFIG.system_prompts)
    generator = ScriptedGenerator(target, [], [list(range(20, 40))] * 5)
    rows = list(synthesize(generator, config, ["first prompt", "", "third"], 60, SynthesisCounts()))
    texts = sorted(target.tokenizer.decode(row["prompt_ids"]) for row in rows)
    middles = [text.removeprefix("<|im_start|>user\n").split("<|im_end|>")[0] for text in texts]
    assert sorted(middles) == ["", "first prompt", "third"]


def test_nothing_is_started_after_the_deadline(target):
    generator = ScriptedGenerator(target, [spoken(target, "never asked for")], [])
    assert list(synthesize(generator, CONFIG, ["a prompt"], -1, SynthesisCounts())) == []
    assert generator.jobs == []


def test_a_template_that_takes_no_system_message_is_refused_in_words(target):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    tokenizer, target.tokenizer = target.tokenizer, tiny_tokenizer(chat_template=refusing)
    try:
        with pytest.raises(RequestError, match="no system here"):
            list(synthesize(ScriptedGenerator(target, [], []), CONFIG, [], 60, SynthesisCounts()))
    finally:
        target.tokenizer = tokenizer


def test_a_target_writes_rows_on_its_own_within_the_time(target):
    counts, started = SynthesisCounts(), time.monotonic()
    config = SynthesisConfig(given_share=1.0, system_prompts=("Be brief.",), max_question_tokens=12)
    with SeatedGenerator(target, num_seats=8, max_length=80) as generator:
        rows = list(synthesize(generator, config, ["the user asks"] * 6, 0.5, counts))
    assert time.monotonic() - started < 30
    assert counts.answers == len(rows) and counts.answer_tokens == sum(len(row["answer_ids"]) for row in rows)
    assert counts.answers + counts.dropped["answer"] >= 6
