"""What a drafter leaves on its card so that a broken copy of it can be told from a sound one.

    tensors     a fingerprint of every tensor, the same for every form and precision it is stored in
    config      what config.json must come to mean, whatever its spelling
    golden      token ids, and the likeliest draft tokens with their log-probabilities at every depth behind them
    acceptance  drafts that the target accepted when it answered the gate's own prompts

Fingerprints and meaning tell what differs. Golden log-probabilities tell whether an engine that reads all of it
correctly computes the same.

Shapes: T tokens, K draft tokens, V target vocabulary, A concatenated aux width.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.drafter.config import USUAL_NUM_DRAFT_TOKENS, DrafterConfig
from peagle.drafter.recorded import Evidence, GateAcceptance, GoldenDraft, GoldenText
from peagle.sampling_params import SamplingParams
from peagle.tokenizer import encode, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

PROMPTS_PATH = Path(__file__).parents[1] / "assets" / "gate_prompts.json"
MAX_TOKENS = 24
"""Tokens of each answer to the gate's prompts."""
NUM_GOLDEN = 2
"""Prompts of which golden drafts are kept."""
NUM_LIKELIEST = 4

Decode = Callable[..., Iterator[Any]]
"""`peagle.decoding.reference.decode`, handed in by who records: drafters stand beside decoding, not above it."""

MEANING = (
    "parallel",
    "aux_layer_ids",
    "mask_token_id",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "attention_bias",
    "qk_norm",
    "sliding_window",
    "sliding_layers",
    "rms_norm_eps",
    "rope_parameters",
    "max_length",
)
"""The settings that change what a drafter computes. Which tables it shares with the target is a matter of storage."""


def fingerprint(tensor: Tensor) -> str:
    """Hash of shape and values, the latter rounded to bfloat16: the same for a float32 copy of a bfloat16 file."""
    plain = tensor.detach().to(torch.bfloat16).view(torch.int16) if tensor.is_floating_point() else tensor.long()
    content = plain.cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(f"{list(tensor.shape)}".encode() + content).hexdigest()[:32]


def fingerprints(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: fingerprint(tensor) for name, tensor in sorted(state.items())}


@torch.no_grad()
def own_tensors(target: "HFTarget", drafter: "Drafter") -> dict[str, Tensor]:
    """A drafter's state without tables that are the target's, which one form of its files has and another has not."""
    state, config = dict(drafter.state_dict()), drafter.config
    expected = {"embed_tokens.weight": target.embedding_VD, "lm_head.weight": target.head_VD}
    if config.draft_vocab_size < config.vocab_size:
        ids = drafter.to_target_ids(torch.arange(config.draft_vocab_size, device=drafter.d2t.device))
        expected["lm_head.weight"] = target.head_VD[ids.to(target.head_VD.device)]
    for name, table in expected.items():
        if name in state and state[name].shape == table.shape:
            differs = (state[name].bfloat16() != table.to(state[name].device).bfloat16()).any(1)
            if name == "embed_tokens.weight" and config.mask_token_id is not None:
                differs[config.mask_token_id] = False
            if not bool(differs.any()):
                del state[name]
    return state


def meaning_of(config: DrafterConfig) -> dict[str, Any]:
    """The settings as JSON has them."""
    values = asdict(config)
    meaning: dict[str, Any] = json.loads(json.dumps({name: values[name] for name in MEANING}))
    return meaning


def gate_prompts(tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[list[int]]:
    """Token ids of the prompts that ship for checking; those that would not fit with their answers are left out."""
    texts = json.loads(PROMPTS_PATH.read_text(encoding="utf-8"))
    if tokenizer.chat_template:
        rendered = [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    else:
        rendered = [encode(tokenizer, text) for text in texts]
    room = max_length - MAX_TOKENS - 2 * USUAL_NUM_DRAFT_TOKENS
    return [prompt_ids for prompt_ids in rendered if 0 < len(prompt_ids) <= room]


def prompts_hash(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()[:32]


def usual_depth(config: DrafterConfig) -> int:
    """Draft tokens a step at which evidence is recorded and checked."""
    return min(config.num_draft_tokens or USUAL_NUM_DRAFT_TOKENS, USUAL_NUM_DRAFT_TOKENS)


def greedy_params(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    """Answers of a fixed length: an end token that comes early would leave little to compare."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def record(target: "HFTarget", drafter: "Drafter", decode: Decode) -> Evidence:
    """The evidence of a drafter that is known to be good. The target must be tapped at its layers."""
    num_draft_tokens = usual_depth(drafter.config)
    prompts = gate_prompts(target.tokenizer, target.max_length)
    answers, counts, num_drafts = [], [0] * num_draft_tokens, 0
    for prompt_ids in prompts:
        steps = list(decode(target, prompt_ids, greedy_params(), drafter=drafter, num_draft_tokens=num_draft_tokens))
        answers.append([token for step in steps for token in step.token_ids])
        for step in steps:
            num_drafts += bool(step.draft_token_ids)
            for position in range(step.num_accepted_emitted):
                counts[position] += 1
    texts = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)][:NUM_GOLDEN]
    return Evidence(
        tensors=fingerprints(own_tensors(target, drafter)),
        config=meaning_of(drafter.config),
        dtype=str(target.dtype).removeprefix("torch."),
        golden=tuple(_golden(target, drafter, prompt, answer, num_draft_tokens) for prompt, answer in texts),
        acceptance=GateAcceptance(prompts_hash(prompts), MAX_TOKENS, num_drafts, tuple(counts)),
    )


def _golden(
    target: "HFTarget", drafter: "Drafter", prompt_ids: list[int], answer: list[int], num_draft_tokens: int
) -> GoldenText:
    """Golden drafts behind the first token of an answer and behind one in its middle."""
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
    """Log-probabilities [K, V] of the drafts behind each of the tokens `newest` (ascending indices) of a text.

    They are drafted one after the other by one session, as in serving, so that its cache takes part. EAGLE-3 reads
    back its likeliest tokens.
    """
    ids = list(text[: newest[-1] + 1])
    aux_TA = target.forward(torch.tensor([ids], device=target.device)).aux_hidden_BTA[0]
    session = drafter.new_session()
    found = []
    for index in newest:
        first = session.num_anchors
        draft = session.draft(ids[first : index + 1], aux_TA[first:index], num_draft_tokens, _likeliest)
        assert draft.probs_KV is not None, "a draft that is chosen by its probabilities has them"
        found.append(draft.probs_KV.clamp_min(1e-30).log().float().cpu())
    return found


def _likeliest(probs_KU: Tensor, position: int) -> Tensor:
    return probs_KU.argmax(-1)
