"""`peagle build`: the plan, every stage, a build that is stopped at each of them, and what is refused."""

import json

import pytest

from peagle.building import run as building
from peagle.building import shape
from peagle.building.config import STAGES
from peagle.building.plan import Effort
from peagle.building.state import only_build
from peagle.console import progress

OUTCOME = {"acceptance_length": 1.5, "num_steps": 3, "workload": "own", "passed": True, "num_answer_tokens": 500}
OUTCOME |= {"lossless": True, "verdict": "it pays", "num_rows": 9}
LATER, KILLED = STAGES[1:], ("data", "train")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Few tokens everywhere."""
    monkeypatch.setattr(shape, "TOKENS_PER_STEP", 96)
    monkeypatch.setattr("peagle.building.plan.LEAST_STEPS", 3)
    monkeypatch.setattr("peagle.building.plan.PASSES", 1)
    lossless = {"limit": 1, "max_tokens": 8, "num_seeds": 1, "num_samples": 50}
    monkeypatch.setattr("peagle.building.plan.Effort.of", lambda *_: Effort(2, 2, 8, (1,), lossless))


@pytest.fixture
def build(peagle, models, tmp_path):
    def rows(name, number):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": f"the {path.stem} {index}"}) + "\n" for index in range(number)))
        return path

    asked, own = rows("asked.jsonl", 24), rows("own.jsonl", 2)

    def call(*argv, budget="10m"):
        options = ("--output", tmp_path / "out", "--data", asked, "--prompts", own, "--max-length", 48)
        return peagle("build", models / "target", *options, "--budget", budget, *argv)

    return call


@pytest.fixture
def state(tmp_path):
    return lambda: json.loads((tmp_path / "out" / "build.json").read_text())["stages"]


def test_a_dry_run_prints_the_plan_and_writes_nothing(build, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    result = build("--dry-run", "--price-per-hour", "2")
    assert result.status == 0, result.err
    for name in ("target", "measured", "text", "drafter", "memory", "disk", "time", "price", *STAGES):
        assert f"\n{name} " in "\n" + result.out
    assert "of the budget of 10m" in result.out and "at $2.00 per hour (given with --price-per-hour" in result.out
    assert "peagle train --target" in result.out and "planned" in result.out
    assert "measuring this machine, for " in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_build_that_is_stopped_in_every_stage_ends_with_a_gated_drafter_and_a_report(
    build, state, tmp_path, monkeypatch
):
    """Each stage is stopped by Ctrl-C; text and training are also killed after their work, before it was recorded."""
    real, stopped = building.Build._run, []

    class Killed(BaseException):
        pass

    def stop(self, stage, command):
        def call(words):
            if (stage, "interrupted") not in stopped:
                stopped.append((stage, "interrupted"))
                raise KeyboardInterrupt
            printed = self.cli(words)
            if stage in KILLED and (stage, "killed") not in stopped:
                stopped.append((stage, "killed"))
                raise Killed
            return printed

        self.cli, self.call = getattr(self, "cli", self.call), call
        real(self, stage, command)

    monkeypatch.setattr(building.Build, "_run", stop)
    statuses = []
    while not statuses or statuses[-1] != 0:
        try:
            result = build()
            statuses.append(result.status)
            assert result.status in (0, 130), result.err
        except Killed:
            statuses.append("killed")
    assert statuses == [130, "killed"] * len(KILLED) + [130] * (len(LATER) - len(KILLED)) + [0]
    assert {name: record["status"] for name, record in state().items()} == dict.fromkeys(STAGES, "finished")
    assert result.out.splitlines()[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    assert "exact: the gate passes" in result.out and "does it pay? " in result.out
    assert "<html" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "report.md").read_text().startswith("# ")
    again = build()
    assert again.status == 0 and "[2/8]" not in again.err, "nothing is left to do"


@pytest.fixture
def built(build, tmp_path, monkeypatch):
    """A build whose commands are not run: its records are all that counts."""
    printed = {
        "data": {"num_rows": 9, "num_tokens": 900, "num_answer_tokens": 500, "tokens_per_second": 5.0},
        "doctor": {"gate": {"passed": True, "not_checked": []}},
    }
    called = []

    def call(words):
        called.append(words)
        return 0, json.dumps(printed.get(words[0], {}))

    monkeypatch.setattr("peagle.cli.build.call", call)
    assert build("--to-stage", "data").status == 0
    return called


@pytest.fixture
def commands(built, monkeypatch):
    """The command of each stage that was run, by its first word; nothing is run."""
    found = {}

    def call(words):
        found[words[0]] = words
        return 0, "" if words[0] in ("train", "report") else "{}"

    monkeypatch.setattr(building, "outcome_of_stage", lambda *_: OUTCOME)
    monkeypatch.setattr("peagle.cli.build.call", call)
    return found


def test_with_a_price_the_comparison_has_the_cost_of_the_builds_own_training(build, commands, tmp_path):
    assert build("--to-stage", "train").status == 0
    path = tmp_path / "out" / "build.json"
    document = json.loads(path.read_text())
    for stage, hours in {"check": 4, "data": 2, "train": 0.5}.items():
        document["stages"][stage]["seconds"] = 3600 * hours
    path.write_text(json.dumps(document))
    assert build("--to-stage", "bench", "--price-per-hour", "2").status == 0
    words = commands["bench"]
    assert words[words.index("--training-hours") + 1] == "2.5", "text and training"
    assert words[words.index("--price-per-hour") + 1] == "2.0"


def test_without_a_price_the_comparison_has_no_cost(build, commands):
    assert build("--to-stage", "bench").status == 0
    assert "--training-hours" not in commands["bench"]


def test_changed_settings_are_refused_with_the_difference_and_the_command_that_helps(build, built):
    result = build("--to-stage", "data", budget="20m")
    assert result.status == 2 and "budget was '10m', is '20m'. This stage would be stale: data" in result.err
    assert "hint: add --from-stage data to run them again" in result.err
    assert build("--to-stage", "data", "--from-stage", "data", budget="20m").status == 0
    assert len(built) == 2


def test_a_rerun_from_a_stage_deletes_what_it_wrote(build, built, tmp_path):
    leftover = tmp_path / "out" / "data" / "leftover"
    leftover.parent.mkdir()
    leftover.write_text("")
    assert build("--to-stage", "data").status == 0 and leftover.exists() and len(built) == 1, "it is finished"
    assert build("--to-stage", "data", "--from-stage", "data").status == 0
    assert not leftover.exists() and len(built) == 2


def test_the_plan_of_a_rerun_shows_the_stages_that_run_again_as_planned(build, built, state, capsys):
    def shown(result):
        lines = result.out[result.out.index("\nstage ") :].splitlines()
        return {words[0]: words[-1] for line in lines if (words := line.split()) and words[0] in STAGES}

    before = state()
    assert shown(build("--to-stage", "data")) == dict.fromkeys(STAGES, "planned") | {
        "check": "finished", "data": "finished",
    }  # fmt: skip
    dry = build("--dry-run", "--from-stage", "data")
    assert "data      " in dry.out and " finished  peagle data" not in dry.out and "9 rows" not in dry.out, dry.out
    assert state() == before, "a dry run changes nothing"
    again = build("--to-stage", "data", "--from-stage", "data")
    assert shown(again) == dict.fromkeys(STAGES, "planned") | {"check": "finished"}


def test_a_stage_that_fails_says_what_to_change_and_is_run_again(build, built, state, monkeypatch):
    gate = {"passed": False, "not_checked": [], "first_difference": {"name": "logits", "found": "3 differ"}}
    answers = {"train": (0, ""), "doctor": (1, json.dumps({"gate": gate}))}
    monkeypatch.setattr("peagle.cli.build.call", lambda words: answers.get(words[0], (0, "{}")))
    monkeypatch.setattr(building, "outcome_of_stage", lambda *_: OUTCOME)
    result = build("--to-stage", "gate")
    assert result.status == 2 and "error: the stage gate failed: logits: 3 differ" in result.err
    assert "train again with --from-stage train" in result.err and "it resumes" not in result.err
    assert state()["gate"]["status"] == "failed" and state()["eval"]["status"] == "finished"
    answers["doctor"] = (0, json.dumps({"gate": gate | {"passed": True}}))
    assert build("--to-stage", "gate").status == 0 and state()["gate"]["status"] == "finished"


def test_a_second_build_in_the_directory_is_refused(build, built, tmp_path):
    with only_build(tmp_path / "out"):
        result = build()
        assert result.status == 2 and f"error: another build runs in {tmp_path / 'out'}" in result.err
        assert build("--dry-run").status == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--budget soon", "--budget 'soon' is no limit"),
        ("--budget 3usd", "--budget 3usd needs the price of this machine"),
        ("--from-stage bench --to-stage data", "--from-stage bench comes after --to-stage data"),
        ("--recipe dense-9b", "no recipe 'dense-9b'"),
        ("--max-length 8", "max_length must be at least 32"),
        ("--target elsewhere", "two targets are given"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(build, words, complaint):
    result = build(*words.split(), budget="10m") if "--budget" not in words else build(budget=words.split()[1])
    assert result.status == 2 and complaint in result.err
