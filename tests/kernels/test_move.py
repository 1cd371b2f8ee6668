"""Moving KV cache entries: the Triton kernel and PyTorch against a loop over cells.

Without a GPU the kernel runs in Triton's interpreter.
"""

import pytest
import torch

from peagle.targets.paged import LayerShape, Memory

pytest.importorskip("triton")

from peagle.kernels.move_triton import MAX_COLUMNS, move_entries_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOURCE_BK = torch.tensor([[5, 6, 9], [20, 22, 23], [40, 41, 0]])
DESTINATION_BK = torch.tensor([[4, 5, 6], [20, 21, 22], [-1, -1, -1]])
"""Request 0 overwrites what it reads, request 1 keeps its first entry in place, request 2 accepted nothing."""


@pytest.mark.parametrize("width", [6, MAX_COLUMNS, MAX_COLUMNS + 40])
def test_kernel_reads_all_entries_of_a_request_before_it_writes(width):
    keys, values = torch.randn(2, 3, 48, width, device=DEVICE)
    expected = [block.clone() for block in (keys, values)]
    for block, source in zip(expected, (keys, values), strict=True):
        for old, new in zip(SOURCE_BK.flatten().tolist(), DESTINATION_BK.flatten().tolist(), strict=True):
            if new >= 0:
                block[:, new] = source[:, old]
    move_entries_triton(keys, values, SOURCE_BK.to(DEVICE), DESTINATION_BK.to(DEVICE))
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_memory_moves_entries_in_layers_of_every_shape():
    layers = (LayerShape(2, 4), LayerShape(1, 16), LayerShape(2, 4))
    memory = Memory(layers, 12, 4, torch.float32, torch.device(DEVICE))
    for index in range(len(layers)):
        for pages in memory[index]:
            pages.copy_(torch.randn(pages.shape, device=DEVICE))
    before = [pages.flatten(0, 1).clone() for index in range(len(layers)) for pages in memory[index]]
    memory.move(SOURCE_BK.to(DEVICE), DESTINATION_BK.to(DEVICE))
    after = [pages.flatten(0, 1) for index in range(len(layers)) for pages in memory[index]]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[[4, 5, 6, 20, 21, 22]], old[[5, 6, 9, 20, 22, 23]])
        untouched = [cell for cell in range(48) if cell not in (4, 5, 6, 20, 21, 22)]
        assert torch.equal(new[untouched], old[untouched])
