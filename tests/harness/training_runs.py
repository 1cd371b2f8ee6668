"""Short runs of `train_drafter` on files that tests write."""

import json

import numpy as np

from peagle.checkpoint.card import TargetIdentity
from peagle.data.shard_writer import ShardWriter
from peagle.data.shards import Row
from peagle.engine.llm import LLM
from peagle.objective.config import TrainConfig
from peagle.sampling_params import SamplingParams


def settings(data, output, **changes):
    values = {
        "held_out": data,
        "num_layers": 1,
        "num_draft_tokens": 3,
        "max_length": 40,
        "batch_size": 2,
        "num_steps": 4,
        "warmup_steps": 1,
        "log_every": 2,
        "save_every": 2,
        "compile": "off",
    }
    return TrainConfig(data=data, output=output, **(values | changes))


def metrics_of(output):
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]


def greedy_answers(target, path):
    """A file of the target's greedy answers to six prompts."""
    prompts = [target.tokenizer(f"the user asks {n}")["input_ids"] for n in range(6)]
    with LLM(target, None, max_length=48) as llm:
        answers = [output.outputs[0].token_ids for output in llm.generate(prompts, SamplingParams(max_tokens=20))]
    rows = [{"prompt_ids": p, "answer_ids": a, "temperature": 0} for p, a in zip(prompts, answers, strict=True)]
    return written(path, *rows)


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shards(directory, target, temperatures):
    """Rows of the given temperatures as `peagle data` would have written them."""
    with ShardWriter(directory, "synthesize", TargetIdentity.of(target), {"seed": 0}) as writer:
        rows = []
        for key, temperature in enumerate(temperatures):
            ids = np.random.default_rng(key).integers(3, 260, 24).astype(np.int32)
            rows.append(Row(key, ids, ((6, 24),), temperature))
        writer.append(rows, [])
        writer.finish()
    return directory
