"""How close plain decoding comes to the memory-bandwidth limit, for any architecture, with random weights.

A decode step reads every weight it uses once, so it takes at least weight bytes / memory bandwidth. The bandwidth is
measured in the same run.
"""

import contextlib
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from peagle.bench.cells import PLAIN, Cell, CellResult, rounded
from peagle.bench.dummy import drafter_bytes
from peagle.bench.offline import llm_factory
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from peagle.drafter.model import Drafter
    from peagle.engine.engine import Engine
    from peagle.targets.hf import HFTarget

PROMPT_TOKENS = 128
"""length of the random prompts"""
BUFFER_BYTES = {"cuda": 4 << 30, "cpu": 512 << 20}
"""far larger than any cache"""
MEASURED_SECONDS = 0.5
COUNTED_STEPS = 4
"""Steps whose experts are counted."""
MOST_STEPS = 32
"""Steps of an engine that counts them, from the first prompt on."""


def random_prompts(vocab_size: int, num_prompts: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]


def weight_bytes_per_step(model: "PreTrainedModel", expert_share: float = 1.0) -> int:
    """Bytes of weights that one step reads, and of the experts this share.

    An untied embedding does not count: only single rows are read.
    """
    from peagle.targets.few_bit import few_bit_modules

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = 0.0
    few_bit = ((f"{path}.{name}", own) for path, part in few_bit_modules(model) for name, own in part.named_buffers())
    for name, weight in chain(model.named_parameters(), few_bit):
        if weight is embedding and embedding is not head:
            continue
        total += weight.nbytes * (expert_share if ".experts." in f".{name}." else 1)
    return round(total)


def experts_read(
    target: "HFTarget",
    drafters: "Mapping[str, Drafter]",
    cells: Sequence[Cell],
    prompts: Sequence[Sequence[int]],
    assumed: tuple[float, ...] = (),
) -> dict[Cell, float]:
    """The share of the experts that a steady step of each cell reads; 1 for models without experts.

    Counted, because random weights route texts neither alike nor at random. Engines run eagerly for it.
    """
    experts = [module for name, module in target.model.named_modules() if name.endswith(".experts")]
    if not experts:
        return dict.fromkeys(cells, 1.0)
    found: dict[Cell, float] = {}
    sizes: dict[str, Any] = {
        "concurrency": [cell.concurrency for cell in cells],
        "max_tokens": MOST_STEPS * max(1 + (cell.num_draft_tokens or 0) for cell in cells),
    }
    make_llm = llm_factory(target, drafters, prompts, **sizes, eager=True, assumed_acceptance=assumed)
    for wanted, group in groupby(cells, key=lambda cell: (cell.method, cell.num_draft_tokens)):
        with contextlib.closing(make_llm(*wanted)) as llm:
            for cell in group:
                found[cell] = _share_read(llm.engine, experts, prompts[: cell.concurrency])
    return found


def _share_read(engine: "Engine", experts: "Sequence[nn.Module]", prompts: Sequence[Sequence[int]]) -> float:
    config: Any = engine.target.model.config.get_text_config()
    num_experts: int = getattr(config, "num_experts", None) or config.num_local_experts
    params = SamplingParams(max_tokens=engine.max_length, ignore_eos=True)
    counts: list[int] = []

    def count(_: Any, arguments: tuple[Any, ...]) -> None:
        counts.append(arguments[1].unique().numel())

    for prompt in prompts:
        engine.add(list(prompt), params)
    for _ in range(MOST_STEPS - COUNTED_STEPS):
        before = engine.stats().num_prefill_tokens
        engine.step()
        if engine.stats().num_prefill_tokens == before and engine.stats().num_running == len(prompts):
            break
    hooks = [module.register_forward_pre_hook(count) for module in experts]
    for _ in range(COUNTED_STEPS):
        engine.step()
    for hook in hooks:
        hook.remove()
    engine.reset()
    return statistics.fmean(counts) / num_experts


def measure_bandwidth(device: "torch.device", num_bytes: int | None = None) -> dict[str, Any]:
    """Bytes per second of copying and reading a buffer much larger than any cache, and the higher of the two."""
    import torch
    from torch.utils.benchmark import Timer

    if num_bytes is None:
        num_bytes = BUFFER_BYTES[device.type]
        if device.type == "cuda":
            num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)

    def per_second(num_bytes: int, run: Callable[[], Any]) -> int:
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        with torch.cuda.device_of(source):
            return round(num_bytes / timer.blocked_autorange(min_run_time=MEASURED_SECONDS).median)

    read, copy = per_second(num_bytes, source.sum), None
    if device.type == "cuda":
        destination = torch.empty_like(source)
        copy = per_second(2 * num_bytes, lambda: destination.copy_(source))
    return {
        "bytes_per_second": max(read, copy or 0),
        "copy_bytes_per_second": copy,
        "read_bytes_per_second": read,
    }


def bandwidth_report(
    target: "HFTarget",
    bandwidth: dict[str, Any],
    results: Sequence[CellResult],
    expert_shares: Mapping[Cell, float],
    drafter: "Drafter | None" = None,
) -> dict[str, Any]:
    """`bandwidth`, and per cell: the time per step, its lower bound by bandwidth, and the ratio of the two.

    `expert_shares` are those of `experts_read`; cells without one are left out. The limit counts weights only. At high
    concurrency the KV cache is read as well, which lowers the fraction. With drafts, verification has more rows, which
    wake more experts, and drafting reads the drafter. If no step was steady, the mean TPOT stands in for its time.
    """
    from peagle.targets.few_bit import num_parameters

    rows = []
    for result in results:
        cell, step = result.cell, result.step
        if cell not in expert_shares:
            continue
        num_verified = weight_bytes_per_step(target.model, expert_shares[cell])
        num_bytes = num_verified + (drafter_bytes(drafter) if drafter is not None and cell.method != PLAIN else 0)
        times = [answer.seconds_per_token for answer in result.answers if answer.seconds_per_token is not None]
        seconds = step.wall if step else statistics.fmean(times) if times and cell.method == PLAIN else None
        limit, verify_limit = (count / bandwidth["bytes_per_second"] for count in (num_bytes, num_verified))
        verify = step.verify if step else None
        rows.append(
            {
                "label": cell.label,
                "concurrency": cell.concurrency,
                "weight_bytes": num_bytes,
                "expert_share": round(expert_shares[cell], 4),
                "limit_ms": round(1e3 * limit, 4),
                "step_ms": rounded(seconds, 4, 1e3),
                "fraction_of_limit": None if seconds is None else round(limit / seconds, 4),
                "verify_limit_ms": round(1e3 * verify_limit, 4),
                "verify_ms": rounded(verify, 4, 1e3),
                "verify_fraction_of_limit": None if verify is None else round(verify_limit / verify, 4),
            }
        )
    return bandwidth | {"num_parameters": num_parameters(target.model), "steps": rows}
