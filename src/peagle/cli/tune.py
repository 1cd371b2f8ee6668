"""Measure a load on this machine and recommend settings: method, draft tokens, batch limit.

The load is prompt files at a list of concurrencies or a request rate, or a recording of `peagle serve --record DIR
--record-text`. The recommended setting is then served, and the load put on the server: these are the figures to expect.
--output writes the settings to a file that `peagle serve --settings` and `peagle deploy` read.
"""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.bench.cells import PLAIN, CellResult
from peagle.bench.client import Question
from peagle.bench.offline import shipped_eagle3_drafter
from peagle.bench.online import Result
from peagle.bench.online import measure as online
from peagle.bench.report import check_output, document_of, print_document
from peagle.bench.report import tables as sweep_tables
from peagle.bench.verdict import best_by_concurrency
from peagle.cli import bench
from peagle.console.arguments import Names, Numbers, NumbersOrAuto, ServedModelArguments, WorkloadArguments, parse
from peagle.console.progress import working
from peagle.data.prompts import Prompt
from peagle.errors import ConfigError, PeagleError, ServerError
from peagle.host_memory import free_models
from peagle.report.build import write_report
from peagle.tuning.price import MachinePrice, priced
from peagle.tuning.recommend import recommend
from peagle.tuning.recording import Recording, read_recording
from peagle.tuning.served import RecordedQuestion, loads_of, server, with_served
from peagle.tuning.settings import Settings, settings_of, text_of
from peagle.tuning.shown import lines_of, table_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arguments(ServedModelArguments):
    output: Path | None = None
    """write the settings to this file (.toml)"""
    concurrency: Numbers = (1, 8, 32)
    """requests in flight, to measure and to choose for"""
    request_rate: float | None = None
    """choose for this many requests per second instead"""
    recording: Path | None = None
    """directory of `peagle serve --record`: its prompts, answer lengths, temperature and request rate are the load"""
    max_tpot: float | None = None
    """choose the most tokens/s whose 99th percentile of the time per output token stays within this many ms"""
    methods: Names = bench.DEFAULT_METHODS
    """any of none (plain decoding), eagle3, p-eagle"""
    num_draft_tokens: NumbersOrAuto = (None, 3, 5, 7)
    """limits on the draft tokens per step to try: the engine verifies those that pay, as in `peagle serve`; auto: its
    own choice"""
    allow_quantize: Names | None = None
    """on a GPU: also try these forms of `--quantize`, and recommend one if it is faster; answers are then those of the
    quantized model"""
    eagle3_drafter: str | None = None
    """drafter directory for eagle3; default: the one that ships for the target"""
    serve: bool = True
    """serve the recommended setting to measure what clients see"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of tables"""
    report: Path | None = None
    """write a report with charts into this file (.html or .md)"""
    workload: WorkloadArguments = field(default_factory=WorkloadArguments)
    price: MachinePrice = field(default_factory=MachinePrice)

    def __post_init__(self) -> None:
        for flag, value in (("--request-rate", self.request_rate), ("--max-tpot", self.max_tpot)):
            if value is not None and not value > 0:
                raise ConfigError(f"{flag} must be above 0, got {value:g}")
        if PLAIN not in self.methods or len(self.methods) < 2:
            raise ConfigError("--methods needs none and a method that drafts: only both show whether drafting pays")
        if self.allow_quantize is not None:
            self.target.refuse_quantize("--allow-quantize")
        if self.output is not None:
            check_output("--output", self.output, [".toml"])
        if (self.recording is None) == (self.workload.prompts is None):
            raise ConfigError("tune needs one load", hint="pass either --prompts FILES or --recording DIR")


def main(argv: list[str]) -> int:
    arguments, recorded = with_recording(parse(Arguments, "tune", argv))
    options = {
        name: getattr(arguments, name) for name in vars(arguments) if name in bench.Arguments.__dataclass_fields__
    }
    sweep = bench.checked(bench.Arguments(**options, cost=arguments.price.cost), has_prompts=recorded is not None)
    results: list[CellResult] = []
    facts, stop = measure(sweep, arguments.allow_quantize or (), results, recorded)
    document = document_of(results, **facts, is_interrupted=stop is not None)
    if stop is not None:  # too little was measured for a recommendation, but it is worth a look
        print_document(document | {"tuned": None}, arguments.json, sweep_tables(document)[0])
        raise stop
    limits: dict[str, Any] = {"request_rate": arguments.request_rate, "max_tpot": arguments.max_tpot}
    tuned = recommend(document["cells"], **limits)
    if tuned is None:
        raise ConfigError(
            f"no setting could be measured: {results[0].failure}", hint="lower --concurrency or --max-tokens"
        )
    if arguments.serve:
        tuned, stop = served(sweep, tuned, recorded, document)
    verdict, best = " ".join(lines_of(tuned)).removesuffix("."), best_by_concurrency(document["cells"])
    document = sweep.cost.added_to(document | {"tuned": tuned, "verdict": verdict, "recommended": best})
    settings = settings_for(sweep, tuned)
    if arguments.output is not None:
        arguments.output.write_text(text_of(settings, document["provenance"]), encoding="utf-8")
    said = [
        *lines_of(tuned),
        *priced(document),
        *([] if arguments.output is None else [f"use it: peagle serve --settings {arguments.output}"]),
    ]
    print_document(document, arguments.json, sweep_tables(document)[0], table_of(tuned), verdict="\n".join(said))
    if arguments.report is not None:
        write_report([document], arguments.report)
    if stop is not None:
        raise stop
    return 0


def settings_for(sweep: bench.Arguments, tuned: dict[str, Any]) -> Settings:
    return settings_of(tuned, sweep.target.target, drafter_of(sweep, tuned), sweep.target.quantize)


def served(
    sweep: bench.Arguments, tuned: dict[str, Any], recorded: Recording | None, document: dict[str, Any]
) -> tuple[dict[str, Any], BaseException | None]:
    """The recommendation with the figures of a server, if it starts, and the Ctrl-C that ended it early."""
    free_models()
    workload, prompts = sweep.workload, sweep.workload.read()
    is_chat = recorded is None and document["has_chat_template"]
    given = ("", is_chat, workload.max_tokens, workload.temperature, False, workload.seed)
    question = Question(*given)
    if recorded is not None:
        prompts = [Prompt(str(number), (), "recorded") for number in range(len(recorded.prompts))]
        question = RecordedQuestion(*given, prompt_ids=recorded.prompts)
    num_turns, results = sum(prompt.num_turns for prompt in prompts), list[Result]()
    planned = [Result(load, workload.requests(load.concurrency or 0, num_turns)) for load in loads_of(tuned)]
    try:
        with tempfile.TemporaryDirectory() as work, working("serving the recommended setting"):
            settings = Path(work) / "tuned.toml"
            settings.write_text(text_of(settings_for(sweep, tuned), document["provenance"]), encoding="utf-8")
            with server(settings, words_of(sweep)) as root:
                _, stop = online(root, None, question, prompts, planned, results, seed=workload.seed)
        return (tuned, stop) if stop is not None else (with_served(tuned, results), None)
    except KeyboardInterrupt as interrupt:
        return tuned, interrupt
    except ServerError as error:
        log.warning("the recommended setting was not served: %s", error.message)
        return tuned, None


def words_of(sweep: bench.Arguments) -> list[str]:
    """The options of the models that a settings file does not have."""
    words = ["--dtype", sweep.target.dtype, "--device", sweep.target.device]
    return [*words, "--allow-mismatch"] if sweep.drafter.allow_mismatch else words


def measure(
    sweep: bench.Arguments, forms: Sequence[str], results: list[CellResult], recorded: Recording | None
) -> tuple[dict[str, Any], BaseException | None]:
    """Sweep with the target's weights as they are, then in each form, as a server would run it."""
    if forms:
        check_forms(sweep, forms)
    prompt_ids = None if recorded is None else recorded.prompts
    facts, stop = bench.run_workload(sweep, results, prompt_ids, verifies_all=False)
    for form in forms if stop is None else ():
        quantize: dict[str, Any] = {"quantize": form}
        rounded, own = replace(sweep, target=replace(sweep.target, **quantize)), list[CellResult]()
        try:
            _, stop = bench.run_workload(rounded, own, prompt_ids, verifies_all=False)
        except PeagleError as error:
            log.warning("--quantize %s was not measured: %s", form, error.message)
        for result in own:
            result.cell = replace(result.cell, quantize=form)
        results += own
        if stop is not None:
            break
    return facts | {"num_planned_cells": facts["num_planned_cells"] * (1 + len(forms))}, stop


def check_forms(sweep: bench.Arguments, forms: Sequence[str]) -> None:
    """Refuse forms that this machine cannot compute with, before anything is measured."""
    import torch

    from peagle.targets.few_bit import check_quantize
    from peagle.targets.load import choose_device

    given = sweep.target.dtype
    for form in forms:
        dtype = torch.bfloat16 if given == "auto" else getattr(torch, given)
        check_quantize(form, choose_device(sweep.target.device), dtype)


def drafter_of(sweep: bench.Arguments, tuned: dict[str, Any]) -> str | None:
    """The drafter of the recommended method, of vLLM's if our engine is to decode plainly; None: the target's own."""
    method = tuned["method"] if tuned["method"] != PLAIN else (tuned["vllm"] or {}).get("method")
    if method != "eagle3":
        return sweep.drafter.drafter
    return sweep.eagle3_drafter or shipped_eagle3_drafter(sweep.target.target)


def with_recording(arguments: Arguments) -> tuple[Arguments, Recording | None]:
    """The options with what a recording says about its load."""
    if arguments.recording is None:
        return arguments, None
    found = read_recording(arguments.recording, arguments.workload.limit)
    workload = replace(arguments.workload, max_tokens=found.max_tokens, temperature=found.temperature)
    return replace(arguments, workload=workload, request_rate=arguments.request_rate or found.request_rate), found
