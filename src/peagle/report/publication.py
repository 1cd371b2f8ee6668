"""What to publish of a drafter directory: its base model, license and recommended draft tokens. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from peagle.checkpoint.card import DrafterCard, without_pair_head
from peagle.checkpoint.config_json import is_parallel, read_values
from peagle.checkpoint.layouts import CONFIG_NAME, PAIR_HEAD_NAME, tensor_types
from peagle.drafter.config import USUAL_NUM_DRAFT_TOKENS
from peagle.errors import ConfigError
from peagle.report.model_card import Publication
from peagle.targets.catalog import CatalogDrafter, CatalogEntry, find
from peagle.targets.hub import looks_like_an_id

README = "README.md"
LICENSES = "https://huggingface.co/docs/hub/repositories-licenses lists the identifiers"


def described(
    directory: Path, card: DrafterCard, name: str, base_model: str | None, license: str | None, *, as_it_is: bool
) -> Publication:
    """The drafter in `directory` as a publication called `name`; `as_it_is`: not exported for vLLM."""
    entry = _entry(card)
    shipped = _catalog_drafter(entry, directory)
    usual = (shipped.num_draft_tokens if shipped is not None else None) or USUAL_NUM_DRAFT_TOKENS
    base_model = base_model or _base_model(card, entry)
    found = Publication(
        card if as_it_is else without_pair_head(card),
        name.rpartition("/")[2],
        base_model,
        base_model,
        license or _license(directory, shipped),
        name,
        min(usual, card.num_draft_tokens or usual),
        is_complete=not as_it_is,
    )
    if entry is not None and entry.instance is not None:
        found = replace(found, instance=entry.instance)
    if entry is not None and entry.package is not None:
        package = (
            f" It was trained for the quantized weights of the package {entry.package.name} ({entry.package.file})"
        )
        found = replace(found, target=entry.name, note=f"{package}; acceptance with other weights was not measured.")
    return found


def _entry(card: DrafterCard) -> CatalogEntry | None:
    return find(card.target.source or card.target.name) or find(card.target.name)


def _catalog_drafter(entry: CatalogEntry | None, directory: Path) -> CatalogDrafter | None:
    """The drafter of the catalog that the directory is, if it is one."""
    drafters = entry.drafters if entry is not None else ()
    return next((each for each in drafters if each.source and Path(each.source).name == directory.name), None)


def _base_model(card: DrafterCard, entry: CatalogEntry | None) -> str:
    source = entry.target if entry is not None else card.target.source or ""
    if source.count("/") != 1 or not looks_like_an_id(source) or Path(source).exists():
        raise ConfigError(
            f"the target {card.target.name} has no id on the Hugging Face Hub on the drafter card",
            hint="pass it with --base-model ORG/NAME",
        )
    return source


def _license(directory: Path, shipped: CatalogDrafter | None) -> str:
    from huggingface_hub import metadata_load

    told = (metadata_load(directory / README) or {}).get("license") if (directory / README).is_file() else None
    found = told or (shipped.license if shipped is not None else None)
    if not found:
        raise ConfigError("the drafter has no license", hint=f"pass --license, for example apache-2.0; {LICENSES}")
    return str(found)


def is_complete(directory: Path) -> bool:
    """Whether vLLM reads the directory as it is: with all tables that it does not share, and nothing else."""
    values, names = read_values(directory / CONFIG_NAME), tensor_types(directory)
    if names is None or (directory / PAIR_HEAD_NAME).exists():
        return False
    has_own_head = values.get("draft_vocab_size", values.get("vocab_size")) != values.get("vocab_size")
    needed = {"embed_tokens.weight"} if is_parallel(values, names) else set()
    return names.keys() >= needed | ({"lm_head.weight"} if has_own_head else set())
