"""The settings file of `peagle tune`, and the options that `serve` and `deploy` take from it.

Options on the command line take precedence over those of the file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from peagle import __version__
from peagle.config import from_toml
from peagle.errors import ConfigError

FLAG = "--settings"
SEQS = "SM_VLLM_MAX_NUM_SEQS="
Command = Literal["serve", "deploy vllm", "deploy sagemaker"]


@dataclass(frozen=True)
class Native:
    """For our own engine."""

    num_draft_tokens: int | None = None
    """None: the engine chooses; 0: no drafts"""
    max_batch: int | None = None
    quantize: str | None = None
    """form of the target's weights"""


@dataclass(frozen=True)
class Vllm:
    """For vLLM, which verifies all drafts of every step."""

    num_draft_tokens: int | None = None
    max_num_seqs: int | None = None


@dataclass(frozen=True)
class Settings:
    target: str | None = None
    drafter: str | None = None
    native: Native = field(default_factory=Native)
    vllm: Vllm = field(default_factory=Vllm)
    expected: dict[str, Any] = field(default_factory=dict)
    """what was measured; nothing reads it"""


def settings_of(
    tuned: Mapping[str, Any], target: str | None, drafter: str | None, quantize: str | None = None
) -> Settings:
    """The settings that a recommendation means. Without drafts no drafter is named."""
    for_vllm, batch = tuned["vllm"] or {}, tuned["max_batch"]
    depth = 0 if tuned["method"] == "none" else tuned["num_draft_tokens"]
    is_used = depth != 0 or for_vllm.get("num_draft_tokens")
    return Settings(
        target,
        _absolute(drafter) if is_used else None,
        Native(depth, batch, quantize or tuned["quantize"]),
        Vllm(for_vllm.get("num_draft_tokens"), batch),
        {name: value for name, value in tuned["expected"].items() if value is not None},
    )


def _absolute(drafter: str | None) -> str | None:
    """A directory by its full path: the settings may be read elsewhere."""
    return str(Path(drafter).expanduser().absolute()) if drafter and Path(drafter).expanduser().is_dir() else drafter


def text_of(settings: Settings, provenance: Mapping[str, Any]) -> str:
    """The file, with where its figures come from."""
    hardware = provenance["hardware"]
    machine = hardware["accelerator"] or f"{hardware['processor']}, {hardware['num_cores']} cores"
    lines = [f"# peagle {__version__}, {provenance['created']}, {machine}", f"# {provenance['command']}"]
    lines += _pairs({"target": settings.target, "drafter": settings.drafter})
    for name in ("native", "vllm", "expected"):
        group = getattr(settings, name)
        if pairs := _pairs(group if isinstance(group, dict) else vars(group)):
            lines += ["", f"[{name}]", *pairs]
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    # A JSON string or number is one of TOML, too.
    return [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]


def with_settings(argv: list[str], command: Command) -> list[str]:
    """`argv` with the options that its settings file adds; without --settings, `argv` itself."""
    paths = [following for word, following in pairwise(argv) if word == FLAG]
    paths += [word.removeprefix(f"{FLAG}=") for word in argv if word.startswith(f"{FLAG}=")]
    if not paths:
        return argv
    path = Path(paths[-1]).expanduser()
    if not path.is_file():
        raise ConfigError(f"no settings at {path}", hint="`peagle tune --output FILE.toml` writes them")
    found = from_toml(Settings, path)
    ours, own, vllm_words = split_argv(argv)
    has_target = bool(ours) and not ours[0].startswith("-") and command != "deploy sagemaker"
    options: dict[str, Any] = {} if has_target else {"--target": found.target}
    if command == "serve" and not _is_vllm(ours):
        options |= {"--num-draft-tokens": found.native.num_draft_tokens, "--max-batch": found.native.max_batch}
        options["--quantize"] = found.native.quantize
    else:
        options["--num-draft-tokens"] = found.vllm.num_draft_tokens
        options |= {"--max-batch": found.vllm.max_num_seqs} if command == "serve" else {}
    given = options["--num-draft-tokens"] if "--num-draft-tokens" not in ours else None
    options["--drafter"] = None if given == 0 else found.drafter
    added = [
        word for name, value in options.items() if value is not None and name not in ours for word in (name, str(value))
    ]
    return _placed(command, ours, added, found.vllm.max_num_seqs, [*own, *vllm_words])


def split_argv(argv: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Our options, the `--` if there is one, and vLLM's own options behind it."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at : at + 1], argv[at + 1 :]


def _is_vllm(argv: list[str]) -> bool:
    return ("--engine", "vllm") in pairwise(argv) or "--engine=vllm" in argv


def _placed(command: Command, ours: list[str], added: list[str], limit: int | None, rest: list[str]) -> list[str]:
    """The words in the command's order; the batch limit as vLLM's own option or variable."""
    if command == "deploy vllm":
        if "--target" in added:  # this command takes its target as a positional argument
            at = added.index("--target")
            ours, added = [added[at + 1], *ours], added[:at] + added[at + 2 :]
        if limit is not None and not any(word.startswith("--max-num-seqs") for word in rest):
            rest = [*(rest or ["--"]), "--max-num-seqs", str(limit)]
    elif command == "deploy sagemaker" and limit is not None and not any(word.startswith(SEQS) for word in ours):
        if "--env" in ours:
            at = ours.index("--env") + 1
            ours = [*ours[:at], f"{SEQS}{limit}", *ours[at:]]
        else:
            added = [*added, "--env", f"{SEQS}{limit}"]
    return [*ours, *added, *rest]
