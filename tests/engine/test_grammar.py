"""Answers by a grammar: they keep to it, equal the reference decoder's, and drafts that it prescribes are accepted."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import decoders

from harness.engine_runs import (
    NUM_DRAFT_TOKENS,
    PROMPTS,
    answer,
    drafting,
    mixed_cells,
    practised_drafter,
    serve,
    start,
)
from harness.model_families import family_target
from harness.tiny_models import tiny_tokenizer
from peagle.decoding.grammar import Draft, make_guide
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.outputs import RequestOutput
from peagle.errors import MissingExtraError, RequestError, TargetError
from peagle.sampling_params import Grammar, SamplingParams
from peagle.targets.hf import HFTarget

TIGHT = {"page_size": 4, "max_length": 110, "num_pages": 36, "prefill_tokens": 16}
FEW = {"page_size": 4, "verify_tokens": 40}
"""of 16 requests with 9 drafts each"""
CELLS = [*mixed_cells({"page_size": 4}, TIGHT, {"max_batch": 1, "max_length": 110}), ("p-eagle tree", FEW)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["the first kind", "the other kind"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
SCHEMA_TEXT = json.dumps(SCHEMA)
GRAMMARS = (
    Grammar("json_schema", SCHEMA_TEXT),
    Grammar("choice", ("yes", "no, never", 'say "\u00e9"\n')),
    Grammar("regex", r"[a-c]{2,5}-(the user|the aster)[0-9]+x"),
    None,
)


def wishes(index: int) -> SamplingParams:
    """Every fourth request is free, every third one samples, some have penalties or fewer drafts."""
    grammar = GRAMMARS[index % 4]
    return SamplingParams(
        max_tokens=80 if grammar else 16,
        temperature=0.8 if index % 3 == 0 else 0.0,
        seed=index,
        grammar=grammar,
        presence_penalty=0.5 if index % 5 == 0 else 0.0,
        num_draft_tokens=(None, None, 2, 0)[index % 7 % 4],
    )


def check_kept(text: str, grammar: Grammar | None, finish_reason: str | None) -> None:
    if grammar is None or finish_reason == "length":
        return
    if grammar.kind == "choice":
        assert text in (grammar.value or ())
    elif grammar.kind == "regex":
        assert re.fullmatch(str(grammar.value), text)
    else:
        found = json.loads(text)
        assert list(found) == ["name", "kind", "ages"] and len(found["name"]) <= 3
        assert found["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]
        assert len(found["ages"]) <= 2 and all(0 <= age <= 99 for age in found["ages"])


def reference(target: HFTarget, prompt: list[int], params: SamplingParams, **drafting: Any) -> tuple[int, ...]:
    return answer(target, prompt, replace(params, num_draft_tokens=None), **drafting)


@pytest.fixture(scope="module")
def expected(target: HFTarget) -> list[tuple[int, ...]]:
    return [reference(target, prompt, wishes(index)) for index, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    """Knows the free answers only: what a grammar prescribes is news to it."""
    return practised_drafter()


@pytest.mark.slow
def test_answers_of_the_reference_decoder_keep_to_the_grammar_with_and_without_drafts(
    target: HFTarget, drafter: Drafter, expected: list[tuple[int, ...]]
) -> None:
    num_ended = 0
    for index, prompt in enumerate(PROMPTS):
        params = replace(wishes(index), num_draft_tokens=None)
        steps = list(decode(target, prompt, params, drafter=drafter, num_draft_tokens=NUM_DRAFT_TOKENS))
        assert tuple(token for step in steps for token in step.token_ids) == expected[index]
        check_kept("".join(step.text for step in steps), params.grammar, steps[-1].finish_reason)
        num_ended += params.grammar is not None and steps[-1].finish_reason == "stop"
    assert num_ended >= 8, "most answers come to the end of their grammar"


@pytest.mark.parametrize(("method", "settings"), CELLS)
def test_a_mixed_batch_is_answered_as_by_the_reference_decoder(
    target: HFTarget, drafter: Drafter, expected: list[tuple[int, ...]], method: str, settings: dict[str, Any]
) -> None:
    chosen, tree = drafting(method, drafter, target)
    engine = start(chosen, **settings, **tree)
    params = [wishes(index) for index in range(len(PROMPTS))]
    if chosen is None:
        params = [replace(own, num_draft_tokens=None) for own in params]
    outputs = serve(engine, PROMPTS, params)
    stats = engine.stats()
    engine.close()
    for output, wanted, own in zip(outputs, expected, params, strict=True):
        assert output.outputs[0].token_ids == wanted, own
        check_kept(output.outputs[0].text, own.grammar, output.outputs[0].finish_reason)
    assert (settings is not TIGHT) or stats.num_preemptions > 0, "the pages are too few for all"


def test_answers_are_the_same_where_the_engine_is_a_step_ahead(
    target: HFTarget, drafter: Drafter, expected: list[tuple[int, ...]]
) -> None:
    """As on a GPU: a launch is collected after the next one, unless a grammar has to know."""
    engine = start(drafter, page_size=4, max_length=110)
    engine.runner.is_asynchronous = False
    launch = engine.runner.launch
    most_in_flight = {"guided": 0, "free": 0}

    def watched(plan: Any) -> Any:
        for request in plan.decodes:
            kind = "free" if request.guide is None else "guided"
            most_in_flight[kind] = max(most_in_flight[kind], request.num_in_flight)
        with_no_events = launch(plan)
        with_no_events.finish()
        engine.runner.is_asynchronous = True  # read by `Engine.step` after the launch
        return with_no_events

    step = engine.step

    def one_behind() -> list[RequestOutput]:
        engine.runner.is_asynchronous = False
        return step()

    engine.runner.launch = watched  # type: ignore[method-assign]
    engine.step = one_behind  # type: ignore[method-assign]
    free_first = sorted(range(len(PROMPTS)), key=lambda index: index % 4 != 3)
    params = [replace(wishes(index), num_draft_tokens=None) for index in free_first]
    outputs = serve(engine, [PROMPTS[index] for index in free_first], params)
    alone = serve(engine, [PROMPTS[index] for index in free_first[:4]], params[:4])
    engine.close()
    assert [output.outputs[0].token_ids for output in outputs] == [expected[index] for index in free_first]
    assert [output.outputs[0].token_ids for output in alone] == [expected[index] for index in free_first[:4]]
    assert most_in_flight["guided"] == 1, "the host has seen everything before a guided pass"
    assert most_in_flight["free"] >= 2, "others do not wait where no grammar is"


def test_what_the_grammar_prescribes_is_drafted_and_accepted(engine: Engine, target: HFTarget) -> None:
    """A token for each character: whatever the target would say, names and brackets need no guess."""
    words = tiny_tokenizer().encode('{"name": "')
    params = SamplingParams(max_tokens=80, grammar=Grammar("json_schema", SCHEMA_TEXT))
    (output,) = serve(engine, [PROMPTS[3]], [params])
    completion = output.outputs[0]
    assert list(completion.token_ids[: len(words)]) == words and completion.finish_reason == "stop"
    assert completion.token_ids[-1] == 2, "the end itself is drafted where nothing else can come"
    free = serve(engine, [PROMPTS[3]], [SamplingParams(max_tokens=len(completion.token_ids), ignore_eos=True)])[0]
    assert output.metrics.acceptance.acceptance_length > free.metrics.acceptance.acceptance_length
    assert output.metrics.acceptance.acceptance_length > 2.5


def test_drafting_goes_on_after_a_step_whose_drafts_the_grammar_forbids(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a step verifies nothing, but the drafter runs, because the next drafts may be allowed."""
    engine = start(drafter, page_size=4)
    sizes, fewest = [], engine.runner._fewest_tokens
    monkeypatch.setattr(engine.runner, "_fewest_tokens", lambda *_: sizes.append(size := fewest(*_)) or size)
    monkeypatch.delattr(engine.runner, "plain_step")
    params = SamplingParams(max_tokens=30, temperature=1.0, grammar=Grammar("regex", "[a-c]{30}"))
    serve(engine, [PROMPTS[0]], [params])
    engine.close()
    assert 1 in sizes


@pytest.mark.slow
def test_acceptance_is_no_lower_with_a_schema_than_without(engine: Engine) -> None:
    grammar = Grammar("json_schema", SCHEMA_TEXT)
    found = []
    for params in (SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, grammar=grammar)):
        outputs = serve(engine, PROMPTS, [params] * len(PROMPTS))
        acceptances = [output.metrics.acceptance for output in outputs]
        found.append(sum(acceptances[1:], acceptances[0]).acceptance_length)
    assert found[1] >= found[0], found


@pytest.mark.slow
def test_any_json_object_is_one(engine: Engine) -> None:
    params = SamplingParams(max_tokens=90, temperature=1.0, grammar=Grammar("json_object"))
    outputs = serve(engine, PROMPTS[:8], [replace(params, seed=index) for index in range(8)])
    ended = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert all(isinstance(json.loads(completion.text), dict) for completion in ended)
    assert all(output.outputs[0].text.startswith("{") for output in outputs)


def test_an_answer_is_one_of_thousands_of_choices(engine: Engine) -> None:
    choices = tuple(f"{index} of them" for index in range(2_500))
    params = SamplingParams(max_tokens=40, temperature=1.0, grammar=Grammar("choice", choices))
    found = serve(engine, [PROMPTS[0]], [params])[0].outputs[0]
    assert found.text in choices and found.finish_reason == "stop"


def test_a_schema_may_have_a_thousand_keys(engine: Engine) -> None:
    keys = [f"k{index}" for index in range(1_200)]
    schema = {"properties": {key: {"const": 1} for key in keys}, "required": keys[-1:], "additionalProperties": False}
    grammar = Grammar("json_schema", json.dumps(schema | {"type": "object"}))
    found = serve(engine, [PROMPTS[0]], [SamplingParams(max_tokens=9, grammar=grammar)])[0].outputs[0]
    assert re.match(r'\{"k\d', found.text) and found.finish_reason == "length", found.text


def test_an_answer_that_a_limit_of_the_library_cuts_does_not_end_like_a_whole_one(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=40, grammar=Grammar("regex", "(?:a?){5000}a{5000}"))
    found = serve(engine, [PROMPTS[0]], [params])[0].outputs[0]
    assert found.finish_reason == "length" and len(found.token_ids) < 40
    assert "a grammar cannot be followed further: lexer error" in caplog.text


def test_several_answers_to_one_prompt_have_guides_of_their_own(engine: Engine) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.2, grammar=GRAMMARS[2], n=3)
    (output,) = serve(engine, [PROMPTS[2]], [params])
    for completion in output.outputs:
        check_kept(completion.text, params.grammar, completion.finish_reason)
    assert len({completion.text for completion in output.outputs}) > 1


def test_an_aborted_request_leaves_the_others_and_the_guides_alone(
    engine: Engine, expected: list[tuple[int, ...]]
) -> None:
    names = [engine.add(prompt, wishes(index)) for index, prompt in enumerate(PROMPTS[:8])]
    outputs: dict[str, RequestOutput] = {}
    for _ in range(3):
        outputs |= {output.request_id: output for output in engine.step()}
    assert engine.abort(names[0]), "it is not done yet"
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    for index, name in enumerate(names[1:], start=1):
        assert outputs[name].outputs[0].token_ids == expected[index]
    assert engine._guided == set(), "nothing is kept of what has ended"


def test_a_plan_of_a_guide_allows_row_by_row_what_a_guide_that_starts_anew_allows(target: HFTarget) -> None:
    tokenizer = tiny_tokenizer()
    guide, fresh = make_guide(target, GRAMMARS[0]), make_guide(target, GRAMMARS[0])  # type: ignore[arg-type]
    text = tokenizer.encode('{"name": "ab", "kind": "the first kind", "ages": [7, 23]}')
    for length in range(len(text)):
        allowed_LW = np.empty((NUM_DRAFT_TOKENS + 1, -(-target.vocab_size // 32)), np.int32)
        proposed = [*text, 2, 2, 2, 2, 2][length : length + NUM_DRAFT_TOKENS]
        drafts = guide.plan(chain(proposed), NUM_DRAFT_TOKENS, allowed_LW).token_ids
        for row in range(len(drafts) + 1):
            wanted = fresh.allowed_after([*text[:length], *drafts[:row]])
            found = np.unpackbits(allowed_LW[row].view(np.uint8), bitorder="little").astype(bool)
            assert found.all() if wanted is None else (found == wanted).all(), (length, row)
            if row < len(drafts) and not found[drafts[row]]:
                break
        guide.advance([text[length]])
    assert guide.plan(chain([9, 9]), 2, allowed_LW[:3]).token_ids == [2], "only the end is left"


def chain(token_ids: list[int]) -> list[Draft]:
    return [(token, place, -0.5 * (place + 1)) for place, token in enumerate(token_ids)]


def test_what_a_grammar_forces_goes_into_the_tree_and_takes_the_place_of_what_it_forbids(target: HFTarget) -> None:
    guide = make_guide(target, Grammar("choice", ("yes", "no, never")))
    encode = tiny_tokenizer().encode
    yes, no, other = encode("yes"), encode("no, never"), encode("z")[0]
    allowed_LW = np.empty((10, -(-target.vocab_size // 32)), np.int32)
    # Both choices, and a third thing with a child of its own.
    drafts = [(no[0], 0, -0.5), (other, 0, -1.0), (yes[0], 0, -1.5), (other, 2, -2.0), (other, 1, -2.5)]
    tree = guide.plan(drafts, 8, allowed_LW)
    assert len(tree) == 5
    assert {tree.token_ids[node - 1] for node in tree.children(0)} == {no[0], yes[0]}, "the third is not allowed"
    first = tree.child(0, no[0])
    assert first is not None and tree.tokens(tree.branch(first)) == no[: len(tree.branch(first))], "forced"
    for node in range(len(tree) + 1):
        found = np.unpackbits(allowed_LW[node].view(np.uint8), bitorder="little").astype(bool)
        wanted = make_guide(target, Grammar("choice", ("yes", "no, never"))).allowed_after(tree.tokens(tree.path(node)))
        assert found.all() if wanted is None else (found == wanted).all(), node
    assert not guide.plan([(no[0], 0, -0.5)], 0, allowed_LW), "a request without drafts gets none"
    nothing = [(no[0], 0, -math.inf)] * 3
    assert not guide.plan(nothing, 8, allowed_LW), "places without a draft"


def test_what_a_grammar_forces_is_verified_before_less_likely_drafts(target: HFTarget) -> None:
    """A forced token is as likely as the token before it, whatever the drafter thinks of it."""
    encode = tiny_tokenizer().encode
    yes, no, free = encode("yes"), encode("no, never"), encode("the user")
    allowed_LW = np.empty((10, -(-target.vocab_size // 32)), np.int32)
    guide = make_guide(target, Grammar("choice", ("yes", "no, never")))
    drafts = [(yes[0], 0, -1.0), (no[0], 0, -1.5), (yes[1], 1, -3.0), *[(free[0], 1, -9.0)] * 5]
    tree = guide.plan(drafts, 8, allowed_LW)
    found = list(zip(tree.token_ids, tree.scores[1:], strict=True))
    on_yes, on_no = ([(token, score) for token in path] for path, score in ((yes, -1.0), (no, -1.5)))
    assert found[: len(yes)] == on_yes and found[-1][1] == -1.5 and set(on_no[:2]) < set(found), found
    assert tree.scores == sorted(tree.scores, reverse=True)
    assert all(tree.parents[node] < node for node in range(1, len(tree) + 1))
    for node in range(len(tree) + 1):
        mask = np.unpackbits(allowed_LW[node].view(np.uint8), bitorder="little").astype(bool)
        wanted = make_guide(target, Grammar("choice", ("yes", "no, never"))).allowed_after(tree.tokens(tree.path(node)))
        assert mask.all() if wanted is None else (mask == wanted).all(), node
    sure = make_guide(target, Grammar("choice", ("no, never",))).plan(chain(free), 8, allowed_LW)
    assert set(sure.scores) == {0.0} and sure.token_ids == no[: len(sure)], "nothing else can come"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("json", "{}"), "grammar must be one of json_schema, json_object, regex, choice, got 'json'"),  # type: ignore[arg-type]
        (lambda: Grammar("json_schema", "[1]"), "a grammar of kind json_schema takes a JSON object as text"),
        (lambda: Grammar("json_schema", "{"), "a grammar of kind json_schema takes a JSON object as text"),
        (lambda: Grammar("json_object", "{}"), "a grammar of kind json_object takes no value, got '{}'"),
        (lambda: Grammar("choice", ()), "a grammar of kind choice takes a list of non-empty strings"),
        (lambda: Grammar("choice", ("a", "")), "a grammar of kind choice takes a list of non-empty strings"),
        (lambda: Grammar("regex"), "a grammar of kind regex takes a regular expression, got None"),
        (lambda: SamplingParams(grammar=Grammar("json_object"), ignore_eos=True), "ignore_eos must be off with a gr"),
        (lambda: SamplingParams(grammar=Grammar("json_object"), min_tokens=3), "min_tokens must be 0 with a grammar"),
    ],
)
def test_a_grammar_that_is_none_is_refused(make: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        make()
    assert Grammar("choice", ["a", "b"]) == Grammar("choice", ("a", "b"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "("), "the regex grammar is not supported: .*unclosed group"),
        (
            Grammar("json_schema", '{"type": "nonsense"}'),
            "the json_schema grammar is not supported: .*nonsense",
        ),
        (Grammar("json_schema", '{"not": {}}'), 'is not supported: .*"not"'),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_and_harms_nobody(
    engine: Engine, grammar: Grammar, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        engine.add(PROMPTS[0], SamplingParams(grammar=grammar))
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)
    assert not engine.has_work
    serve(engine, PROMPTS[:1], [SamplingParams(max_tokens=3)])


def test_a_tokenizer_that_the_library_would_misread_is_read_right_or_refused() -> None:
    """The decoder of a tokenizer from a GGUF file lists what it does not need before what it does."""
    readable, broken = family_target("llama"), family_target("llama")
    backend = readable.tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()])
    guide = make_guide(readable, Grammar("regex", "a the"))
    text = readable.tokenizer.encode("a the")
    guide.advance(text[:1])
    assert guide.plan(chain([3, 3]), 2, np.empty((3, 9), np.int32)).token_ids[0] == text[1], "a space is known as one"
    broken.tokenizer.backend_tokenizer.decoder = decoders.ByteFallback()
    with pytest.raises(TargetError, match="llguidance misreads the tokenizer of target 'tiny-llama'"):
        make_guide(broken, Grammar("json_object"))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'llguidance'.*\n.*peagle\[serve\]"):
        make_guide(family_target("llama"), Grammar("json_object"))
