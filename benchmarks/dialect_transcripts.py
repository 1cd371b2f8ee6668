"""Print one answer in the format of each model, as the incremental parser streams it.

    python benchmarks/dialect_transcripts.py [--size 12]

The answers are transcripts of tests/harness, written after the models' chat templates. Each line is a piece of --size
characters as the model writes it, and what a stream of /v1/chat/completions sends for it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from harness.transcripts import TRANSCRIPTS
from peagle.dialects.messages import Deltas

SHOWN = {
    "GPT-OSS: Harmony": "harmony preamble and calls",
    "Qwen3-Coder: XML calls": "coder calls",
    "Gemma 4": "gemma thinking and calls",
    "Qwen3: think tags": "qwen3 calls",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=12, help="characters per piece")
    size: int = parser.parse_args().size
    for title, name in SHOWN.items():
        transcript, deltas = TRANSCRIPTS[name], Deltas()
        reader = transcript.own.parser(transcript.ask)
        print(f"\n{title}")
        for start in range(0, len(transcript.text), size):
            piece = transcript.text[start : start + size]
            print(f"  {piece!r:{size + 8}} {shown(deltas.of(reader.feed(piece)))}")
        print(f"  {'(end)':{size + 8}} {shown(deltas.of(reader.feed('', is_last=True)))}")


def shown(delta: dict[str, Any]) -> str:
    """A delta without the ids of its calls, which are random."""
    calls = [{key: value for key, value in call.items() if key != "id"} for call in delta.get("tool_calls", ())]
    return json.dumps(delta | ({"tool_calls": calls} if calls else {}), ensure_ascii=False) if delta else ""


if __name__ == "__main__":
    main()
