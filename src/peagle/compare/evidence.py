"""Evidence on a drafter's card, by which the gate tells a damaged copy from an intact one.

    tensors     a fingerprint of every tensor, the same in every form and dtype it is stored in
    config      the settings that config.json must mean, however it spells them
    golden      texts with the most likely draft tokens and their log-probabilities at every depth
    acceptance  accepted draft tokens in answers to the gate's prompts

Fingerprints and settings show what differs. Golden log-probabilities show whether an engine that reads the files
correctly also computes the same.

Shapes: T tokens, K draft tokens, V target vocabulary, A concatenated aux width.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.checkpoint.card import CARD_NAME, DrafterCard, Evidence, GateAcceptance, GoldenDraft, GoldenText, card_of
from peagle.checkpoint.config_json import num_differing_rows
from peagle.checkpoint.native import load_drafter
from peagle.checkpoint.vllm import NOT_COMPUTED
from peagle.compare.answers import decode_with_reference
from peagle.data.shards import write_whole
from peagle.drafter.config import USUAL_NUM_DRAFT_TOKENS, DrafterConfig
from peagle.drafter.drafting import DraftingSession
from peagle.drafter.vocab import draft_to_target
from peagle.errors import CheckpointError
from peagle.sampling_params import SamplingParams
from peagle.tokenizer import encode, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

PROMPTS_PATH = Path(__file__).parents[1] / "assets" / "gate_prompts.json"
MAX_TOKENS = 24
"""Length of each answer to the gate's prompts."""
NUM_GOLDEN = 2
"""Prompts for which golden drafts are recorded."""
NUM_LIKELIEST = 4


def fingerprint(tensor: Tensor) -> str:
    """Hash of shape and values rounded to bfloat16, so a float32 copy of a bfloat16 file has the same."""
    plain = tensor.detach().to(torch.bfloat16).view(torch.int16) if tensor.is_floating_point() else tensor.long()
    content = plain.cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(f"{list(tensor.shape)}".encode() + content).hexdigest()[:32]


def fingerprints(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: fingerprint(tensor) for name, tensor in sorted(state.items())}


@torch.no_grad()
def own_tensors(target: "HFTarget", drafter: "Drafter") -> dict[str, Tensor]:
    """A drafter's state without the target's tables, which only some forms of its files hold."""
    state = dict(drafter.without_pair_head().state_dict())
    for name, (table, own_row) in shared_tables(target, drafter.config, state.get("d2t")).items():
        is_same_shape = name in state and state[name].shape == table.shape
        if is_same_shape and not num_differing_rows(state[name], table, own_row, torch.bfloat16):
            del state[name]
    return state


def shared_tables(
    target: "HFTarget", config: DrafterConfig, d2t: Tensor | None
) -> dict[str, tuple[Tensor, int | None]]:
    """The target's tables that a drafter may share, with the row of each that is the drafter's own."""
    head = target.head_VD if d2t is None else target.head_VD[draft_to_target(d2t.long()).to(target.head_VD.device)]
    return {"embed_tokens.weight": (target.embedding_VD, config.mask_token_id), "lm_head.weight": (head, None)}


def meaning_of(config: DrafterConfig) -> dict[str, Any]:
    """The settings that change what a drafter computes, as JSON has them."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in NOT_COMPUTED}
    meaning: dict[str, Any] = json.loads(json.dumps(values))
    return meaning


def gate_prompts(tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[list[int]]:
    """Token ids of the gate's prompts; those that do not fit with their answers are left out."""
    texts = json.loads(PROMPTS_PATH.read_text(encoding="utf-8"))
    return render_texts(tokenizer, texts, max_length - MAX_TOKENS - 2 * USUAL_NUM_DRAFT_TOKENS)


def render_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], room: int) -> list[list[int]]:
    """Token ids of user messages that have at most `room` tokens."""
    if tokenizer.chat_template:
        rendered = [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    else:
        rendered = [encode(tokenizer, text) for text in texts]
    return [prompt_ids for prompt_ids in rendered if 0 < len(prompt_ids) <= room]


def prompts_hash(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()[:32]


def usual_depth(config: DrafterConfig) -> int:
    """Draft tokens per step at which evidence is recorded and checked."""
    return min(config.num_draft_tokens or USUAL_NUM_DRAFT_TOKENS, USUAL_NUM_DRAFT_TOKENS)


def greedy_params(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    """Greedy answers of fixed length: an early end token would leave little to compare."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def record(target: "HFTarget", drafter: "Drafter") -> Evidence:
    """Evidence of a drafter that is known to be good. The target must be tapped at its layers.

    A pair head takes no part: other engines must find the same.
    """
    drafter = drafter.without_pair_head()
    num_draft_tokens = usual_depth(drafter.config)
    prompts = gate_prompts(target.tokenizer, target.max_length)
    params = [greedy_params()] * len(prompts)
    answers, found = decode_with_reference(target, prompts, params, drafter, num_draft_tokens)
    texts = list(zip(prompts, map(list, answers), strict=True))[:NUM_GOLDEN]
    return Evidence(
        tensors=fingerprints(own_tensors(target, drafter)),
        config=meaning_of(drafter.config),
        dtype=str(target.dtype).removeprefix("torch."),
        golden=tuple(_golden(target, drafter, prompt, answer, num_draft_tokens) for prompt, answer in texts),
        acceptance=GateAcceptance(prompts_hash(prompts), MAX_TOKENS, found.num_drafts, found.accepted_per_position),
    )


def _golden(
    target: "HFTarget", drafter: "Drafter", prompt_ids: list[int], answer: list[int], num_draft_tokens: int
) -> GoldenText:
    """Golden drafts after the first token of an answer and after one in its middle."""
    text = prompt_ids + answer
    newest = (len(prompt_ids), len(prompt_ids) + len(answer) // 2)
    drafts = []
    for index, logprobs_KV in zip(newest, draft_logprobs(target, drafter, text, newest, num_draft_tokens), strict=True):
        top = logprobs_KV.topk(min(NUM_LIKELIEST, drafter.config.draft_vocab_size), dim=-1)
        rounded = tuple(tuple(round(value, 5) for value in row) for row in top.values.tolist())
        drafts.append(GoldenDraft(index, tuple(map(tuple, top.indices.tolist())), rounded))
    return GoldenText(tuple(text[: newest[-1] + 1]), tuple(drafts))


@torch.no_grad()
def draft_logprobs(
    target: "HFTarget", drafter: "Drafter", text: Sequence[int], newest: Sequence[int], num_draft_tokens: int
) -> list[Tensor]:
    """Log-probabilities [K, V] of the drafts after each token `newest` (ascending indices) of a text.

    One session drafts them in turn, as in serving, so its cache is tested too. EAGLE-3 feeds back its best tokens.
    """
    ids = list(text[: newest[-1] + 1])
    aux_TA = target.forward(torch.tensor([ids], device=target.device)).aux_hidden_BTA[0]
    session = DraftingSession(drafter)
    size = drafter.config.draft_vocab_size
    target_ids_U = drafter.to_target_ids(torch.arange(size, device=target.device))
    found = []
    for index in newest:
        first = session.num_anchors
        draft = session.draft(ids[first : index + 1], aux_TA[first:index], num_draft_tokens)
        probs_KU = torch.softmax(draft.logits_KU.float(), dim=-1)
        probs_KV = probs_KU.new_zeros(len(probs_KU), drafter.config.vocab_size).index_copy(1, target_ids_U, probs_KU)
        found.append(probs_KV.clamp_min(1e-30).log().cpu())
    return found


def golden_distances(draft: GoldenDraft, logprobs_KV: Tensor, parallel: bool) -> Iterator[float]:
    """Largest error of the log-probabilities at each depth. EAGLE-3 stops where its chain diverges; NaN is infinite."""
    for depth, (token_ids, recorded) in enumerate(zip(draft.token_ids, draft.logprobs, strict=True)):
        found = logprobs_KV[depth, list(token_ids)]
        yield float((found - torch.tensor(recorded)).abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
        if not parallel and int(logprobs_KV[depth].argmax()) != token_ids[0]:
            return


def record_evidence(directory: Path, target: "HFTarget") -> DrafterCard:
    """Record a drafter's evidence on its card, creating the card if needed.

    Evidence of other weights is never replaced: a damaged copy could vouch for itself.
    """
    drafter = load_drafter(directory, target)
    card = card_of(drafter, target)
    if card.evidence is not None:
        found, recorded = fingerprints(own_tensors(target, drafter)), card.evidence.tensors
        changed = [name for name in recorded if found.get(name) != recorded[name]]
        if changed:
            raise CheckpointError(
                f"{directory / CARD_NAME} has evidence of other weights: {changed[0]!r} and "
                f"{len(changed) - 1} more of {len(recorded)} tensors differ",
                hint="check the directory first; if the new weights are right, delete `evidence` from the card",
            )
    card = dataclasses.replace(card, evidence=record(target, drafter))
    write_whole(directory / CARD_NAME, card.to_json().encode())
    return card
