"""Prompt files answered by the target: turn by turn, each once, with the tokens that decoding gives."""

import itertools

import pytest
import torch

from harness.tiny_models import CHATML, tiny_target, tiny_tokenizer
from peagle.checkpoint.card import TargetIdentity
from peagle.data.config import RegenerationConfig
from peagle.data.generation import Generator
from peagle.data.prompts import Dialog
from peagle.data.regeneration import Regeneration, check, estimated_tokens, split_turns
from peagle.data.shard_writer import ShardWriter
from peagle.data.shards import open_shards
from peagle.data.turns import following_turn
from peagle.errors import ConfigError, DataError
from peagle.tokenizer import render_chat

GREEDY = RegenerationConfig(max_length=300, max_answer_tokens=12, temperatures=(0.0,))


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=2)


def dialog(*turns, where="prompts.jsonl:1"):
    """Turns as (role, content), or as text of the user."""
    pairs = [("user", turn) if isinstance(turn, str) else turn for turn in turns]
    return Dialog(where, [{"role": role, "content": content} for role, content in pairs])


def run(target, directory, dialogs, config=GREEDY, feed=None, **options):
    with ShardWriter(directory, "regenerate", TargetIdentity.of(target), {}, **options) as writer:
        if feed is not None:
            return Regeneration(feed, writer, dialogs, config).run()
        with Generator(target, max_length=config.max_length, max_batch=4) as own:
            return Regeneration(own, writer, dialogs, config).run()


def rows_of(directory):
    """By key: token ids, mask, temperature."""
    rows = {}
    for shard in open_shards(directory).shards:
        for number, (start, end) in enumerate(itertools.pairwise(shard.offsets.tolist())):
            key = int(shard.keys[number])
            assert key not in rows, f"row {key} comes twice"
            ids, mask = shard.token_ids[start:end].tolist(), shard.loss_mask[start:end].tolist()
            rows[key] = (ids, mask, float(shard.temperatures[number]))
    return rows


def generated(target, prompt_ids, max_tokens):
    output = target.model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=sorted(target.eos_token_ids),
    )
    return output[0, len(prompt_ids) :].tolist()


def test_greedy_answers_are_those_of_transformers(target, tmp_path):
    dialogs = [dialog(f"the user asks {number}" * (1 + number % 3)) for number in range(9)]
    counts = run(target, tmp_path, dialogs)
    rows = rows_of(tmp_path)
    assert sorted(rows) == list(range(9)) and counts["num_rows"] == 9
    for key, (ids, mask, temperature) in rows.items():
        prompt_ids = render_chat(target.tokenizer, dialogs[key].messages)
        assert ids == prompt_ids + generated(target, prompt_ids, 12)
        assert mask == [False] * len(prompt_ids) + [True] * (len(ids) - len(prompt_ids)) and temperature == 0


def test_turns_follow_the_targets_own_answers_and_all_answers_are_trained(target, tmp_path):
    turns = ["the first question", ("assistant", "REPLACED"), "the second", ("assistant", "REPLACED"), "third?"]
    dialogs = [dialog(("system", "Be brief."), *turns) for _ in range(16)]
    # At this temperature a random model ends about every third answer.
    run(target, tmp_path, dialogs, RegenerationConfig(max_length=512, max_answer_tokens=100, temperatures=(9.0,)))
    rows = rows_of(tmp_path)
    texts = {key: target.tokenizer.decode(ids) for key, (ids, _, _) in rows.items()}
    assert all(
        text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe first")
        for text in texts.values()
    )
    assert not any("REPLACED" in text for text in texts.values())
    several = [key for key, text in texts.items() if "the second" in text]
    assert several, "some answer came to an end, so that its conversation went on"
    for key in several:
        ids, mask, _ = rows[key]
        spoken = target.tokenizer.decode([token for token, is_answer in zip(ids, mask, strict=True) if not is_answer])
        assert "<|im_start|>assistant\n\n<|im_start|>user\nthe second<|im_end|>\n<|im_start|>assistant\n" in spoken
        changes = [index for index in range(1, len(mask)) if mask[index - 1] and not mask[index]]
        assert changes and all(ids[index - 1] == 2 for index in changes), "an answer is trained with its end token"
        assert mask[-1], "nothing follows the last answer"


def test_the_next_turn_follows_as_the_template_writes_it(target):
    tokenizer = target.tokenizer
    history = [{"role": "user", "content": "first"}]
    answer_ids = [*tokenizer("the answer", add_special_tokens=False)["input_ids"], 2]
    message, following = following_turn(tokenizer, history, answer_ids, [{"role": "user", "content": "second"}])
    assert message == {"role": "assistant", "content": "the answer"}
    whole = [*history, message, {"role": "user", "content": "second"}]
    assert render_chat(tokenizer, history) + answer_ids + following == render_chat(tokenizer, whole)


def test_tokens_stand_as_generated_where_the_tokenizer_would_choose_others(target):
    tokenizer = target.tokenizer
    history = [{"role": "user", "content": "first"}]
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert letters != tokenizer("the", add_special_tokens=False)["input_ids"]
    message, following = following_turn(tokenizer, history, [*letters, 2], [{"role": "user", "content": "second"}])
    assert message["content"] == "the"
    assert tokenizer.decode(following) == "\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "answer_ids"),
    [
        (CHATML.replace("message['content']", "message['content'].replace('h', 'H')"), None),
        (CHATML, [60, 61, 0]),
        (CHATML, [60, 1, 61, 2]),
        (CHATML.replace("message['content']", "message['content'] | trim"), [223, 61, 2]),
    ],
    ids=["rewritten", "another end token", "a special token inside", "trimmed"],
)
def test_a_turn_that_the_template_would_show_otherwise_is_not_added(template, answer_ids):
    tokenizer = tiny_tokenizer(chat_template=template)
    answer_ids = answer_ids or [*tokenizer("the answer", add_special_tokens=False)["input_ids"], 2]
    history = [{"role": "user", "content": "first"}]
    assert following_turn(tokenizer, history, answer_ids, [{"role": "user", "content": "second"}]) is None


def test_what_is_said_is_split_at_the_users_turns():
    def contents(turns):
        return [[message["content"] for message in turn] for turn in turns]

    plain = dialog("a", "b", "c")
    assert contents(split_turns(plain)) == [["a"], ["b"], ["c"]] and contents(split_turns(plain, 2)) == [["a"], ["b"]]
    mixed = dialog(
        ("assistant", "hello"), ("system", "s"), "a", ("assistant", "x"), ("system", "t"), "b", ("system", "u")
    )
    assert contents(split_turns(mixed)) == [["s", "a"], ["t", "b"]]


def test_a_conversation_ends_at_the_last_turn_that_fits_or_is_answered(target, tmp_path):
    dialogs = [dialog("the first", "the second"), dialog("x" * 400), dialog("tool", ("tool", "result"), "more")]
    counts = run(
        target, tmp_path, dialogs, RegenerationConfig(max_length=300, max_answer_tokens=5, temperatures=(0.0,))
    )
    assert counts["dropped"] == {"prompt: too long": 1, "prompt: uses tools": 1}
    ((ids, mask, _),) = rows_of(tmp_path).values()
    assert sum(mask) == 5 and mask[-5:] == [True] * 5, "an answer that was cut is kept and ends the conversation"
    assert "the second" not in target.tokenizer.decode(ids)


def test_an_empty_answer_is_dropped_and_not_tried_again(target, tmp_path):
    prompt_ids = render_chat(target.tokenizer, dialog("the question").messages)
    first = generated(target, prompt_ids, 1)[0]
    ends, target.eos_token_ids = target.eos_token_ids, frozenset({first, 2})
    try:
        assert run(target, tmp_path, [dialog("the question")])["dropped"] == {"answer: empty": 1}
        assert run(target, tmp_path, [dialog("the question")])["dropped"] == {"answer: empty": 1}
    finally:
        target.eos_token_ids = ends


def test_answers_do_not_depend_on_what_runs_beside_them_nor_on_interruptions(target, tmp_path):
    config = RegenerationConfig(max_length=200, max_answer_tokens=20, temperatures=(0.0, 0.8, 1.5), seed=4)
    dialogs = [dialog(f"the user asks {number}", "and then?") for number in range(12)]
    run(target, tmp_path / "whole", dialogs, config)

    directory, num_runs = tmp_path / "parts", 0
    while num_runs < 20:
        num_runs += 1
        with ShardWriter(directory, "regenerate", TargetIdentity.of(target), {}, shard_tokens=300) as writer:
            enough = writer.counts["num_rows"] + 4

            def stop_at_enough(counts, enough=enough):
                if counts["num_rows"] >= enough:
                    raise KeyboardInterrupt

            with Generator(target, max_length=200, max_batch=2) as feed:
                try:
                    Regeneration(feed, writer, dialogs, config).run(stop_at_enough)
                    break
                except KeyboardInterrupt:
                    continue
    assert num_runs > 2
    whole, parts = rows_of(tmp_path / "whole"), rows_of(directory)
    assert whole == parts and sorted(parts) == list(range(12))
    assert len({temperature for _, _, temperature in parts.values()}) == 3


def test_a_refused_dialog_is_named_by_its_line(tmp_path):
    target = tiny_target(num_layers=2)
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML
    target.tokenizer = tiny_tokenizer(chat_template=strict)
    dialogs = [dialog("fine"), dialog(("system", "s"), "not fine", where="prompts.jsonl:2")]
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: the target's chat template refuses .*no system here"):
        run(target, tmp_path, dialogs)


def test_templates_without_boundaries_are_refused_with_the_reason_and_the_way_out():
    target = tiny_target(num_layers=2)
    # As templates that drop old thinking do: an answer changes when something follows.
    rewriting = CHATML.replace(
        "message['content']",
        "(message['content'] | upper if message['role'] == 'assistant' and not loop.last else message['content'])",
    )
    target.tokenizer = tiny_tokenizer(chat_template=rewriting)
    check(target, [dialog("one turn")], GREEDY)
    with pytest.raises(DataError) as caught:
        check(target, [dialog("first", "second")], GREEDY)
    assert "messages[1]: the chat template" in caught.value.message and "--max-turns 1" in caught.value.hint
    check(target, [dialog("first", "second")], RegenerationConfig(max_length=300, max_turns=1))
    target.tokenizer = tiny_tokenizer(chat_template=CHATML.replace("<|im_end|>", ""))
    with pytest.raises(DataError, match="puts no end-of-turn token after an answer"):
        check(target, [dialog("one turn")], GREEDY)
    with pytest.raises(ConfigError, match="max_length 600 exceeds the target's 512"):
        check(tiny_target(num_layers=2), [], RegenerationConfig(max_length=600))


def test_bad_settings_are_refused():
    for settings, words in (
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
        ({"max_answer_tokens": 0}, "max_answer_tokens must be at least 1"),
        ({"temperatures": (-0.1,)}, "temperatures must be 0 or more, got -0.1"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
    ):
        with pytest.raises(ConfigError) as caught:
            RegenerationConfig(**settings)
        assert words in caught.value.message


def test_the_estimate_of_tokens_counts_what_is_said_and_the_answers():
    dialogs = [dialog("x" * 10, ("assistant", "replaced"), "y" * 10), dialog("z" * 10_000)]
    assert estimated_tokens(dialogs, GREEDY) == 20 + 2 * (12 + 64) + 300
    first_turns = RegenerationConfig(max_length=300, max_answer_tokens=12, max_turns=1)
    assert estimated_tokens(dialogs[:1], first_turns) == 10 + 12 + 64


def test_the_estimate_of_tokens_holds_where_one_character_is_several_tokens(target, tmp_path):
    dialogs = [dialog("\N{OWL}" * 40)]
    assert run(target, tmp_path, dialogs)["num_tokens"] <= estimated_tokens(dialogs, GREEDY)
