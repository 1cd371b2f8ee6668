"""Verification: edges with fake drafters, raggedness, batches, and where it runs.

Legend: B requests, K draft tokens, L = K + 1, V vocabulary.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.tiny_vocabulary import K, L, V, as_lists, random_probs, verify_sampled
from peagle.decoding.draft_tree import DraftTree
from peagle.decoding.verify import Verification, keep_matches, keep_path, tolerate


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def verify_greedy(logits_BLV: Tensor, draft_tokens_BK: Tensor, num_draft_B: Tensor) -> Verification:
    return keep_matches(logits_BLV.argmax(-1), draft_tokens_BK, num_draft_B)


# --- every verifier at the edges. The target is certain: it wants 1, 2, 3 and then 4.

WANTED_L = [1, 2, 3, 4]


def call(name: str, draft_tokens_BK: Tensor, num_draft_B: Tensor) -> Verification:
    """Verify against the certain target."""
    batch_size, num_columns = draft_tokens_BK.shape
    certain_LV = torch.nn.functional.one_hot(tensor(WANTED_L[: num_columns + 1]), V).float()
    probs_BLV = certain_LV.expand(batch_size, -1, -1)
    seed_B, position_B = torch.arange(batch_size), torch.full((batch_size,), 10)
    if name == "greedy":
        return verify_greedy(probs_BLV * 7, draft_tokens_BK, num_draft_B)
    return verify_sampled(probs_BLV, draft_tokens_BK, num_draft_B, seed_B, position_B)


every_verifier = pytest.mark.parametrize("name", ["greedy", "deterministic"])


@every_verifier
def test_a_drafter_that_is_always_right_earns_the_bonus(name: str) -> None:
    assert as_lists(call(name, tensor([[1, 2, 3]]), tensor([3]))) == ([3], [4])


@every_verifier
def test_a_drafter_that_is_never_right_still_yields_one_token(name: str) -> None:
    assert as_lists(call(name, tensor([[0, 0, 0]]), tensor([3]))) == ([0], [1])


@every_verifier
@pytest.mark.parametrize("num_right", range(K))
def test_a_drafter_that_is_right_up_to_j_is_recovered_at_j(name: str, num_right: int) -> None:
    draft_tokens_K = WANTED_L[:K]
    draft_tokens_K[num_right] = 0
    assert as_lists(call(name, tensor([draft_tokens_K]), tensor([3]))) == ([num_right], [WANTED_L[num_right]])


@every_verifier
def test_padding_is_never_accepted_even_where_it_would_match(name: str) -> None:
    draft_tokens_BK = tensor([[1, 2, 3]] * 4)
    assert as_lists(call(name, draft_tokens_BK, tensor([0, 1, 2, 3]))) == ([0, 1, 2, 3], [1, 2, 3, 4])


@every_verifier
def test_padding_may_hold_ids_that_are_no_tokens(name: str) -> None:
    assert as_lists(call(name, tensor([[-1, -1, -1], [1, -1, -1]]), tensor([0, 1]))) == ([0, 1], [1, 2])


@every_verifier
def test_without_draft_columns_the_next_token_is_the_plain_one(name: str) -> None:
    assert as_lists(call(name, torch.empty(2, 0, dtype=torch.int64), tensor([0, 0]))) == ([0, 0], [1, 1])


@every_verifier
def test_an_empty_batch_gives_an_empty_result(name: str) -> None:
    assert as_lists(call(name, torch.empty(0, 3, dtype=torch.int64), tensor([]))) == ([], [])


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_columns=st.integers(0, 4))
def test_greedy_verification_equals_a_plain_loop(data: st.DataObject, num_columns: int) -> None:
    token = st.integers(0, 2)
    wanted_L = data.draw(st.lists(token, min_size=num_columns + 1, max_size=num_columns + 1))
    drafted_K = data.draw(st.lists(token, min_size=num_columns, max_size=num_columns))
    num_draft = data.draw(st.integers(0, num_columns))
    num_accepted = 0
    while num_accepted < num_draft and drafted_K[num_accepted] == wanted_L[num_accepted]:
        num_accepted += 1
    logits_BLV = torch.nn.functional.one_hot(tensor([wanted_L]), 3).float()
    result = verify_greedy(logits_BLV, tensor([drafted_K]).reshape(1, num_columns), tensor([num_draft]))
    assert as_lists(result) == ([num_accepted], [wanted_L[num_accepted]])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_nodes=st.integers(0, 12))
def test_the_kept_path_of_a_tree_is_the_one_that_a_walk_finds(data: st.DataObject, num_nodes: int) -> None:
    parents, children, depth, ancestors = [0], [[]], [0], [1]
    tokens = [9]
    for node in range(1, num_nodes + 1):
        parent = data.draw(st.integers(0, node - 1))
        parents.append(parent)
        tokens.append(len(children[parent]))  # children of a node differ
        children[parent].append(node)
        children.append([])
        depth.append(depth[parent] + 1)
        ancestors.append(ancestors[parent] | 1 << node)
    wanted = data.draw(st.lists(st.integers(0, 3), min_size=num_nodes + 1, max_size=num_nodes + 1))
    num_kept_nodes = data.draw(st.integers(0, num_nodes))
    path = [0]
    while following := [
        node for node in children[path[-1]] if tokens[node] == wanted[path[-1]] and node <= num_kept_nodes
    ]:
        path += following
    num_depths = max(depth) + 1
    tree = (tensor([parents]), tensor([depth]), tensor([ancestors]))
    found = keep_path(tensor([wanted]), tensor([tokens]), *tree, tensor([num_kept_nodes]), num_depths)
    assert found.num_accepted_B.tolist() == [len(path) - 1]
    assert found.node_BD.tolist() == [path + [0] * (num_depths + 1 - len(path))]


def tolerate_one_tree(
    wanted: list[int], logits_LV: list[list[float]], tree: DraftTree, num: int, gap: float
) -> list[int]:
    """Only the first `num` nodes are in the pass, so the others have no logits."""
    logits_NV, place_BL = torch.tensor(logits_LV[: num + 1]), torch.arange(len(wanted))[None].clamp_max(num)
    nodes = (tensor([[0, *tree.token_ids]]), tensor([tree.parents]), tensor([num]))
    return tolerate(tensor([wanted]), logits_NV, place_BL, *nodes, torch.tensor([gap]))[0].tolist()


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_nodes=st.integers(0, 8), gap=st.sampled_from([-1.0, 0.0, 0.3, 1.0]))
def test_tolerated_drafts_are_those_that_a_walk_finds(data: st.DataObject, num_nodes: int, gap: float) -> None:
    tree = DraftTree()
    for node in range(1, num_nodes + 1):
        parent = data.draw(st.integers(0, node - 1))
        tree.add(parent, len(tree.children(parent)) % V)
    logit = st.sampled_from([0.0, 0.25, 0.5, 1.0, float("-inf")])
    logits_LV = [data.draw(st.lists(logit, min_size=V, max_size=V)) for _ in range(num_nodes + 1)]
    wanted = data.draw(st.lists(st.integers(0, V - 1), min_size=num_nodes + 1, max_size=num_nodes + 1))
    num_verified = data.draw(st.integers(0, num_nodes))
    expected = []
    for node, (own, logits) in enumerate(zip(wanted, logits_LV, strict=True)):
        drafts = tree.tokens([child for child in tree.children(node) if child <= num_verified])
        near = [token for token in drafts if max(logits) - logits[token] <= gap and logits[token] > float("-inf")]
        expected.append(own if own in drafts or not near else max(near, key=lambda token: logits[token]))
    found = tolerate_one_tree(wanted, logits_LV, tree, num_verified, gap)
    assert found[: num_verified + 1] == expected[: num_verified + 1]


def test_garbage_probabilities_in_padding_do_not_leak() -> None:
    target_BLV = torch.tensor([[[0.0, 0.0, 1.0], [float("nan")] * 3, [float("nan")] * 3]])
    arguments = (tensor([[99, -7]]), tensor([0]), tensor([1]), tensor([4]))
    assert as_lists(verify_sampled(target_BLV, *arguments)) == ([0], [2])


# --- in a batch, and where it runs


def random_step(batch_size: int) -> tuple[Tensor, ...]:
    """Arguments of a sampled verification: ragged, with likely draft tokens so that some are accepted."""
    target_BLV = random_probs(batch_size, L, V, seed=1, sharpness=2.0)
    row_B = torch.arange(batch_size)
    return target_BLV, target_BLV[:, :K].argmax(-1), row_B % L, 7 * row_B, row_B + 3


def test_a_request_is_verified_the_same_alone_and_in_a_batch() -> None:
    arguments = random_step(40)
    together = verify_sampled(*arguments)
    for row in range(40):
        alone = verify_sampled(*(part[row : row + 1] for part in arguments))
        assert as_lists(alone) == ([together[0][row].item()], [together[1][row].item()])


@pytest.mark.parametrize("num_columns", [0, K])
def test_verification_never_looks_at_a_value_on_the_host(num_columns: int) -> None:
    """Tensors on the meta device have no values: reading one, or a shape that depends on one, raises."""
    target_BLV = torch.empty(2, num_columns + 1, V, device="meta")
    drafted_BK = torch.empty(2, num_columns, dtype=torch.int64, device="meta")
    keys = [torch.empty(2, dtype=torch.int64, device="meta") for _ in range(3)]
    for result in (
        verify_greedy(target_BLV, drafted_BK, keys[0]),
        verify_sampled(target_BLV, drafted_BK, *keys),
    ):
        assert all(part.shape == (2,) and part.is_meta for part in result)


@pytest.mark.gpu
def test_verification_is_captured_in_a_cuda_graph_and_equals_the_cpu() -> None:
    def both(*arguments: Tensor) -> list[Verification]:
        return [verify_greedy(*arguments[:3]), verify_sampled(*arguments)]

    on_cpu = random_step(1000)
    on_gpu = [part.cuda() for part in on_cpu]
    with torch.cuda.stream(torch.cuda.Stream()):
        both(*on_gpu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(*on_gpu)
    graph.replay()
    for actual, expected in zip(captured, both(*on_cpu), strict=True):
        assert as_lists(actual) == as_lists(expected)
