"""The reference decoder: one request, plain or with drafts, slow and simple.

Every faster path is compared with this one, and this one with `transformers.generate`. Each step

    draft     the drafter reads the newest tokens with the target's states and proposes K tokens, or a tree
    verify    the target runs the newest token and the K drafts in one forward pass; of a tree one branch per pass,
              from the likeliest on, as long as the token that the target wants next is in the tree
    commit    appends the accepted drafts and one more token; both KV caches are cropped to the text

so every emitted token is the target's own choice, whatever the drafter proposes. With a `tolerance` below 1 it may also
be a draft that the target finds hardly less likely; the kind of such a token is "tolerated".

Shapes: K draft tokens of a branch, L = K + 1, V vocabulary, A concatenated aux width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from peagle.decoding.adjusting import adjusted_logits, check_token_ids
from peagle.decoding.draft_tree import DraftTree, best_first, check_tree
from peagle.decoding.grammar import make_guide
from peagle.decoding.stopping import FinishReason, StopCheck
from peagle.decoding.verify import draws, keep_matches
from peagle.drafter.drafting import DraftingSession
from peagle.drafter.model import Drafter
from peagle.errors import RequestError
from peagle.kernels.choose import target_probs
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.tokenizer import IncrementalDetokenizer

TokenKind = Literal["prefill", "plain", "accepted", "tolerated", "recovered", "bonus"]


@dataclass(frozen=True)
class Step:
    """The tokens emitted by one forward pass of the target, truncated at the end of the answer."""

    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    texts: tuple[str, ...]
    """The text that each token adds."""
    draft_token_ids: tuple[int, ...] = ()
    """The drafts that were verified; of a tree all nodes, best first."""
    draft_gaps: tuple[float, ...] = ()
    """The drafter's margin at each depth: its best logit minus the second best."""
    num_accepted: int = 0
    """Accepted draft tokens, including those after the end of the answer, as vLLM counts them."""
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_accepted_emitted(self) -> int:
        return self.kinds.count("accepted") + self.kinds.count("tolerated")


def decode(
    target: HFTarget,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    drafter: Drafter | None = None,
    num_draft_tokens: int = 0,
    tree_nodes: int | None = None,
) -> Iterator[Step]:
    """Answer one prompt step by step. Closing the iterator ends the request.

    Without a drafter, or with `num_draft_tokens` 0, every step emits one token. `params.num_draft_tokens` takes
    precedence over `num_draft_tokens`. With `tree_nodes`, drafts are a tree of that many nodes instead of a chain.
    """
    check_prompt(target, prompt_ids)
    num_draft_tokens = _check_params(params, drafter, num_draft_tokens)
    check_token_ids(params, target.vocab_size)
    request = _Request(target, list(prompt_ids), params)
    if drafter is None or num_draft_tokens == 0:
        return request.run(None, 0)
    drafter.check_num_draft_tokens(num_draft_tokens)
    check_tree(drafter, tree_nodes)
    return request.run(DraftingSession(drafter), num_draft_tokens, tree_nodes)


def check_prompt(target: HFTarget, prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise RequestError("the prompt is empty", hint="pass at least one token")
    if len(prompt_ids) >= target.max_length:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer: the context of target "
            f"{target.name!r} is {target.max_length} tokens",
            hint="shorten the prompt",
        )
    if max(prompt_ids) >= target.vocab_size or min(prompt_ids) < 0:
        raise RequestError(f"prompt token ids must lie between 0 and {target.vocab_size - 1}")


def _check_params(params: SamplingParams, drafter: Drafter | None, num_draft_tokens: int) -> int:
    """Refuse parameters that only the engine supports; return the number of draft tokens to use."""
    if params.n > 1:
        raise RequestError(f"peagle.decode gives one answer, got n={params.n}", hint="use peagle.LLM")
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(params, name)) is not None:
            message = f"peagle.decode does not report log-probabilities, got {name}={value}"
            raise RequestError(message, hint="use peagle.LLM")
    wanted = params.num_draft_tokens
    if wanted is None:
        return num_draft_tokens
    if wanted and drafter is None:
        raise RequestError(f"num_draft_tokens={wanted} needs a drafter", hint="pass drafter=, or leave it out")
    if wanted > num_draft_tokens > 0:  # the engine's rule
        raise RequestError(
            f"num_draft_tokens must be at most {num_draft_tokens}, got {wanted}", hint="lower it, or raise decode()'s"
        )
    return wanted


class _Request:
    def __init__(self, target: HFTarget, token_ids: list[int], params: SamplingParams) -> None:
        self.target, self.token_ids, self.params = target, token_ids, params
        self.num_prompt_tokens = len(token_ids)
        self.end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else target.eos_token_ids)
        self.guide = None if params.grammar is None else make_guide(target, params.grammar)
        detokenizer = IncrementalDetokenizer(target.tokenizer, shown_ids=params.shown_token_ids)
        self.stop_check = StopCheck(params, detokenizer, target.eos_token_ids, len(token_ids), target.max_length)

    @torch.no_grad()
    def run(
        self, session: DraftingSession | None, num_draft_tokens: int, tree_nodes: int | None = None
    ) -> Iterator[Step]:
        cache = self.target.new_cache()
        output = self.target.forward(self._tensor(self.token_ids)[None], cache)
        exact, _ = self._wanted(output.logits_BTV[0, -1:], DraftTree(), [])
        next_token = exact[0]
        yield (step := self._commit((next_token,), ("prefill",)))
        known_aux_TA = output.aux_hidden_BTA[0]
        while step.finish_reason is None:
            draft = None
            # Near the end of the context there may be no room to verify a whole draft.
            num_drafts = min(num_draft_tokens, self.target.max_length - len(self.token_ids))
            if session is not None and num_drafts > 0:
                draft = session.draft(self.token_ids[session.num_anchors :], known_aux_TA, num_drafts)
            tree = DraftTree(draft.token_ids if draft else ())
            if session is not None and draft is not None and tree_nodes is not None:
                tree = best_first(session.drafter, draft.logits_KU, tree_nodes)
            branch = tree.branch(0)
            while True:
                drafted = tree.tokens(branch)
                output = self.target.forward(self._tensor([self.token_ids[-1], *drafted])[None], cache)
                exact, wanted = self._wanted(output.logits_BTV[0], tree, branch)
                drafts = (self._tensor(wanted)[None], self._tensor(drafted)[None], self._tensor([len(drafted)]))
                num_accepted, next_token = map(int, keep_matches(*drafts))
                node = tree.child(branch[num_accepted - 1] if num_accepted else 0, next_token)
                if node is None:
                    break
                # The target wants a token of another branch: verify that one.
                cache.crop(-len(drafted) - 1)
                branch = tree.branch(node)
            if num_accepted < len(drafted):
                cache.crop(num_accepted - len(drafted))
            known_aux_TA = output.aux_hidden_BTA[0, : num_accepted + 1]
            accepted: list[TokenKind] = [
                "accepted" if token == own else "tolerated"
                for token, own in zip(drafted[:num_accepted], exact, strict=False)
            ]
            last: TokenKind = "bonus" if num_accepted == len(drafted) else "recovered"
            token_ids, kinds = (*drafted[:num_accepted], next_token), (*accepted, last if draft else "plain")
            yield (step := self._commit(token_ids, kinds, tree.token_ids, draft.gaps if draft else (), num_accepted))

    def _wanted(self, logits_LV: Tensor, tree: DraftTree, branch: Sequence[int]) -> tuple[list[int], list[int]]:
        """The target's own token after the text and after each draft of the branch; and with tolerated drafts."""
        params = self.params
        if params.adjusts_logits:
            logits_LV = self._adjust(logits_LV, tree.tokens(branch))
        if params.is_greedy:
            exact = logits_LV.argmax(-1).tolist()
        else:
            probs_BLV = target_probs(logits_LV[None], params.temperature, params.top_k, params.top_p, params.min_p)
            exact = draws(probs_BLV, self._tensor([params.seed]), self._tensor([len(self.token_ids)]))[0].tolist()
        if params.tolerated_gap is None:
            return exact, exact
        rows = zip(logits_LV, exact, (0, *branch), strict=True)
        return exact, [
            _tolerated(logits_V, own, tree.tokens(tree.children(node)), params.tolerated_gap)
            for logits_V, own, node in rows
        ]

    def _adjust(self, logits_LV: Tensor, draft_token_ids: Sequence[int]) -> Tensor:
        """Apply biases, penalties and the grammar. Row j treats the first j draft tokens as part of the answer."""
        prompt_ids, answer_ids = self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens :]
        rows = []
        for row, logits_V in enumerate(logits_LV):
            text = [*answer_ids, *draft_token_ids[:row]]
            adjusted_V = adjusted_logits(logits_V, self.params, self.end_ids, prompt_ids, text)
            is_allowed = None if self.guide is None else self.guide.allowed_after(text)
            if is_allowed is not None:
                is_allowed_V = torch.from_numpy(is_allowed[: len(adjusted_V)]).to(adjusted_V.device)
                adjusted_V = adjusted_V.masked_fill(~is_allowed_V, float("-inf"))
            rows.append(adjusted_V)
        return torch.stack(rows)

    def _commit(
        self,
        token_ids: tuple[int, ...],
        kinds: tuple[TokenKind, ...],
        draft_token_ids: Sequence[int] = (),
        draft_gaps: tuple[float, ...] = (),
        num_accepted: int = 0,
    ) -> Step:
        """Append the tokens, up to the end of the answer if it is among them."""
        texts: list[str] = []
        finish_reason: FinishReason | None = None
        for token_id in token_ids:
            text, finish_reason = self.stop_check.add(token_id)
            texts.append(text)
            if finish_reason is not None:
                break
        self.token_ids.extend(token_ids[: len(texts)])
        return Step(
            token_ids[: len(texts)],
            kinds[: len(texts)],
            tuple(texts),
            tuple(draft_token_ids),
            draft_gaps,
            num_accepted,
            finish_reason,
        )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.target.device)


def _tolerated(logits_V: Tensor, own: int, drafts: Sequence[int], gap: float) -> int:
    """The likeliest draft whose logit lies at most `gap` below the highest one; else the target's own token."""
    if own in drafts:
        return own
    best = max(drafts, key=lambda token: float(logits_V[token]), default=own)
    return best if bool(logits_V.max() - logits_V[best] <= gap) else own
