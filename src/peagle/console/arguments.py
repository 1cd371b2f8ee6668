"""Options shared by several commands, and how to parse them."""

import contextlib
import inspect
import io
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, StructConstructorSpec, StructTypeInfo

from peagle.console.progress import working
from peagle.data.config import require_at_least
from peagle.data.prompts import Prompt, read_prompts, workload_name
from peagle.errors import ConfigError, PeagleError, TargetError, nearest
from peagle.sampling_params import SamplingParams
from peagle.server.settings import keys_in

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

T = TypeVar("T")
D = TypeVar("D", bound="TargetArguments | DrafterArguments")
TargetOptions = TypeVar("TargetOptions", bound="TargetArguments")

DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "PEAGLE_API_KEY"
MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
"""Flags without their group's name; no None as a value; only the flag that changes a boolean's default."""


@dataclass(frozen=True)
class TargetArguments:
    """Target model."""

    target: str | None = None
    """directory, GGUF file, name in `peagle catalog`, or Hugging Face id; default: the drafter's own target, or the
    built-in model if no drafter is given"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU; on a CPU float32, or bfloat16 if the weights need it and the CPU supports it"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""

    def check(self) -> None:
        """Refuse a target or a device that is not there, before torch is imported."""
        from peagle.targets.catalog import DEFAULT_TARGET
        from peagle.targets.hub import check_source

        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise TargetError(f"unknown device {self.device!r}", hint='use "auto", "cpu", "cuda" or "cuda:0"')
        check_source(self.target or DEFAULT_TARGET)

    def load(self) -> "HFTarget":
        return self._load()

    def _load(self, **more: Any) -> "HFTarget":
        from transformers.utils import logging as transformers_logging

        from peagle.targets.load import load_target

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        with working(f"loading the target {self.target or ''}".rstrip()):
            return load_target(self.target, dtype=self.dtype, device=self.device, **more)


@dataclass(frozen=True)
class ServedTargetArguments(TargetArguments):
    """Target model."""

    quantize: Literal["fp8", "int8", "int4", "mxfp4"] | None = None
    """on a GPU: quantize the layers to 8 or 4 bits while loading; mxfp4: only their experts"""

    def load(self) -> "HFTarget":
        return self._load(quantize=self.quantize)

    def create(self, shape: str) -> "HFTarget":
        """A target of this shape with random weights."""
        from peagle.targets.shapes import dummy_target

        return dummy_target(shape, dtype=self.dtype, device=self.device, quantize=self.quantize)

    def refuse_quantize(self, what: str, is_given: object = True) -> None:
        """Refuse --quantize together with something that takes the weights as they are."""
        if self.quantize is not None and is_given:
            raise ConfigError(
                f"{what} takes the target's own weights, which contradicts --quantize", hint="drop one of the two"
            )


@dataclass(frozen=True)
class DrafterArguments:
    """Drafter."""

    drafter: str | None = None
    """directory, Hugging Face id, or catalog variant (base, long-context); default: the catalog's"""
    allow_mismatch: bool = False
    """accept a drafter trained for other weights, another tokenizer or another chat template"""

    def target_for(self, target: TargetOptions) -> TargetOptions:
        """The options of the target to use: of the given one, else of the one on the drafter's card.

        Refuses a target that is not there, before torch is imported.
        """
        from peagle.checkpoint.pairing import target_of

        if self.drafter is not None and target.target is None:
            target = replace(target, target=target_of(self.drafter))
            if target.target is not None:
                log.info("target %s, for which the drafter was trained", target.target)
        target.check()
        return target

    def pair(self, target: TargetOptions) -> TargetOptions:
        """The same, and refuse a drafter that is not there or not public."""
        from peagle.checkpoint.pairing import check_drafter
        from peagle.targets.catalog import DEFAULT_TARGET, find

        target = self.target_for(target)
        entry = find(target.target or DEFAULT_TARGET)
        if self.drafter is not None:
            check_drafter(self.drafter, entry)
        for each in () if entry is None else (entry.drafter(),) if self.drafter is None else entry.drafters:
            if self.drafter in (None, each.variant):
                each.check_public(None if entry is None else entry.name)
        return target

    def load(self, target: "HFTarget") -> "Drafter":
        from peagle.checkpoint.native import load_drafter

        with working("loading the drafter"):
            return load_drafter(self.drafter, target, allow_mismatch=self.allow_mismatch)


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Base of the commands that take a target and a drafter."""

    target: TargetArguments = field(default_factory=TargetArguments)
    drafter: DrafterArguments = field(default_factory=DrafterArguments)


@dataclass(frozen=True, kw_only=True)
class ServedModelArguments(ModelArguments):
    """The same for commands that only decode, whose target may be quantized."""

    target: ServedTargetArguments = field(default_factory=ServedTargetArguments)


@dataclass(frozen=True)
class KeyArguments:
    """Authentication. Set PEAGLE_API_KEY or pass a file: other users can read the command line."""

    api_key_file: Path | None = None
    """file whose first line is the server's API key; lines that start with # are skipped"""

    def read(self) -> str | None:
        """The key from the file, else from the environment, else None."""
        file = self.api_key_file
        key = os.environ.get(KEY_VARIABLE, "").strip() if file is None else keys_in(file)[0]
        if not (key.isascii() and key.isprintable()) or " " in key:
            source = file or KEY_VARIABLE
            raise ConfigError(f"the API key in {source} has characters that are not allowed in an HTTP header")
        return key or None


def comma_list(
    read: Callable[[str], T], metavar: str, *, may_repeat: bool = False, may_be_empty: bool = False
) -> PrimitiveConstructorSpec[tuple[T, ...]]:
    """Comma-separated values, without duplicates unless they may repeat."""

    def values(words: list[str]) -> tuple[T, ...]:
        if not words:
            return ()
        found = tuple(read(word.strip()) for word in words[0].split(",") if word.strip())
        if not found:
            raise ValueError(f"{words[0]!r} is empty")
        if len(set(found)) < len(found) and not may_repeat:
            raise ConfigError(f"{words[0]}: duplicate value", hint="list each value once")
        return found

    return PrimitiveConstructorSpec(
        nargs=(0, 1) if may_be_empty else 1,
        metavar=metavar,
        instance_from_str=values,
        is_instance=lambda instance: isinstance(instance, tuple),
        str_from_instance=lambda instance: [",".join("auto" if each is None else str(each) for each in instance)],
    )


def _number_or_auto(word: str) -> int | None:
    return None if word == "auto" else int(word)


Files = Annotated[tuple[Path, ...], comma_list(Path, "FILE[,FILE...]")]
Names = Annotated[tuple[str, ...], comma_list(str, "NAME[,NAME...]")]
Anchors = Annotated[tuple[str, ...], comma_list(str, "[NAME[,NAME...]]", may_be_empty=True)]
Numbers = Annotated[tuple[int, ...], comma_list(int, "INT[,INT...]")]
NumbersOrAuto = Annotated[tuple[int | None, ...], comma_list(_number_or_auto, "{INT|auto}[,...]")]


@dataclass(frozen=True)
class WorkloadArguments:
    """Prompts and sampling."""

    prompts: Files | None = None
    """prompt files, comma-separated"""
    limit: int | None = None
    """use only the first N prompts of each file, each once"""
    categories: Names | None = None
    """use only the prompts of these categories, as the file names them; --limit then counts by category"""
    max_turns: int | None = None
    """most turns of a conversation, each sent with the model's own answers before it; default: all in the file"""
    num_requests: int | None = None
    """requests per measurement, repeating prompts; default: each turn once, and without --limit at least 8 x
    concurrency above 1"""
    max_tokens: int = 256
    """most tokens per answer"""
    temperature: float = 0.0
    """0 is greedy"""
    seed: int = 0
    """random seed of sampling and arrivals"""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "limit", "max_turns", "num_requests", "max_tokens")
        require_at_least(self, 0, "temperature")

    def read(self) -> list[Prompt]:
        """The prompts; one without a category has the name of its file."""
        prompts = [
            replace(each, category=each.category or workload_name(path), later=each.later[: self._num_later])
            for path in self.prompts or ()
            for each in read_prompts(path, limit=None if self.categories else self.limit)
        ]
        return prompts if self.categories is None else self._chosen(prompts, self.categories)

    @property
    def _num_later(self) -> int | None:
        return None if self.max_turns is None else self.max_turns - 1

    def _chosen(self, prompts: list[Prompt], categories: Names) -> list[Prompt]:
        """The prompts of some categories, at most `limit` of each per file."""
        known = dict.fromkeys(each.category for each in prompts)
        for name in categories:
            if name not in known:
                raise ConfigError(f"--categories: no prompt has the category {name!r}", hint=nearest(name, known))
        seen: Counter[tuple[str, str]] = Counter()
        chosen = []
        for each in prompts:
            place = (each.where.rpartition(":")[0], each.category)
            if each.category in categories and (self.limit is None or seen[place] < self.limit):
                seen[place] += 1
                chosen.append(each)
        return chosen

    def requests(self, concurrency: int, num_turns: int) -> int:
        """Requests of a measurement. By default every turn once and at least eight per batch slot, so that the
        emptying batch weighs little."""
        if self.num_requests is not None:
            return self.num_requests
        return num_turns if concurrency <= 1 or self.limit is not None else max(8 * concurrency, num_turns)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)

    @property
    def name(self) -> str:
        return "+".join(workload_name(path) for path in self.prompts or ())


SELF_EVIDENT = ("None", "", "False")
"""Defaults that --help does not show: the help text says what happens without the option."""
RARE = {
    "alarms", "allow_mismatch", "anchors", "as_baseline", "assume_acceptance", "categories", "checkpoint_activations",
    "cors_origins", "detailed", "draft_vocab", "drafter_layers", "drain_seconds", "dummy", "eager", "eagle3_drafter",
    "extra_body", "goodput", "ignore_eos", "init", "keep_best", "keep_cut", "labels", "logprobs", "max_tpot",
    "memory_share", "metrics", "min_p", "network_isolation", "pair_head", "parallel", "prefill_tokens", "ready_seconds",
    "repetition_penalty", "request_seconds", "retention", "reuse_prefixes", "save_every", "security_groups", "subnets",
    "tags", "tolerance", "training_hours", "vllm_python",
}  # fmt: skip
"""Fields whose options only --help-all shows. They work all the same."""
HELP_ALL = "--help-all"
HINTS = ConstructorRegistry()
_hides_rare: list[bool] = []
_has_pairs: list[bool] = []
"""not empty: both flags of a boolean are shown"""
_rare: list[str] = []
_delegated: list[StructTypeInfo] = []


@HINTS.struct_rule
def _without_evident_defaults(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Tyro's own rule for dataclasses, without "(default: None)" and the like, and without line breaks in the help."""
    if _delegated or not is_dataclass(info.type):
        return None
    _delegated.append(info)
    spec = ConstructorRegistry.get_struct_spec(info)
    _delegated.pop()
    assert isinstance(spec, StructConstructorSpec)
    evident = SELF_EVIDENT if _has_pairs else (*SELF_EVIDENT, "True")
    hint = tyro.conf.arg(help_behavior_hint=lambda label: "" if label in evident else f"(default: {label})")
    fields: list[Any] = [replace(each, type=Annotated[each.type, hint]) for each in spec.fields]  # type: ignore[arg-type]
    for index, each in enumerate(fields):
        turns_off = each.default is True and not _has_pairs
        each = fields[index] = replace(each, helptext=partial(_flowing, each.helptext, turns_off))
        if each.name in RARE and not is_dataclass(spec.fields[index].type):  # a group has options of its own
            _rare.append(f"--{each.name.replace('_', '-')}")
            if _hides_rare:
                fields[index] = replace(each, type=Annotated[each.type, tyro.conf.Suppress])
    return replace(spec, fields=tuple(fields))


def _flowing(helptext: str | Callable[[], str | None] | None, turns_off: bool) -> str | None:
    """Help as one paragraph; of a flag that `turns_off` what the text names, the opposite."""
    words = ((helptext() if callable(helptext) else helptext) or "").split()
    return " ".join(["do not", *words] if turns_off else words) or None


def parse(kind: type[T], command: str, argv: list[str], *, description: str | None = None, **options: Any) -> T:
    """Parse a command's options into its dataclass; the description defaults to its module's docstring.

    Errors raised by the dataclass propagate. Tyro explains other bad options on stderr and exits with status 2.
    """
    # A recipe may have changed the default of a boolean: keep both of its flags.
    _has_pairs[:] = [True] if "default" in options else []
    options["config"] = MARKERS[:2] if _has_pairs else MARKERS
    description = inspect.cleandoc(description or sys.modules[kind.__module__].__doc__ or "")
    options |= {"prog": f"peagle {command}", "description": description}
    output = io.StringIO()
    _rare.clear()
    # Tyro does not parse what it hides, so rare options are hidden only where help is asked for.
    _hides_rare[:] = [True] if {"-h", "--help"} & set(argv) else []
    argv = ["--help" if word == HELP_ALL else word for word in argv]
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(kind, args=argv, registry=HINTS, **options)
    except SystemExit as end:
        cause: BaseException | None = end
        while cause is not None and not isinstance(cause, PeagleError):
            cause = cause.__context__
        if cause is not None:  # tyro takes every ValueError of a dataclass, ours too
            raise cause from None
        sys.stderr.write(output.getvalue())
        if end.code == 0 and _rare and _hides_rare:
            print(f"`peagle {command} {HELP_ALL}` also shows {', '.join(dict.fromkeys(_rare))}")
        raise


def with_positional(options: D, name: str, value: str | None) -> D:
    """`options` with the field `name` given as a positional argument; refuses both."""
    option = getattr(options, name)
    if value is not None and option is not None:
        raise ConfigError(f"two {name}s are given: {value} and --{name} {option}", hint="give one of them")
    changes: dict[str, Any] = {} if value is None else {name: value}
    return replace(options, **changes)


def check_directory(output: Path) -> None:
    """Refuse a file where a command writes a directory, before anything is loaded."""
    if output.exists() and not output.is_dir():
        raise ConfigError(
            f"{output} is a file, not a directory", hint="pass a directory, or a path that does not exist yet"
        )


def accelerator(target: "HFTarget") -> str | None:
    """Name of the GPU that the target runs on; None on a CPU."""
    if target.device.type != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name(target.device)
