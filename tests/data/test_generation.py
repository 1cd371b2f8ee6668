"""An engine kept full from jobs that depend on earlier answers."""

import pytest

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.data.generation import Generator, Job
from peagle.engine.llm import LLM
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=2)


def jobs(number):
    return [Job(n, [5 + n, 6, 7], GREEDY) for n in range(number)]


def in_bunches(waiting):
    def next_jobs(room):
        taken = waiting[:room]
        del waiting[:room]
        return taken

    return next_jobs


def test_every_job_is_answered_once_as_the_engine_answers_it(target):
    with Generator(target, max_length=32, max_batch=3) as generator:
        found = {a.job.tag: a for answers in generator.run(in_bunches(jobs(11))) for a in answers}
    with LLM(target, None, max_length=32) as llm:
        expected = llm.generate([job.prompt_ids for job in jobs(11)], GREEDY)
    assert len(found) == 11
    for number, output in enumerate(expected):
        assert tuple(found[number].token_ids) == output.outputs[0].token_ids
        assert found[number].is_ended == (output.outputs[0].finish_reason == "stop")


def test_jobs_may_follow_from_answers_and_an_empty_moment_does_not_end_the_run(target):
    waiting = [Job(0, [5, 6], GREEDY)]
    lengths = []
    with Generator(target, max_length=64, max_batch=2) as generator:
        for answers in generator.run(in_bunches(waiting)):
            for answer in answers:
                lengths.append(len(answer.job.prompt_ids))
                if answer.job.tag < 4:
                    waiting.append(Job(answer.job.tag + 1, [*answer.job.prompt_ids, *answer.token_ids], GREEDY))
    assert len(lengths) == 5 and lengths == sorted(lengths)


def test_no_more_jobs_are_asked_for_than_rows_and_a_few_that_wait(target):
    rooms = []

    def next_jobs(room):
        rooms.append(room)
        return []

    with Generator(target, max_length=32, max_batch=16) as generator:
        assert list(generator.run(next_jobs)) == []
    assert rooms == [18]


def test_a_run_that_is_left_early_leaves_nothing_behind(target):
    with Generator(target, max_length=32, max_batch=3) as generator:
        for _ in generator.run(in_bunches(jobs(9))):
            break
        with pytest.raises(RequestError, match="prompt"):
            list(generator.run(in_bunches([*jobs(2), Job(9, [], GREEDY)])))
        assert not generator.engine.has_work
        assert sum(len(answers) for answers in generator.run(in_bunches(jobs(5)))) == 5
        generator.engine.check_integrity()


def test_answers_without_text_have_their_tokens(target):
    with LLM(target, None, max_length=32) as llm:
        llm.engine.add([5, 6, 7], GREEDY, wants_text=False)
        outputs = []
        while llm.engine.has_work:
            outputs += llm.engine.step()
        (whole,) = llm.generate([[5, 6, 7]], GREEDY)
    assert outputs[0].text == "" and whole.text
    assert outputs[0].outputs[0].token_ids == whole.outputs[0].token_ids


def test_the_log_says_what_drafts_saved(target, caplog):
    with caplog.at_level("INFO", logger="peagle"):
        with Generator(target, tiny_drafter(target, num_layers=1), max_length=32, max_batch=3) as generator:
            assert sum(len(answers) for answers in generator.run(in_bunches(jobs(4)))) == 4
        stats = generator.engine.stats()
    assert stats.num_drafts and stats.decode_seconds > 0 and stats.plain_decode_seconds > 0
    took, plain = f"{stats.decode_seconds:.1f} s", f"{stats.plain_decode_seconds:.1f} s"
    assert f"decoding took {took}, and would have taken {plain} without drafts" in caplog.text
