"""What is kept, what is deleted and what is measured again if a build is interrupted, restarted or changed."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.measured_rates import CPU
from peagle.building import measure, run
from peagle.building.commands import option_of
from peagle.building.config import Budget, BuildSettings
from peagle.building.plan import Measured, make_plan
from peagle.building.run import Build
from peagle.building.state import only_build
from peagle.errors import CapacityError, ConfigError, DataError, PeagleError
from peagle.targets.prices import Price, price_of

RATES = dataclasses.replace(
    CPU, options={"max_length": 128}, max_length=128, tokens_per_second=40.0, seconds_per_step=0.5, feature_bytes=0
)
TEXT = {"num_rows": 9, "num_tokens": 900, "num_answer_tokens": 600, "tokens_per_second": 5.0}


@dataclasses.dataclass
class Builds:
    """Runs builds in one directory. Commands write their file and are noted; `failing` raises in one of them."""

    output: Path
    full_tokens: int = RATES.full_tokens
    num_measured: int = 0
    rows: list[int | None] = dataclasses.field(default_factory=list)
    failing: dict[str, BaseException] = dataclasses.field(default_factory=dict)
    called: list[list[str]] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [command[0] for command in self.called]

    @property
    def state(self) -> dict:
        return json.loads((self.output / "build.json").read_text())

    @property
    def text(self) -> Path:
        return self.output / "data" / "text"

    def make(self, price: float | None = None, **settings) -> Build:
        asked = BuildSettings(output=self.output, **settings)
        described = asked.described(target="smol", price_per_hour=price)
        load = lambda: SimpleNamespace(device=SimpleNamespace(type="cpu"))  # noqa: E731
        cost = [] if price is None else ["--price-per-hour", str(price)]
        return Build(asked, [], described, load, self.call, self.said.append, price_of(None, price), cost)

    def __call__(self, first=None, last="data", budget="10m", **settings) -> Build:
        build = self.make(budget=budget, **settings)
        build.run(*build.prepare(first), first, last)
        return build

    def call(self, command: list[str]) -> tuple[int, str]:
        self.called.append(command)
        if command[0] == "data":
            self.text.parent.mkdir(exist_ok=True)
            self.text.write_text("written")
        if command[0] in self.failing:
            raise self.failing.pop(command[0])
        return 0, "" if command[0] in ("train", "report") else json.dumps(TEXT)

    def measured(self, target, settings, budget, load_seconds) -> Measured:
        self.num_measured += 1
        self.rows.append(settings.max_length)
        return dataclasses.replace(RATES, full_tokens=self.full_tokens)


@pytest.fixture
def builds(tmp_path, monkeypatch) -> Builds:
    found, outcome_of_stage = Builds(tmp_path / "out"), run.outcome_of_stage

    def outcome(stage, document, path):
        if stage == "data":
            return outcome_of_stage(stage, document, path)
        return {
            "num_steps": 3,
            "acceptance_length": 1.5,
            "workload": "own",
            "passed": True,
            "lossless": True,
            "verdict": "-",
        }

    monkeypatch.setattr(run, "outcome_of_stage", outcome)
    monkeypatch.setattr(measure, "measure", found.measured)
    monkeypatch.setattr(measure, "fitting_prompts", lambda target: [])
    return found


def interrupted(builds: Builds, stage: str, **options) -> None:
    builds.failing[stage] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        builds(**options)


# Restarts -------------------------------------------------------------------------------------------------------------


def test_a_restart_that_was_interrupted_resumes_if_the_command_is_repeated(builds):
    builds()
    interrupted(builds, "data", first="data")
    builds.text.with_name("progress").write_text("")
    builds("data")
    assert builds.text.with_name("progress").exists(), "text written since was deleted"
    assert builds.said.count("resuming the build that --from-stage data began") == 1
    builds("data")
    assert not builds.text.with_name("progress").exists(), "that command has ended: repeated, it begins anew"


def test_a_restart_that_was_interrupted_in_a_later_stage_does_not_begin_anew_if_repeated(builds):
    builds()
    interrupted(builds, "train", first="data", last="train")
    builds("data", "train")
    assert builds.words == ["data", "data", "train", "train"], "finished text was written again"


def test_an_interrupted_restart_with_new_settings_begins_anew(builds):
    builds()
    interrupted(builds, "data", first="data")
    builds.text.with_name("progress").write_text("")
    builds("data", seed=1)
    assert not builds.text.with_name("progress").exists() and builds.state["settings"]["seed"] == 1


def test_files_of_a_restart_that_was_killed_while_deleting_do_not_count_as_trained(builds, monkeypatch):
    drafter = builds.output / "drafter" / run.WEIGHTS_NAME
    builds(last="train")
    drafter.parent.mkdir()
    drafter.write_text("old")

    class Killed(BaseException):
        pass

    def killed(path):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run, "_remove", killed)
        with pytest.raises(Killed):
            builds("train", "train", num_layers=2)
    assert "train" not in builds.state["stages"] and builds.state["settings"]["num_layers"] == 2 and drafter.exists()
    builds(last="train", num_layers=2)
    assert not drafter.exists() and builds.words == ["data", "train", "train"]


def test_a_drafter_that_the_build_did_not_train_is_refused_each_time(builds):
    builds()
    drafter = builds.output / "drafter" / run.WEIGHTS_NAME
    drafter.parent.mkdir()
    drafter.write_text("foreign")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"out/drafter holds a drafter that this build did not train"):
            builds(last="train")
    assert drafter.exists() and builds.words == ["data"]


def test_new_settings_are_written_with_the_restart_and_not_before(builds):
    builds()
    with pytest.raises(ConfigError, match="--budget 1s is too small"):
        builds("data", budget="1s")
    assert builds.state["settings"]["budget"] == "10m" and "data" in builds.state["stages"]


def test_two_builds_in_one_directory_are_refused(tmp_path):
    with only_build(tmp_path / "out"):
        with (
            pytest.raises(ConfigError, match=f"another build runs in {re.escape(str(tmp_path))}/out"),
            only_build(tmp_path / "out"),
        ):
            pass
        assert (tmp_path / "out").is_dir()
    with only_build(tmp_path / "out"):
        pass


# Text that grows ------------------------------------------------------------------------------------------------------


def test_a_larger_budget_adds_to_the_text_and_holds_out_as_many_as_before(builds):
    builds()
    state = builds.state
    state["stages"]["data"]["seconds"] = 3600.0
    (builds.output / "build.json").write_text(json.dumps(state))
    builds.text.with_name("kept").write_text("")
    builds("data", budget="4h")
    before, after = builds.called
    assert builds.text.with_name("kept").exists(), "the text was deleted"
    assert int(option_of(after, "--num-tokens")) > int(option_of(before, "--num-tokens"))
    assert option_of(after, "--num-held-out") == option_of(before, "--num-held-out")
    assert builds.state["stages"]["data"]["seconds"] >= 3600, "the hours of the kept text count"


def test_the_text_stays_if_a_larger_budget_wants_as_much(builds):
    builds.full_tokens = 500
    builds()
    builds.text.with_name("kept").write_text("")
    builds("data", budget="20m")
    assert builds.text.with_name("kept").exists() and len(builds.called) == 2


@pytest.mark.parametrize(
    "changes", [{}, {"budget": "8m"}, {"budget": "20m", "seed": 1}, {"budget": "20m", "new": True}]
)
def test_the_text_is_deleted_if_it_would_be_another_or_smaller_or_is_asked_for_again(builds, tmp_path, changes):
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "a"}\n' * 500)
    builds(data=asked)
    builds.text.with_name("old").write_text("")
    if changes.pop("new", False):
        asked.write_text('{"prompt": "b"}\n' * 500)
    builds("data", data=asked, **changes)
    assert not builds.text.with_name("old").exists()


def test_answers_to_more_prompts_of_a_file_are_added(builds, tmp_path):
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "a"}\n' * 500)
    builds(data=asked)
    builds.text.with_name("kept").write_text("")
    builds("data", data=asked, budget="20m")
    before, after = (int(option_of(command, "--limit")) for command in builds.called)
    assert builds.text.with_name("kept").exists() and after > before


# What is measured again -----------------------------------------------------------------------------------------------


def test_the_rows_follow_a_changed_budget_until_text_is_written(builds):
    for budget in ("10m", "630s"):
        builds.make(budget=budget).prepare()
    assert builds.num_measured == 1, "rows of the same length"
    builds(budget="2h")
    assert builds.num_measured == 2, "longer rows fit into this budget"
    builds("data", budget="10m")
    assert builds.num_measured == 2, "rows stay as those of the text"
    builds(budget="10m", num_layers=2)
    assert builds.rows == [None, None, 128], "a new shape is measured with the rows of the text"


def test_a_new_target_is_not_planned_with_the_rates_of_the_earlier_one(builds):
    builds.make(budget="10m").prepare()
    other = builds.make(budget="10m")
    other.described["target"] = "other"
    other.prepare("check")
    again = builds.make(budget="10m")
    again.prepare()
    assert builds.num_measured == 3


def test_a_changed_seed_reaches_the_training(builds):
    builds(last="train")
    builds("data", "train", seed=5)
    assert [option_of(command, "--seed") for command in builds.called] == ["0", "0", "5", "5"]
    assert builds.num_measured == 1, "the seed changes no rate"


# Cost -----------------------------------------------------------------------------------------------------------------


def test_a_build_is_charged_one_gpu_of_its_instance_as_its_comparison_is():
    price = Price(80.0, "2026-01-01", "list", "big", "H100", 8)
    assert Budget.parse("20usd").at(price).seconds == 7200, "20 dollars at 10 per GPU and hour"
    gpu = dataclasses.replace(RATES, device="cuda", tokens_per_second=90_000.0)
    plan = make_plan(gpu, None)
    assert plan.price(price) == pytest.approx(plan.total / 3600 * 10)


def test_a_price_given_after_the_comparison_is_not_ignored(builds):
    builds(last="bench")
    with pytest.raises(
        ConfigError, match=r"price_per_hour was None, is 2.0. This stage would be stale: bench"
    ) as refused:
        builds(last="bench", price=2.0)
    assert "add --from-stage bench" in refused.value.hint
    builds("bench", "bench", price=2.0)
    assert builds.words[-2:] == ["bench", "bench"] and "--training-hours" in builds.called[-1]


# Hints ----------------------------------------------------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("stage", "error", "hint"),
    [
        ("data", DataError("no answer"), "with a new --output"),
        ("data", CapacityError("full", hint="free disk space"), "Then rerun the command: it resumes at data"),
        ("train", OutOfMemoryError("CUDA"), "lower --max-length and add --from-stage data"),
    ],
)
def test_a_hint_names_the_stage_to_run_again_or_that_the_build_resumes(builds, stage, error, hint):
    builds.failing[stage] = error
    with pytest.raises(PeagleError) as failed:
        builds(last="train")
    assert failed.value.hint.endswith(hint)
