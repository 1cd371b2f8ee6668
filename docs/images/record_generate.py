"""Record `peagle generate` in a terminal and write it as an animated SVG.

    python docs/images/record_generate.py                       # writes docs/images/generate.svg
    python docs/images/record_generate.py --output out.svg --speed 2 "Name three rivers." --compare

The command runs for real in a pseudo-terminal. Text, colors and timing are what it prints; only the wait for the model
to load, before the first output, is cut. Green tokens are accepted drafts, magenta ones replace a rejected draft, cyan
ones follow a fully accepted draft.
"""

import argparse
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from fcntl import ioctl
from html import escape
from pathlib import Path

DEFAULT_OUTPUT = Path(__file__).with_name("generate.svg")
DEFAULT_ARGUMENTS = ["Write a short Python function that reverses a string.", "--compare"]
COLUMNS, ROWS = 88, 60
CELL_WIDTH, LINE_HEIGHT, MARGIN, TITLE_BAR = 8.4, 19, 18, 34
HOLD_SECONDS = 5.0
"""How long the finished screen stays: at first, and then after each replay."""
COLORS = {"32": "#3fb950", "35": "#d869e0", "36": "#39c5cf", "2": "#8b949e"}
FOREGROUND, BACKGROUND, BAR = "#e6edf3", "#0d1117", "#161b22"
SGR = re.compile(rb"\x1b\[([0-9;]*)m")
OTHER_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Run:
    """Characters of one style that appear at the same time on one line."""

    row: int
    column: int
    seconds: float
    color: str
    bold: bool
    text: str


def record(arguments: list[str]) -> list[tuple[float, bytes]]:
    """Run the command with a terminal as stdout; (seconds since the first output, bytes) for each read."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(
        [sys.executable, "-m", "peagle", "generate", *arguments],
        stdout=slave,
        stderr=subprocess.PIPE,  # the loading spinner and the log
        env=environment,
    )
    os.close(slave)
    reads: list[tuple[float, bytes]] = []
    started = None
    while True:
        ready, _, _ = select.select([master], [], [], 0.1)
        if not ready:
            if process.poll() is not None:
                break
            continue
        try:
            data = os.read(master, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not data:
            break
        now = time.perf_counter()
        started = now if started is None else started
        reads.append((now - started, data))
    _, log = process.communicate()
    if process.returncode:
        sys.exit(f"peagle generate failed with status {process.returncode}:\n{log.decode()}")
    return reads


def lay_out(reads: list[tuple[float, bytes]]) -> list[Run]:
    """Place the recorded bytes on a grid, as a terminal of COLUMNS columns does."""
    runs: list[Run] = []
    row = column = 0
    color, bold = FOREGROUND, False
    rest = b""
    for seconds, data in reads:
        data, rest = complete_characters(rest + data)
        for part in re.split(rb"(\x1b\[[0-9;?]*[A-Za-z])", data):
            if found := SGR.fullmatch(part):
                codes = found[1].decode().split(";")
                if codes in ([""], ["0"]):
                    color, bold = FOREGROUND, False
                color = next((COLORS[code] for code in reversed(codes) if code in COLORS), color)
                bold = bold or "1" in codes
                continue
            if OTHER_ESCAPE.fullmatch(part):
                continue
            for character in part.decode():
                if character == "\n":
                    row, column = row + 1, 0
                    continue
                if character == "\r":
                    column = 0
                    continue
                if column == COLUMNS:
                    row, column = row + 1, 0
                last = runs[-1] if runs else None
                same = last is not None and (last.row, last.seconds, last.color, last.bold) == (
                    row,
                    seconds,
                    color,
                    bold,
                )
                if same and last is not None and last.column + len(last.text) == column:
                    last.text += character
                else:
                    runs.append(Run(row, column, seconds, color, bold, character))
                column += 1
    return runs


def complete_characters(data: bytes) -> tuple[bytes, bytes]:
    """Split off a UTF-8 character or an escape sequence that the read cut in two."""
    for cut in range(len(data), max(len(data) - 4, -1), -1):
        try:
            data[:cut].decode()
        except UnicodeDecodeError:
            continue
        escape_at = data.rfind(b"\x1b", 0, cut)
        if escape_at >= 0 and not OTHER_ESCAPE.match(data, escape_at):
            cut = escape_at
        return data[:cut], data[cut:]
    return data, b""


def to_svg(runs: list[Run], command: str, speed: float) -> str:
    """All runs as text elements; each has an animation that shows it from its time on."""
    first_row = 2  # below the command line and an empty line
    num_rows = first_row + max((run.row for run in runs), default=0) + 1
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, TITLE_BAR + num_rows * LINE_HEIGHT + 2 * MARGIN
    visible = [run for run in runs if run.text.strip()]
    total = max((run.seconds for run in visible), default=0.0) / speed + HOLD_SECONDS
    times = sorted({run.seconds for run in visible})
    hidden = 100 * HOLD_SECONDS / total
    # The finished screen comes first, for HOLD_SECONDS, then the recording plays. Without animation it stays.
    frames = [
        f"@keyframes t{index}{{0%,{hidden:.3f}%{{opacity:1}}{hidden + 0.001:.3f}%,{start:.3f}%{{opacity:0}}"
        f"{start + 0.001:.3f}%,100%{{opacity:1}}}}.t{index}{{animation:t{index} {total:.2f}s linear infinite}}"
        for index, seconds in enumerate(times)
        if (start := hidden + 100 * (seconds / speed) / total) > hidden + 0.002
    ]
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
        ".b{font-weight:700}"
        + "".join(frames)
        + "@media(prefers-reduced-motion:reduce){text{animation:none!important}}"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
        f"<title>{escape(command)}</title><style>{style}</style>",
        f'<rect width="100%" height="100%" rx="10" fill="{BACKGROUND}"/>',
        f'<rect width="100%" height="{TITLE_BAR}" rx="10" fill="{BAR}"/>',
        *(
            f'<circle cx="{22 + 20 * index}" cy="{TITLE_BAR / 2:.0f}" r="6" fill="{fill}"/>'
            for index, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        ),
        f'<text x="{width / 2:.0f}" y="{TITLE_BAR / 2 + 5:.0f}" fill="{COLORS["2"]}" text-anchor="middle">'
        f"recorded{f', played at {speed:g}x speed' if speed != 1 else ''}</text>",
        text_element(0, 0, f"$ {command}", FOREGROUND, "b"),
    ]
    for run in visible:
        classes = " ".join(filter(None, [f"t{times.index(run.seconds)}", "b" if run.bold else ""]))
        stripped = run.text.lstrip(" ")
        column = run.column + len(run.text) - len(stripped)
        lines.append(text_element(run.row + first_row, column, stripped.rstrip(" "), run.color, classes))
    return "\n".join([*lines, "</svg>"]) + "\n"


def text_element(row: int, column: int, text: str, color: str, classes: str) -> str:
    x, y = MARGIN + column * CELL_WIDTH, TITLE_BAR + MARGIN + (row + 0.7) * LINE_HEIGHT
    length = f' textLength="{len(text) * CELL_WIDTH:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" class="{classes}"{length}>{escape(text)}</text>'


def shown(arguments: list[str]) -> str:
    """The command as one would type it."""
    return " ".join(["peagle generate", *(f'"{word}"' if " " in word else word for word in arguments)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--speed", type=float, default=1.0, help="play the recording this much faster")
    options, arguments = parser.parse_known_args()
    arguments = arguments or DEFAULT_ARGUMENTS
    runs = lay_out(record(arguments))
    options.output.write_text(to_svg(runs, shown(arguments), options.speed))
    print(f"wrote {options.output}: {len(runs)} pieces in {max(run.seconds for run in runs):.1f} s")


if __name__ == "__main__":
    main()
