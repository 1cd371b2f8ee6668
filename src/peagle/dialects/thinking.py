"""Thinking between tags, before the answer: <think>...</think>. The opening tag may be the end of the prompt."""

from peagle.dialects.reading import Reader, Steps

THINK, THINK_END = "<think>", "</think>"


def read_thinking(reader: Reader, *, is_open: bool) -> Steps[None]:
    """The thinking at the start of an answer, if it has any. `is_open`: the prompt ends with the opening tag."""
    start = yield from reader.look(1)
    if start == THINK[0]:
        start = yield from reader.look(len(THINK))
    if start == THINK:
        yield from reader.skip_space()
        yield from reader.accept(THINK)
    elif not is_open:
        return
    yield from reader.copy_until("reasoning", THINK_END)
    reader.trim("content")
