"""`peagle generate`: what goes where, what the answer is, and what the options change."""

import io
import re

import pytest
from rich.console import Console

from harness.tiny_models import tiny_tokenizer
from peagle.cli.generate import WARMUP_TOKENS
from peagle.compare.divergence import Divergence
from peagle.console.display import Display
from peagle.drafter.config import DrafterConfig
from peagle.engine.engine import Engine
from peagle.engine.outputs import Update
from peagle.targets.load import load_target

PROMPT = "Tell the user."
LENGTH = 12


@pytest.fixture
def generate(peagle, on_models):
    def call(*argv, prompt=PROMPT):
        result = peagle("generate", prompt, "--max-tokens", LENGTH, "--ignore-eos", *on_models, *argv)
        assert result.status == 0, result.err
        return result

    return call


def token_ids(result):
    return result.json["answers"][-1]["token_ids"]


def test_the_answer_is_all_of_stdout_and_the_same_as_in_the_document(generate):
    streamed, document = generate(), generate("--json").json
    (answer,) = document["answers"]
    assert streamed.out == answer["text"] + "\n"
    assert len(answer["token_ids"]) == LENGTH and answer["finish_reason"] == "length"
    assert answer["method"] == "p-eagle, tree of 31"
    assert answer["tokens_per_second"] > 0 and answer["acceptance_length"] >= 1
    assert 0 < answer["time_to_first_token"] < answer["seconds"]
    assert "logprobs" not in answer, "nobody asked"
    assert tiny_tokenizer().decode(answer["token_ids"], skip_special_tokens=True) == answer["text"]


def test_greedy_answers_with_and_without_drafts_are_identical(generate):
    document = generate("--compare", "--json").json
    plain, drafted = document["answers"]
    assert document["identical_to_plain"] is True and document["divergence"] is None
    assert plain["token_ids"] == drafted["token_ids"] == token_ids(generate("--num-draft-tokens", 0, "--json"))
    assert (plain["method"], plain["acceptance_length"]) == ("plain", 1.0)


def test_comparison_shows_both_answers_and_a_table(generate):
    result = generate("--compare", "--num-draft-tokens", 3)
    assert "--- plain\n" in result.out and "--- p-eagle, K = 3\n" in result.out
    assert "the two answers are identical" in result.out
    assert re.search(r"speed-up [\d.]+x decoding, [\d.]+x in all", result.out)
    for heading in ("first token", "in all", "tokens/s", "acceptance length"):
        assert heading in result.out


def test_an_answer_that_ends_in_its_first_step_has_no_decoding_speed(generate):
    (answer,) = generate("--json", "--max-tokens", 1).json["answers"]
    assert len(answer["token_ids"]) == 1 and answer["tokens_per_second"] is None
    assert re.search(r"speed-up [\d.]+x in all", generate("--compare", "--max-tokens", 1).out)


def test_each_engine_is_closed_and_warm_before_it_is_timed(generate, monkeypatch):
    events = []
    add, close = Engine.add, Engine.close

    def spy_add(self, prompt_ids, params, **kwargs):
        events.append((self.num_draft_tokens, params.max_tokens, list(prompt_ids)))
        return add(self, prompt_ids, params, **kwargs)

    monkeypatch.setattr(Engine, "add", spy_add)
    monkeypatch.setattr(Engine, "close", lambda self: (events.append("closed"), close(self)))
    length = WARMUP_TOKENS + 4
    generate("--compare", "--num-draft-tokens", 2, "--max-tokens", length)
    prompt = events[1][2]
    assert events == [
        (0, WARMUP_TOKENS, prompt[::-1]),
        (0, length, prompt),
        "closed",
        (2, WARMUP_TOKENS, prompt[::-1]),
        (2, length, prompt),
        "closed",
    ]
    events.clear()
    generate()
    assert [event[1] for event in events[:-1]] == [LENGTH], "nothing is timed, so nothing is warmed up"


def test_an_answer_that_the_context_cuts_is_announced(generate):
    said = generate("--raw", "--num-draft-tokens", 0, prompt="the " * 505).err
    assert "tokens fit behind the prompt in the target's context of 512" in said and "fit behind" not in generate().err


def test_the_engine_is_no_larger_than_the_answers_need(generate, monkeypatch):
    made = []
    init = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1])
    generate("--n", 3, "--temperature", 1)
    (engine,) = made
    assert engine.scheduler.config.max_batch == 3
    assert engine.max_length < 100


@pytest.mark.slow
def test_several_answers_come_one_after_the_other_under_headings(generate):
    options = ("--n", 3, "--temperature", 1, "--seed", 5)
    result, document = generate(*options), generate(*options, "--json").json
    texts = [answer["text"] for answer in document["answers"]]
    assert result.out == "".join(f"--- answer {i} of 3\n{text}\n" for i, text in enumerate(texts, start=1))
    assert [answer["index"] for answer in document["answers"]] == [0, 1, 2] and len(set(texts)) == 3
    alone = generate("--temperature", 1, "--seed", 6, "--json").json["answers"][0]
    assert alone["token_ids"] == document["answers"][1]["token_ids"], "answer i is drawn with seed + i"


@pytest.mark.slow
def test_several_answers_can_be_compared(generate):
    options = ("--compare", "--n", 2, "--temperature", 1)
    document = generate(*options, "--json").json
    assert document["identical_to_plain"] is True
    methods = [(answer["method"], answer["index"]) for answer in document["answers"]]
    assert methods == [("plain", 0), ("plain", 1), ("p-eagle, tree of 31", 0), ("p-eagle, tree of 31", 1)]
    out = generate(*options).out
    assert "--- p-eagle, tree of 31, answer 2 of 2\n" in out and "the answers of the two are identical" in out


def test_log_probabilities_are_in_the_document(generate):
    (answer,) = generate("--json", "--logprobs", 3).json["answers"]
    assert len(answer["logprobs"]) == LENGTH
    for token_id, row in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert [each["logprob"] for each in row["top"]] == sorted((e["logprob"] for e in row["top"]), reverse=True)
        assert row["top"][0] == {"token_id": token_id, "logprob": pytest.approx(row["logprob"])}, "greedy takes the top"
        assert len(row["top"]) == 3 and row["logprob"] <= 0
    (bare,) = generate("--json", "--logprobs", 0).json["answers"]
    assert all(row["top"] == [] for row in bare["logprobs"])


def update(num_accepted, num_drafts, texts="abc", **changes):
    return Update("r", 0, tuple(range(len(texts))), tuple(texts), num_accepted, num_drafts, **changes)


def test_tokens_are_told_apart_by_how_they_came_about():
    assert list(update(0, 0, "a").kinds) == ["plain"]
    assert list(update(2, 4).kinds) == ["accepted", "accepted", "recovered"]
    assert list(update(2, 2, marks=4).kinds) == ["accepted", "accepted", "bonus"]
    assert list(update(3, 4).kinds) == ["accepted"] * 3, "the answer ended inside the draft"
    assert list(update(0, 4, "a").kinds) == ["recovered"]


def test_a_terminal_shows_the_kinds_in_color(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(
        "peagle.console.display.Console",
        lambda **options: Console(file=written, force_terminal=True, color_system="standard", **options),
    )
    Display([""]).add(update(1, 3, "ab", finish_reason="length"))
    assert written.getvalue() == "\x1b[32ma\x1b[0m\x1b[35mb\x1b[0m\n"


def test_answers_that_differ_are_reported_with_the_place_and_the_gap(generate, monkeypatch):
    import peagle.cli.generate as module

    monkeypatch.setattr(module, "first_divergence", lambda *_: Divergence(5, 0.0002, True))
    document = generate("--compare", "--json").json
    assert document["identical_to_plain"] is False
    assert document["divergence"] == {"token": 5, "target_gap": 0.0002, "is_near_tie": True}
    assert "They diverge at token 5: the" in generate("--compare").out


def test_the_advice_about_differing_answers_fits_how_they_were_made():
    assert Divergence(3, 0.1, True).explain("bfloat16").endswith("With --dtype float32 the answers are identical.")
    assert "--dtype" not in Divergence(3, 0.0001, True).explain("float32")
    assert "too far for rounding in bfloat16" in Divergence(3, 2.0, False).explain("bfloat16")
    assert "Sampled answers" in Divergence(3, None, False).explain("float32")


def test_seeded_samples_repeat_and_do_not_depend_on_drafts(generate):
    sampled = ("--temperature", 1, "--seed", 3, "--json")
    first = token_ids(generate(*sampled))
    assert first == token_ids(generate(*sampled)) == token_ids(generate(*sampled, "--num-draft-tokens", 0))
    assert first != token_ids(generate("--temperature", 1, "--seed", 4, "--json"))


def test_stop_strings_end_the_answer_before_them(generate):
    text = generate("--json").json["answers"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    (answer,) = generate("--json", "--stop", stop, "not there").json["answers"]
    assert answer["text"] == text[: text.index(stop)] and answer["finish_reason"] == "stop"


def test_raw_prompts_and_system_messages_change_what_the_target_reads(generate, monkeypatch):
    read = []
    add = Engine.add

    def spy(self, prompt_ids, params, **kwargs):
        read.append(prompt_ids)
        return add(self, prompt_ids, params, **kwargs)

    monkeypatch.setattr(Engine, "add", spy)

    def prompt_text(*argv):
        read.clear()
        generate(*argv, "--num-draft-tokens", 0)
        return tiny_tokenizer().decode(read[0])

    turn = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text() == turn
    assert prompt_text("--system", "Be kind.") == f"<|im_start|>system\nBe kind.<|im_end|>\n{turn}"
    assert prompt_text("--raw") == PROMPT


def test_text_that_is_no_terminals_is_passed_on_as_it_is(generate, models):
    tokenizer = load_target(models / "target", dtype="float32").tokenizer
    ids = token_ids(generate("--json", prompt="a\tb"))
    assert generate(prompt="a\tb").out == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


def test_without_a_drafter_none_is_loaded(generate, monkeypatch):
    monkeypatch.setattr(DrafterConfig, "__post_init__", lambda self: pytest.fail("a drafter was loaded"))
    assert generate("--num-draft-tokens", 0).out


@pytest.mark.slow
def test_a_tolerant_answer_says_that_it_is_not_lossless(generate):
    result, document = generate("--tolerance", 0.01), generate("--tolerance", 0.01, "--json").json
    (answer,) = document["answers"]
    assert not answer["is_lossless"] and answer["num_tolerated_tokens"] > 0
    said = f"tolerance 0.01: not lossless, {answer['num_tolerated_tokens']} of {LENGTH} tokens are drafts"
    assert said in " ".join(result.err.split())
    assert said in " ".join(generate("--tolerance", 0.01, "--compare").err.split())
    exact = generate("--json")
    assert exact.json["answers"][0]["is_lossless"] and "not lossless" not in generate().err
