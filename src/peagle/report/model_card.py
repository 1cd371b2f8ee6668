"""A drafter's model card: README.md of its repository, with the Hub's metadata. Everything in it is from its card."""

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from peagle.bench.report import number
from peagle.checkpoint.card import DrafterCard
from peagle.report.markdown import markdown_of
from peagle.report.parts import Report, Section, Table
from peagle.report.sweep import length_tables
from peagle.vllm.command import RUNNER_VARIABLE

METHODS = {"p-eagle": "A P-EAGLE", "eagle3": "An EAGLE-3"}
MAKERS = {
    "synthesize": "The target wrote both questions and answers (`peagle data synthesize`)",
    "regenerate": "The target answered prompts from files (`peagle data regenerate`)",
}
STAGE = {
    "steps": "num_steps",
    "batch size": "batch_size",
    "learning rate": "learning_rate",
    "loss": "loss",
    "labels": "labels",
    "longest text": "max_length",
    "seed": "seed",
}


@dataclass(frozen=True)
class Publication:
    """A drafter to publish, and how commands name it."""

    card: DrafterCard
    title: str
    base_model: str
    """the target's id on the Hugging Face Hub"""
    target: str
    """how peagle's commands name the target"""
    license: str
    drafter: str
    """its id on the Hub, or a directory"""
    num_draft_tokens: int
    """recommended per step"""
    is_complete: bool = True
    """whether vLLM can read the directory as it is"""
    instance: str = "ml.g6e.2xlarge"
    """of SageMaker, in the example"""
    note: str = ""
    """about the target's weights"""

    @property
    def is_parallel(self) -> bool:
        return self.card.method == "p-eagle"


def model_card(publication: Publication) -> str:
    """README.md: the metadata as YAML, then what the drafter is, how to serve it, and what it was measured at."""
    from huggingface_hub import ModelCardData

    card, base = publication.card, publication.base_model
    metadata = ModelCardData(
        base_model=base,
        license=publication.license.lower(),
        library_name="peagle",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", *dict.fromkeys((card.method, "eagle3")), "vllm"],
    )
    summary = (
        f"{METHODS[card.method]} drafter for `{base}`: it proposes tokens that the target verifies, so decoding gets "
        f"faster and the output stays the target's own. It cannot be used alone.{publication.note}"
    )
    sections = [*_serving(publication), _acceptance(card), _training(card)]
    shown = [each for each in sections if each.tables or each.code]
    shown = [replace(each, text=[_wrapped(paragraph) for paragraph in each.text]) for each in shown]
    return (
        f"---\n{metadata.to_yaml().strip()}\n---\n\n{markdown_of(Report(publication.title, _wrapped(summary), shown))}"
    )


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def _serving(publication: Publication) -> Iterator[Section]:
    card, drafter = publication.card, publication.drafter
    peagle = ["peagle", "serve", publication.target, "--drafter", drafter]
    yield Section("Serve with peagle", code=f"pip install 'peagle[serve]'\n{shlex.join(peagle)}")
    exported = drafter if publication.is_complete else f"{drafter}-vllm"
    settings = {
        "method": "eagle3",
        "model": exported,
        "num_speculative_tokens": publication.num_draft_tokens,
        "parallel_drafting": publication.is_parallel,
    }
    lines = [] if publication.is_complete else [shlex.join(["peagle", "export", drafter, "--output", exported])]
    runner = f"{RUNNER_VARIABLE}=0 " if publication.is_parallel else ""
    lines.append(f"{runner}{shlex.join(['vllm', 'serve', publication.base_model])} \\")
    lines += ["  --speculative-config \\", f"  {shlex.quote(json.dumps(settings, separators=(',', ':')))}"]
    limit = card.num_draft_tokens
    text = [] if limit is None else [f"Draft at most {limit} tokens per step: it was not trained for more."]
    yield Section("Serve with vLLM", text, code="\n".join(lines))
    deploy = ["peagle", "deploy", "sagemaker", "my-endpoint", "--target", publication.target, "--drafter", drafter]
    more = ["--num-draft-tokens", str(publication.num_draft_tokens), "--instance", publication.instance]
    code = f"pip install 'peagle[deploy]'\n{shlex.join(deploy)} \\\n  {shlex.join(more)} --role ARN --region REGION"
    yield Section("Serve on SageMaker", code=code)


def _acceptance(card: DrafterCard) -> Section:
    found = {name: each for name, each in card.acceptance.items() if isinstance(each, Mapping)}
    found = {_set_name(name, each): each for name, each in found.items() if each.get("acceptance_length")}
    rows = [
        (
            name,
            number(each.get("num_prompts")),
            number(each.get("num_drafts")),
            number(each.get("num_draft_tokens") or len(each.get("per_position") or ()) or None),
            f"{each['acceptance_length']:.2f}",
        )
        for name, each in found.items()
    ]
    heads = ("set", "prompts", "drafts", "draft tokens", "acceptance length")
    tables = [Table("By set", heads, rows)] if rows else []
    deepest = max((len(each.get("per_position") or ()) for each in found.values()), default=0)
    by_depth = [
        (name, *(f"{rate:.3f}" for rate in rates), *[""] * (deepest - len(rates)))
        for name, each in found.items()
        if (rates := each.get("per_position"))
    ]
    if by_depth:
        caption = "By depth: share of drafts whose token at this position was accepted"
        tables.append(Table(caption, ("set", *map(str, range(1, deepest + 1))), by_depth))
    tables += length_tables("set", {name: each.get("by_length") for name, each in found.items()})
    text = [
        "The acceptance length is the number of tokens per step: the accepted drafts plus one token of the target. "
        f"The drafter learned from texts of up to {card.max_length:,} tokens; expect less on longer and on other texts."
    ]
    return Section("Acceptance", text, (), tables)


def _set_name(name: str, entry: Mapping[str, Any]) -> str:
    if "prompts" not in entry:
        return name.replace("_", " ")
    return f"{entry['prompts']}, temperature {entry.get('temperature', 0):g}"


def _training(card: DrafterCard) -> Section:
    stages = list(_stages(card.training))[::-1]
    heads = ("stage", *STAGE)
    rows = [
        (str(index), *(_shown(stage, key) for key in STAGE.values())) for index, stage in enumerate(stages, start=1)
    ]
    tables = [Table("Recipe; a later stage continues the one before it", heads, rows)] if card.training else []
    facts = {
        "conversations": number(card.data.get("num_conversations")),
        "answer tokens": number(card.data.get("num_answer_tokens")),
        "temperatures": ", ".join(f"{each:g}" for each in _settings(card).get("temperatures") or ()),
        "layers": str(card.training.get("num_layers") or ""),
        "reads the target's layers": ", ".join(map(str, card.aux_layer_ids)),
        "trained with": (card.provenance.get("hardware") or {}).get("accelerator") or "",
        "trained on": str(card.provenance.get("created") or "")[:10],
        "target's weights": card.target.weights,
    }
    known = [(name, value) for name, value in facts.items() if value not in ("", "-")]
    tables.append(Table("Facts, from drafter_card.json", ("fact", "value"), known, num_left=2))
    maker = MAKERS.get(str(card.data.get("made_by")))
    return Section("Data and recipe", [f"{maker}."] if maker else (), (), tables)


def _shown(stage: Mapping[str, Any], key: str) -> str:
    value = stage.get(key, "-")
    if value is None:  # the labels of a run that did not name them
        return "reached" if stage.get("method") == "p-eagle" else "-"
    return str(value)


def _settings(card: DrafterCard) -> Mapping[str, Any]:
    return card.data.get("settings") or {}


def _stages(training: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """This run, then the one it continues, and so on."""
    found: Mapping[str, Any] | None = training
    while found:
        yield found
        found = (found.get("from_drafter") or {}).get("training")
