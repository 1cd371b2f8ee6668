"""`peagle generate`: what goes where, what the answer is, and what the options change."""

import pytest

from peagle.bench.acceptance import Divergence
from peagle.cli.generate import explanation
from peagle.drafter.config import DrafterConfig
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from tiny import tiny_tokenizer

PROMPT = "Tell the user."
LENGTH = 24


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
    assert answer["method"] == "p-eagle, K = 4"
    assert answer["tokens_per_second"] > 0 and answer["acceptance_length"] >= 1
    assert tiny_tokenizer().decode(answer["token_ids"], skip_special_tokens=True) == answer["text"]


def test_the_usual_number_of_draft_tokens_is_lowered_to_what_the_drafter_knows_and_said(generate):
    assert "num_draft_tokens 4: the drafter was trained for no more" in generate().err
    assert "num_draft_tokens" not in generate("--num-draft-tokens", 2).err


def test_greedy_answers_with_and_without_drafts_are_identical(generate):
    document = generate("--compare", "--json").json
    plain, drafted = document["answers"]
    assert document["identical_to_plain"] is True and document["divergence"] is None
    assert plain["token_ids"] == drafted["token_ids"] == token_ids(generate("--num-draft-tokens", 0, "--json"))
    assert (plain["method"], plain["acceptance_length"]) == ("plain", 1.0)


def test_comparison_shows_both_answers_and_a_table(generate):
    result = generate("--compare", "--num-draft-tokens", 3)
    assert "--- plain\n" in result.out and "--- p-eagle, K = 3\n" in result.out
    assert "the two answers are identical" in result.out and "speed-up" in result.out
    assert result.err == ""


def test_answers_that_differ_are_reported_with_the_place_and_the_gap(generate, monkeypatch):
    import peagle.cli.generate as module

    monkeypatch.setattr(module, "first_divergence", lambda *_: Divergence(5, 0.0002, True))
    document = generate("--compare", "--json").json
    assert document["identical_to_plain"] is False
    assert document["divergence"] == {"token": 5, "target_gap": 0.0002, "is_near_tie": True}
    assert "They part at token 5, where" in generate("--compare").out


def test_the_advice_about_differing_answers_fits_how_they_were_made():
    assert explanation(Divergence(3, 0.1, True), "bfloat16").endswith("With --dtype float32 the answers are identical.")
    assert "--dtype" not in explanation(Divergence(3, 0.0001, True), "float32")
    assert "too far for rounding in bfloat16" in explanation(Divergence(3, 2.0, False), "bfloat16")
    assert "Sampled answers" in explanation(Divergence(3, None, False), "float32")


def test_seeded_samples_repeat_and_do_not_depend_on_drafts(generate):
    sampled = ("--temperature", 1, "--seed", 3, "--json")
    first = token_ids(generate(*sampled))
    assert first == token_ids(generate(*sampled)) == token_ids(generate(*sampled, "--num-draft-tokens", 0))
    assert first != token_ids(generate("--temperature", 1, "--seed", 4, "--json"))
    assert len(token_ids(generate(*sampled, "--sample-drafts"))) == LENGTH


def test_stop_strings_end_the_answer_before_them(generate):
    text = generate("--json").json["answers"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    (answer,) = generate("--json", "--stop", stop, "not there").json["answers"]
    assert answer["text"] == text[: text.index(stop)] and answer["finish_reason"] == "stop"


def test_stop_tokens_end_the_answer(generate):
    ids = token_ids(generate("--json"))
    (answer,) = generate("--json", "--stop-token-ids", ids[7]).json["answers"]
    assert answer["token_ids"] == ids[: ids.index(ids[7]) + 1] and answer["finish_reason"] == "stop"


def test_raw_prompts_and_system_messages_change_what_the_target_reads(generate, monkeypatch):
    read = []
    forward = HFTarget.forward

    def spy(self, token_ids_BT, cache=None):
        read.append(token_ids_BT[0].tolist())
        return forward(self, token_ids_BT, cache)

    monkeypatch.setattr(HFTarget, "forward", spy)

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
