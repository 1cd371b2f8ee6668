"""Targets with weights in few bits, and the plain models that they must equal."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from peagle.experts.few_bit import FewBitExperts, plain_experts
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.targets import few_bit
from peagle.targets.hf import HFTarget


@pytest.fixture
def may_quantize_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_bit, "check_quantize", lambda *_: None)


@torch.no_grad()
def dequantized(target: HFTarget) -> HFTarget:
    """A copy of the target that transformers computes, with the same weights as plain tensors."""
    target.forget_captured()
    taps, target._taps = target._taps, []  # hooks are bound to the target
    for tap in taps:
        tap.remove()
    model: Any = deepcopy(target.model)
    target.tap(target.aux_layer_ids)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, FewBitLinear):
                setattr(parent, name, module.to_linear(target.dtype))
            elif isinstance(module, FewBitExperts):
                setattr(parent, name, plain_experts(module, target.dtype))
    return HFTarget(model, target.tokenizer, name=target.name)
