"""A second target to prove the method on: the embedded one, fine-tuned to answer with {"answer": ...}.

    peagle data synthesize --output runs/json/text --kinds chat=1 --num-tokens 1000000
    python recipes/fine_tuned_target.py --data runs/json/text --output runs/json/target

The target wrote the text, and the script wraps its answers in JSON. The result is a Hugging Face directory. From there
on the documented commands alone, first for a drafter from nothing:

    peagle data synthesize --target runs/json/target --output runs/json/data --num-tokens 10000000 --num-held-out 96
    peagle train --recipe embedded --target runs/json/target --data runs/json/data --output runs/json/new

What the drafter of the original target accepts, what it accepts adapted, and the new one:

    peagle eval --target runs/json/target --drafter smollm2-135m-instruct-p-eagle --allow-mismatch
    peagle adapt --target runs/json/target --drafter smollm2-135m-instruct-p-eagle --allow-mismatch \\
        --data runs/json/data --output runs/json/adapted
    peagle eval --target runs/json/target --drafter runs/json/adapted
    peagle eval --target runs/json/target --drafter runs/json/new

Needs only torch, transformers, numpy and safetensors. On a GPU it takes about a minute.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from peagle.data.conversations import read_conversations
from peagle.data.turns import answer_end
from peagle.targets.catalog import DEFAULT_TARGET
from peagle.targets.load import choose_device, find_target, has_native_bfloat16
from peagle.tokenizer import detokenize

NUM_ASKED = 16  # prompts of the text that are not trained on
WARM_UP = 20
IGNORED = -100  # of the labels, as transformers defines it
Example = tuple[list[int], list[int]]
"""Token ids of a prompt, and of its answer in JSON with the end token."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="text of `peagle data`, written by the target")
    parser.add_argument("--output", type=Path, required=True, help="directory of the fine-tuned target")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    arguments = parser.parse_args(argv)
    directory, device = find_target(arguments.target), choose_device("auto")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
    examples = [each for each in wrapped(arguments.data, tokenizer) if sum(map(len, each)) <= arguments.max_length]
    tune(model, examples[NUM_ASKED:], arguments)
    answers = [answered(model, prompt, tokenizer, arguments.max_length) for prompt, _ in examples[:NUM_ASKED]]
    print(f"{sum(map(is_wrapped, answers))} of {len(answers)} answers are JSON; the first: {answers[0]}", flush=True)
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


def wrapped(path: Path, tokenizer: Any) -> list[Example]:
    """The first turn of each conversation, answered in JSON."""
    end, examples = answer_end(tokenizer), []
    for row in read_conversations(path, tokenizer):
        token_ids, mask = row.token_ids.tolist(), row.loss_mask.tolist()
        first = mask.index(True)
        last = mask.index(False, first) if False in mask[first:] else len(mask)
        text = detokenize(tokenizer, token_ids[first : last - (token_ids[last - 1] == end)]).strip()
        answer = tokenizer(json.dumps({"answer": text}, ensure_ascii=False), add_special_tokens=False)["input_ids"]
        examples.append((token_ids[:first], [*answer, end]))
    return examples


def tune(model: Any, examples: Sequence[Example], arguments: argparse.Namespace) -> None:
    """Train all weights on the answers."""
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    device = model.device
    is_fast = device.type == "cuda" or has_native_bfloat16()
    model.train()
    for step in range(1, arguments.num_steps + 1):
        token_ids_BT, labels_BT, mask_BT = batch(chance.choices(examples, k=arguments.batch_size))
        with torch.autocast(device.type, torch.bfloat16, enabled=is_fast):
            inputs = {"input_ids": token_ids_BT, "labels": labels_BT, "attention_mask": mask_BT}
            loss = model(**{name: tensor.to(device) for name, tensor in inputs.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == arguments.num_steps:
            print(f"step {step} of {arguments.num_steps}: loss {loss.item():.3f}", flush=True)
    model.eval()


def batch(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, labels and attention mask, padded to the longest row."""
    rows = [torch.tensor(prompt + answer) for prompt, answer in examples]
    labels = [torch.tensor([IGNORED] * len(prompt) + answer) for prompt, answer in examples]
    masks = [torch.ones_like(row) for row in rows]
    padding = (0, IGNORED, 0)
    token_ids, targets, mask = (
        pad_sequence(each, batch_first=True, padding_value=value)
        for each, value in zip((rows, labels, masks), padding, strict=True)
    )
    return token_ids, targets, mask


def answered(model: Any, prompt: list[int], tokenizer: Any, max_length: int) -> str:
    """The greedy answer."""
    row = torch.tensor([prompt], device=model.device)
    mask, end = torch.ones_like(row), answer_end(tokenizer)
    sizes = {"max_new_tokens": max_length - len(prompt), "eos_token_id": end, "pad_token_id": end}
    output = model.generate(row, attention_mask=mask, do_sample=False, **sizes)
    return detokenize(tokenizer, [token for token in output[0, len(prompt) :].tolist() if token != end])


def is_wrapped(text: str) -> bool:
    try:
        return list(json.loads(text)) == ["answer"]
    except (ValueError, TypeError):
        return False


if __name__ == "__main__":
    main()
