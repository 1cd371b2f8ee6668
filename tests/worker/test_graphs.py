"""Compiling parts of a step: what the compiler cannot do must not end the engine."""

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.model_families import family_target
from peagle.kernels.attention import PagedRows
from peagle.targets.paged import PagedTarget
from peagle.worker import graphs
from peagle.worker.graphs import compile_once

REASON = "Dynamic shape on reduction dimension is not supported"


@pytest.fixture(params=["combined", "all"])
def compiled_graphs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[torch.fx.GraphModule]]:
    """torch.compile with a backend that fails on combined kernels, as Inductor does, or on all."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if request.param == "all" or torch._inductor.config.combo_kernels:
            raise RuntimeError(f"{REASON}\nand a long trace")
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with torch._inductor.config.patch(combo_kernels=True):
        yield graphs
    torch._dynamo.reset()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_kernels_that_cannot_be_combined_are_compiled_apart_with_one_warning(
    compiled_graphs: list[torch.fx.GraphModule], caplog: pytest.LogCaptureFixture
) -> None:
    def sort(x: Tensor) -> Tensor:
        return x.sort().values

    run = compile_once(sort)
    for size in (5, 7, 1, 9):
        x = torch.randn(size)
        assert torch.equal(run(x), x.sort().values)
    shown = warnings_of(caplog)
    assert f"({REASON}); falling back to uncombined kernels" in shown[0] and ".sort " in shown[0]
    if compiled_graphs:
        assert len(shown) == 1
    else:
        assert len(shown) == 2 and shown[1].endswith("falling back to eager code")


@pytest.mark.slow
@torch.no_grad()
def test_layers_that_cannot_be_compiled_answer_as_the_model(
    compiled_graphs: list[torch.fx.GraphModule], caplog: pytest.LogCaptureFixture
) -> None:
    target = family_target("qwen3-moe")
    ids = torch.arange(20, 27)
    whole = target.forward(ids[None]).logits_BTV[0]
    paged = PagedTarget(target, compile_once)
    table, cells = torch.tensor([[1, 2]], dtype=torch.int32), torch.arange(4, 11)
    rows = PagedRows(table, torch.tensor([0, 7]), torch.tensor([0]), cells, torch.empty(7, 0))
    logits_NV, _ = paged.forward(ids, torch.arange(7), paged.new_memory(3, 4), rows, None)
    paged.close()
    assert torch.allclose(logits_NV, whole, atol=2e-4)
    shown = warnings_of(caplog)
    assert any("DecoderLayer.forward" in line for line in shown) and len(shown) == len(set(shown))


def test_an_error_of_the_function_itself_is_not_taken_for_the_compilers(
    compiled_graphs: list[torch.fx.GraphModule],
) -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        compile_once(fail)(torch.zeros(2))


def test_compiled_code_is_kept_in_the_cache_unless_the_user_chose_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    for before, kept in (
        (None, str(tmp_path / "compiled")),
        (graphs.default_cache_dir(), str(tmp_path / "compiled")),
        ("/elsewhere", "/elsewhere"),
    ):
        monkeypatch.delenv(graphs.COMPILED_VARIABLE, raising=False)
        if before is not None:
            monkeypatch.setenv(graphs.COMPILED_VARIABLE, before)
        graphs.keep_compiled_code()
        assert os.environ[graphs.COMPILED_VARIABLE] == kept
