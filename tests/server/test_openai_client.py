"""The openai SDK against the server: sync, async, streamed, refused and retried."""

import asyncio

import openai
import pytest

from harness.local_server import tiny_llm
from peagle.sampling_params import SamplingParams
from peagle.tokenizer import render_chat

MESSAGES = [{"role": "user", "content": "the user asks"}]


@pytest.fixture(scope="module")
def direct():
    """Answers of the engine itself to the same question, by sampling parameters."""
    with tiny_llm() as llm:
        prompt = render_chat(llm.tokenizer, MESSAGES)
        yield lambda params: llm.generate([prompt], params)[0]


def test_greedy_answer_equals_the_engine_s(served, direct):
    answer = served.client().chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=40, temperature=0)
    expected = direct(SamplingParams(max_tokens=40))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")


def test_streamed_answer_equals_the_whole_one(served, direct):
    stream = served.client().chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=40,
        temperature=0.9,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    expected = direct(SamplingParams(max_tokens=40, temperature=0.9, seed=5))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends[-1] == expected.outputs[0].finish_reason and set(ends[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1


def test_usage_chunk_comes_only_when_asked_for(served):
    stream = served.client().chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, stream=True)
    assert all(chunk.choices for chunk in stream), "naive clients take choices[0] of every chunk"


@pytest.mark.slow
def test_async_client_streams_many_at_once(served, direct):
    async def ask(client, seed):
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=24, temperature=1.0, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main():
        async with served.async_client() as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(12)))

    answers = asyncio.run(main())
    assert answers == [direct(SamplingParams(max_tokens=24, temperature=1.0, seed=seed)).text for seed in range(12)]


def test_several_answers_to_one_question(served, direct):
    answer = served.client().chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=1.0, seed=3, n=3
    )
    expected = direct(SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3))
    assert [choice.message.content for choice in answer.choices] == [each.text for each in expected.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_completion_of_texts_and_of_token_ids(served):
    client, tokenizer = served.client(), served.service.tokenizer
    ask = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    one = client.completions.create(prompt="the user", **ask)
    assert one.object == "text_completion" and one.choices[0].finish_reason == "length"
    ids = tokenizer("the user")["input_ids"]
    assert client.completions.create(prompt=ids, **ask).choices[0].text == one.choices[0].text
    several = client.completions.create(prompt=["the", "the user"], **ask)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[1].text == one.choices[0].text
    assert several.usage.completion_tokens == 12
    both = client.completions.create(prompt=[tokenizer("the")["input_ids"], ids], n=2, **ask)
    assert [choice.text for choice in both.choices][2:] == [one.choices[0].text] * 2


def test_streamed_completion_of_several_prompts(served):
    client = served.client()
    ask = {"model": "tiny", "prompt": ["the", "the user"], "max_tokens": 9, "temperature": 0}
    whole = client.completions.create(**ask)
    texts = ["", ""]
    for chunk in client.completions.create(stream=True, **ask):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_log_probabilities_are_the_engine_s(served, direct):
    answer = served.client().chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    expected = direct(SamplingParams(max_tokens=6, logprobs=3)).outputs[0]
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([row.logprob for row in expected.logprobs], abs=1e-4)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert (
        b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace")
        == answer.choices[0].message.content
    )
    streamed = served.client().chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=True
    )
    found = [
        entry.token for chunk in streamed if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert found == [entry.token for entry in content]


def test_log_probabilities_of_completions_have_offsets(served):
    answer = served.client().completions.create(model="tiny", prompt="the", max_tokens=8, temperature=0, logprobs=2)
    found, text = answer.choices[0].logprobs, answer.choices[0].text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 8
    assert all(len(top) in (1, 2) for top in found.top_logprobs)
    assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
    assert found.text_offset[-1] <= len(text)


def test_models_are_listed_and_retrieved(served):
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 256
    assert client.models.retrieve("tiny").peagle["precision"] == "float32", (
        "figures of rounded weights can be told apart"
    )
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert "'other' does not exist; this server serves tiny" in caught.value.message


def test_unknown_model_is_a_404_and_an_empty_name_is_ours(served):
    client = served.client()
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert client.chat.completions.create(model="", messages=MESSAGES, max_tokens=2).model == "tiny"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "'temperature' must be 0 or more, got -1"),
        ("top_p", 0, "'top_p' must be above 0 and at most 1, got 0"),
        ("max_tokens", 4000, "set 'max_tokens' to at most 234, or omit it"),
        ("stop", ["x"] * 65, "'stop' must have at most 64 elements, got 65"),
        ("response_format", "json", "'response_format' must be an object, got 'json'"),
        ("service_tier", "flex", "'service_tier' is not supported: there is one service tier"),
        ("top_logprobs", 3, "'top_logprobs' requires 'logprobs'"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "'tools' is not supported: the target's chat"),
    ],
)
def test_bad_request_is_explained_by_its_field(served, field, value, message):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().chat.completions.create(model="tiny", messages=MESSAGES, **{field: value})
    assert message in caught.value.message
    assert caught.value.param == field and caught.value.type == "invalid_request_error"


def test_labels_for_openais_own_accounting_are_accepted_and_ignored(served):
    create, asked = served.client().chat.completions.create, {"max_tokens": 8, "temperature": 0}
    plain, labelled = (
        create(model="tiny", messages=MESSAGES, **asked, **more).choices[0].message.content
        for more in ({}, {"store": True, "metadata": {"run": "7"}, "prompt_cache_key": "a"})
    )
    assert plain == labelled


def test_request_id_is_surfaced_by_the_client(served):
    answer = served.client().chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, extra_headers={"X-Request-Id": "my-own-id"}
    )
    assert answer._request_id == "my-own-id"


def test_speculation_can_be_turned_off_for_one_request(served, direct):
    def ask(**extra):
        return served.client().chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=30, temperature=0, extra_body=extra
        )

    drafted, plain = ask(), ask(speculation={"enabled": False})
    for same in ({"speculation": {"num_draft_tokens": 0}}, {"num_draft_tokens": 0}):
        assert ask(**same).usage == plain.usage, "the same wish in other words"
    with pytest.raises(openai.BadRequestError, match="'num_draft_tokens' must be 0, got 3"):
        ask(num_draft_tokens=3)
    with pytest.raises(openai.BadRequestError, match="contradicts 'speculation"):
        ask(num_draft_tokens=0, speculation={"num_draft_tokens": 2})
    fewer = ask(speculation={"num_draft_tokens": 2})
    assert drafted.choices[0].message.content == plain.choices[0].message.content == fewer.choices[0].message.content
    figures = drafted.usage.metrics["speculative_decoding"]
    assert figures["num_spec_steps"] == sum(figures["acceptance_histogram"]) > 0
    assert len(figures["acceptance_histogram"]) == 5 and figures["num_spec_tokens"] == 4
    assert figures["mean_acceptance_length"] == pytest.approx(
        1 + figures["num_accepted_draft_tokens"] / figures["num_spec_steps"], abs=1e-3
    )
    assert drafted.metrics["speculative_decoding"] == figures, "where vLLM puts it"
    assert plain.usage.metrics["speculative_decoding"]["num_spec_steps"] == 0
    assert fewer.usage.metrics["speculative_decoding"]["acceptance_histogram"][3:] == [0, 0]


def test_tolerance_is_an_opt_in_that_every_report_marks(served):
    def ask(**speculation):
        extra = {"speculation": {"details": True, **speculation}}
        answer = served.client().chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=30, temperature=0, extra_body=extra
        )
        kinds = [token["kind"] for token in answer.choices[0].speculation["tokens"]]
        return answer.usage.metrics["speculative_decoding"], kinds.count("tolerated")

    exact, num_tolerated = ask()
    assert exact["is_lossless"] and exact["num_tolerated_tokens"] == num_tolerated == 0
    tolerant, num_tolerated = ask(tolerance=0.01)
    assert not tolerant["is_lossless"] and tolerant["num_tolerated_tokens"] == num_tolerated > 0
    assert tolerant["mean_acceptance_length"] > exact["mean_acceptance_length"]
    with pytest.raises(openai.BadRequestError, match="tolerance' must be above 0 and at most 1"):
        ask(tolerance=0)


def test_more_draft_tokens_than_the_engine_has_are_refused(served):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"speculation": {"num_draft_tokens": 9}}
        )
    assert "num_draft_tokens' must be at most the engine's 4, got 9" in caught.value.message
    assert caught.value.param == "speculation.num_draft_tokens"
