"""The published models in miniature on the native engine: their files, their answers, their heads.

What is expected comes from transformers alone: its own loading of the directory, and its own `generate`.
"""

import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from harness.drafter_passes import TEXT, aux_of, serving_logits
from harness.published_models import (
    MASK_TOKEN,
    PUBLISHED,
    WINDOW,
    Published,
    published_drafter,
    write_head,
    write_target,
)
from peagle.checkpoint.native import load_drafter
from peagle.drafter.create import config_for_target, create_drafter
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.engine.outputs import EngineStats
from peagle.quantized.load import dequantize_options, forget_quantization
from peagle.sampling_params import SamplingParams
from peagle.targets.capacity import count_parameters
from peagle.targets.catalog import find
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.targets.near_tie import NEAR_TIE

MAX_TOKENS = 24
LENGTHS = (5, 17, 40, 90)
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
SETTINGS: dict[str, Any] = {"max_length": 256, "page_size": 8, "prefill_tokens": 64}


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 268) for _ in range(length)] for length in LENGTHS]


PROMPTS = make_prompts()


@dataclass
class Case:
    """One published model in miniature; parts are made when they are first asked for."""

    name: str
    published: Published
    root: Path

    @cached_property
    def directory(self) -> Path:
        return write_target(self.published, self.root / "target")

    @cached_property
    def judge(self) -> Any:
        """What transformers makes of the files, in float32 throughout."""
        # Where there is a GPU, transformers would keep quantized weights as they are.
        options = dequantize_options(self.directory)
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32, **options)
        forget_quantization(model)
        return model.float().eval()

    @cached_property
    def target(self) -> HFTarget:
        return load_target(self.directory, dtype="float32", device="cpu")

    @cached_property
    def answers(self) -> list[list[int]]:
        rows = [torch.tensor([prompt]) for prompt in PROMPTS]
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False}
        found = [self.judge.generate(row, attention_mask=torch.ones_like(row), **options) for row in rows]
        return [answer[0, len(prompt) :].tolist() for answer, prompt in zip(found, PROMPTS, strict=True)]

    @cached_property
    def trained(self) -> Drafter:
        texts = [prompt + answer for prompt, answer in zip(PROMPTS, self.answers, strict=True)]
        return published_drafter(self.target, texts[1:], self.published.num_draft_tokens)

    @cached_property
    def head(self) -> Path:
        return write_head(self.trained, self.root / "head")

    @cached_property
    def untrained(self) -> Drafter:
        return published_drafter(self.target, PROMPTS[1:], self.published.num_draft_tokens, num_steps=1)


@pytest.fixture(scope="module", params=PUBLISHED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, PUBLISHED[request.param], tmp_path_factory.mktemp(request.param))


LLAMA_LIKE = (
    "lm_head.weight model.embed_tokens.weight model.norm.weight "
    "model.layers.N.input_layernorm.weight model.layers.N.post_attention_layernorm.weight "
    "model.layers.N.self_attn.{q_proj,k_proj,v_proj,o_proj}.weight"
)
GPT_OSS_NAMES = (
    f"{LLAMA_LIKE} model.layers.N.self_attn.{{q_proj,k_proj,v_proj,o_proj}}.bias model.layers.N.self_attn.sinks "
    "model.layers.N.mlp.router.{weight,bias} "
    "model.layers.N.mlp.experts.{gate_up_proj,down_proj}{_blocks,_scales,_bias}"
)
QWEN3_MOE_NAMES = (
    f"{LLAMA_LIKE} model.layers.N.self_attn.{{q_norm,k_norm}}.weight model.layers.N.mlp.gate.weight "
    "model.layers.N.mlp.experts.N.{gate_proj,up_proj,down_proj}.weight"
)
FP8_SCALES = (
    "model.layers.N.self_attn.{q_proj,k_proj,v_proj,o_proj}.weight_scale_inv "
    "model.layers.N.mlp.experts.N.{gate_proj,up_proj,down_proj}.weight_scale_inv"
)
GEMMA4_NAMES = (
    "model.language_model.embed_tokens.weight model.language_model.norm.weight "
    "model.language_model.layers.N.{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight "
    "model.language_model.layers.N.layer_scalar "
    "model.language_model.layers.N.self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight "
    "model.language_model.layers.N.mlp.{gate_proj,up_proj,down_proj}.weight "
    "model.embed_vision.embedding_projection.weight model.vision_tower.std_bias model.vision_tower.std_scale "
    "model.vision_tower.patch_embedder.input_proj.weight model.vision_tower.patch_embedder.position_embedding_table "
    "model.vision_tower.encoder.layers.N."
    "{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight "
    "model.vision_tower.encoder.layers.N.self_attn.{q_proj,k_proj,v_proj,o_proj}.linear.weight "
    "model.vision_tower.encoder.layers.N.self_attn.{q_norm,k_norm}.weight "
    "model.vision_tower.encoder.layers.N.mlp.{gate_proj,up_proj,down_proj}.linear.weight"
)
STORED = {
    "gpt-oss-120b": GPT_OSS_NAMES,
    "gpt-oss-20b": GPT_OSS_NAMES,
    "qwen3-coder-30b-a3b-instruct": QWEN3_MOE_NAMES,
    "qwen3-coder-30b-a3b-instruct-fp8": f"{QWEN3_MOE_NAMES} {FP8_SCALES}",
    "gemma-4-31b-it": GEMMA4_NAMES,
}
HEAD_NAMES = (
    "embed_tokens.weight fc.weight lm_head.weight norm.weight d2t t2d mask_hidden midlayer.hidden_norm.weight "
    "{midlayer,layers.N}.{input_layernorm,post_attention_layernorm}.weight "
    "{midlayer,layers.N}.self_attn.{q_proj,k_proj,v_proj,o_proj}.weight "
    "{midlayer,layers.N}.mlp.{gate_proj,up_proj,down_proj}.weight"
)


def spelled_out(names: str) -> set[str]:
    """Every name that words with {a,b} choices in them stand for."""
    found = set(names.split())
    while any("{" in name for name in found):
        found = {
            re.sub(r"\{[^}]*\}", choice, name, count=1)
            for name in found
            for choice in (name[name.index("{") + 1 : name.index("}")].split(",") if "{" in name else [""])
        }
    return found


def stored_names(path: Path) -> set[str]:
    return {re.sub(r"\.\d+(?=\.)", ".N", name) for name in load_file(path)}


def assert_same(case: Case, found: list[list[int]]) -> None:
    """Equal to transformers' answers, unless its own two best tokens are nearly tied where they part."""
    for ours, theirs, prompt in zip(found, case.answers, PROMPTS, strict=True):
        if ours != theirs:
            part = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
            text = torch.tensor([[*prompt, *theirs[:part]]])
            with torch.no_grad():
                first, second = case.judge(text).logits[0, -1].topk(2).values.tolist()
            assert first - second < NEAR_TIE, f"token {part} after {len(prompt)} of prompt: {ours} is not {theirs}"


def serve(target: HFTarget, drafter: Drafter | None, num_draft_tokens: int) -> tuple[list[list[int]], EngineStats]:
    with LLM(target, drafter, num_draft_tokens, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        return [list(output.outputs[0].token_ids) for output in outputs], llm.engine.stats()


@pytest.mark.slow
def test_the_files_have_the_published_names_and_no_others(case: Case) -> None:
    assert stored_names(case.directory / "model.safetensors") == spelled_out(STORED[case.name])
    assert stored_names(case.head / "model.safetensors") == spelled_out(HEAD_NAMES)
    mask_hidden = load_file(case.head / "model.safetensors")["mask_hidden"]
    assert mask_hidden.shape == (1, 1, 3 * case.target.hidden_size)


def test_a_target_is_loaded_in_one_precision_and_counted(case: Case) -> None:
    target = case.target
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.float32}
    assert type(target.model).__name__ == case.published.config["architectures"][0]
    text = case.published.config.get("text_config", case.published.config)
    assert (target.num_layers, target.vocab_size) == (text["num_hidden_layers"], text["vocab_size"])
    assert target.eos_token_ids >= {2} and target.max_length == text["max_position_embeddings"]
    held = sum(parameter.numel() for parameter in target.model.parameters())
    assert 0.99 * held <= count_parameters(case.directory) <= 1.01 * held, "told from the heads of the files alone"
    assert not getattr(target.model.config, "quantization_config", None), "it is a plain model now"
    text_ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        assert torch.allclose(target.forward(text_ids).logits_BTV, case.judge(text_ids).logits, atol=1e-4)


@pytest.mark.slow
def test_the_native_engine_answers_as_transformers_does(case: Case) -> None:
    assert max(LENGTHS) > 4 * WINDOW, "texts reach far beyond the windows"
    assert len({tuple(answer) for answer in case.answers}) == len(PROMPTS), "answers vary"
    found, _ = serve(case.target, None, 0)
    assert_same(case, found)


def test_a_published_head_is_read_as_it_was_made(case: Case, tmp_path: Path) -> None:
    loaded = load_drafter(write_head(case.untrained, tmp_path / "head"), case.target)
    config = loaded.config
    assert (config.method, config.num_layers, config.mask_token_id) == ("p-eagle", 4, MASK_TOKEN)
    assert (config.embeddings, config.head) == ("own", "own")
    assert config.aux_layer_ids == case.target.default_aux_layer_ids, "its config does not say which layers it reads"
    assert config.rope_parameters["rope_type"] == "llama3"
    assert loaded.repairs == (), "every engine reads these files in the same sense"
    depth = case.published.num_draft_tokens
    inputs = aux_of(case.target, TEXT)
    ours = serving_logits(loaded, depth, *inputs, step=4)
    theirs = serving_logits(case.untrained, depth, *inputs, step=4)
    for anchor, logits_KV in ours.items():
        assert torch.equal(logits_KV, theirs[anchor]), f"logits at anchor {anchor}"


@pytest.mark.slow
def test_speculation_at_the_recommended_depth_changes_no_token(case: Case) -> None:
    depth = case.published.num_draft_tokens
    found, stats = serve(case.target, load_drafter(case.head, case.target), depth)
    assert_same(case, found)
    accepted = stats.accepted_per_position
    print(f"{case.name}: K {depth}, {stats.num_drafts} drafts, accepted by position {accepted}")
    assert len(accepted) == depth and 0 < accepted[0] < stats.num_drafts, f"some accepted, some not: {accepted}"


def test_the_depth_tried_here_is_the_catalogs(case: Case) -> None:
    entry = find(case.name.removesuffix("-fp8"))
    assert entry is not None and entry.architecture == case.published.config["architectures"][0]
    advised = entry.drafter().num_draft_tokens
    assert advised == case.published.num_draft_tokens or (advised is None and not entry.drafter().is_public)


@pytest.mark.slow
def test_a_drafter_of_ones_own_can_be_begun_for_it(case: Case) -> None:
    config = config_for_target(case.target, num_layers=2, num_draft_tokens=4)
    drafter = create_drafter(case.target, config, "random", seed=1)
    text = case.published.config.get("text_config", case.published.config)
    assert (config.num_kv_heads, config.head_dim) == (text["num_key_value_heads"], text["head_dim"])
    logits = serving_logits(drafter, 4, *aux_of(case.target, TEXT), step=4)
    assert all(bool(each.isfinite().all()) for each in logits.values())


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Four-bit numbers (sign, two bits of exponent, one of mantissa), low half of the byte first, times 2^(e-127)."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([magnitudes, -magnitudes])
    pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1)
    return (pairs.flatten(-2) * 2.0 ** (scales.float()[..., None] - 127)).flatten(-2)


def only(name: str, tmp_path: Path, dtype: str) -> tuple[HFTarget, dict[str, Tensor]]:
    directory = write_target(PUBLISHED[name], tmp_path / name)
    return load_target(directory, dtype=dtype, device="cpu"), load_file(directory / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_bit_experts_are_widened_to_exactly_the_numbers_they_stand_for(tmp_path: Path, dtype: str) -> None:
    target, stored = only("gpt-oss-20b", tmp_path, dtype)
    for projection in ("gate_up_proj", "down_proj"):
        name = f"model.layers.3.mlp.experts.{projection}"
        found = target.model.get_parameter(name)
        expected = mxfp4_values(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert found.dtype == getattr(torch, dtype)
        assert torch.equal(found.float(), expected.transpose(1, 2)), projection


def test_eight_bit_weights_are_widened_by_the_factor_of_their_block(tmp_path: Path) -> None:
    target, stored = only("qwen3-coder-30b-a3b-instruct-fp8", tmp_path, "float32")
    name = "model.layers.2.self_attn.q_proj.weight"
    factors = stored[f"{name}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.allclose(target.model.get_parameter(name), stored[name].float() * factors, rtol=1e-6)
    assert target.head_VD.equal(stored["lm_head.weight"].float()), "what was left out of the quantization is as it was"


@pytest.mark.gpu
def test_a_gpu_answers_as_transformers_does(case: Case) -> None:
    """Sinks, windows and wide heads in the Triton kernels; experts inside captured steps."""
    target = load_target(case.directory, dtype="float32", device="cuda")
    assert {parameter.device.type for parameter in target.model.parameters()} == {"cuda"}
    loaded = load_drafter(case.head, target)
    for drafter, depth in ((None, 0), (loaded, case.published.num_draft_tokens)):
        found, stats = serve(target, drafter, depth)
        assert_same(case, found)
    assert stats.accepted_per_position[0] > 0
    half = load_target(case.directory, dtype="bfloat16", device="cuda")
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}
    found, _ = serve(half, None, 0)
    assert all(len(answer) == MAX_TOKENS or answer[-1] in half.eos_token_ids for answer in found)
