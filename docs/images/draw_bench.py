"""Draw docs/images/bench.svg from the figures in bench.json, which lies beside it.

    python docs/images/draw_bench.py

One panel per concurrency, each with its own scale; one bar per method at its best K. Standard library only.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH, PANEL_TOP, PANEL_HEIGHT, LEFT = 960, 92, 196, 24
BAR, GAP = 23, 5
FILLS = {
    "vLLM plain": "#d0d7de",
    "vLLM EAGLE-3": "#afb8c1",
    "vLLM P-EAGLE": "#8c959f",
    "peagle plain": "#a7dccf",
    "peagle EAGLE-3": "#4cb8a0",
    "peagle P-EAGLE": "#00796b",
}
FOOTNOTE = (
    "Each panel has its own scale. vLLM 0.26.0, engine in-process. "
    "Small model and slow host: both cost vLLM more than peagle."
)
INK, QUIET = "#1f2328", "#59636e"


def text(x: float, y: float, content: str, size: int = 13, fill: str = INK, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" {more}>{content}</text>'


def short(value: int) -> str:
    """A figure that fits above its bar: 404, 3.8k, 124.9k becomes 125k."""
    return str(value) if value < 1000 else f"{value / 1000:.1f}k" if value < 100_000 else f"{value / 1000:.0f}k"


def draw(document: dict) -> str:
    concurrency = document["concurrency"]
    best = {
        name: [max(column) for column in zip(*by_k.values(), strict=True)]
        for name, by_k in document["tokens_per_second"].items()
    }
    height = PANEL_TOP + PANEL_HEIGHT + 62
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        "font-family=\"-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif\">",
        "<title>Output tokens per second, vLLM and peagle</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        text(LEFT, 30, "Output tokens per second", 18, more='font-weight="600"'),
        text(LEFT + 240, 30, "SmolLM2-135M, one H200, bf16, greedy; each method at its best K", 13, QUIET),
    ]
    x = LEFT
    for name, fill in FILLS.items():
        lines.append(f'<rect x="{x}" y="48" width="13" height="13" rx="2" fill="{fill}"/>')
        lines.append(text(x + 19, 59, name))
        x += 38 + 8 * len(name)
    panel = (WIDTH - 2 * LEFT) / len(concurrency)
    for index, requests in enumerate(concurrency):
        lines += draw_panel(LEFT + index * panel, panel, requests, {name: row[index] for name, row in best.items()})
    lines.append(text(LEFT, height - 12, FOOTNOTE, 12, QUIET))
    return "\n".join([*lines, "</svg>"]) + "\n"


def draw_panel(left: float, width: float, requests: int, values: dict[str, int]) -> list[str]:
    bottom = PANEL_TOP + PANEL_HEIGHT
    used = len(values) * BAR + (len(values) - 1) * GAP
    start = left + (width - used) / 2
    tallest = max(values.values())
    lines = [f'<path d="M{start - 6:.1f} {bottom}.5H{start + used + 6:.1f}" stroke="#d0d7de"/>']
    for index, (name, value) in enumerate(values.items()):
        x, tall = start + index * (BAR + GAP), (PANEL_HEIGHT - 18) * value / tallest
        lines.append(
            f'<rect x="{x:.1f}" y="{bottom - tall:.1f}" width="{BAR}" height="{tall:.1f}" rx="2" fill="{FILLS[name]}">'
            f"<title>{name}: {value:,}</title></rect>"
        )
        weight = 'font-weight="600" ' if name == "peagle P-EAGLE" else ""
        lines.append(text(x + BAR / 2, bottom - tall - 5, short(value), 10, more=f'{weight}text-anchor="middle"'))
    label = "1 request" if requests == 1 else f"{requests} concurrent"
    lines.append(text(left + width / 2, bottom + 19, label, 13, more='text-anchor="middle"'))
    return lines


if __name__ == "__main__":
    (FOLDER / "bench.svg").write_text(draw(json.loads((FOLDER / "bench.json").read_text())))
    print(f"wrote {FOLDER / 'bench.svg'}")
