"""What a model wrote, taken apart into reasoning and answer by the marks of published models; linear in its length, and never an error.

Marks of tool calls (`[TOOL_CALLS]`, `<|python_tag|>`, `<tool_call>`) are part of the answer, which is what follows the reasoning.
"""

from __future__ import annotations

import re

_PAIRS = {f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning", "seed:think")}
_PAIRS |= {"[THINK]": "[/THINK]", "◁think▷": "◁/think▷", "<|channel>thought": "<channel|>", "<unused94>thought": "<unused95>"}
_PAIRS |= {"<|START_THINKING|>": "<|END_THINKING|>", "<|begin_of_thought|>": "<|end_of_thought|>", "<|inner_prefix|>": "<|inner_suffix|>"}
_ANSWERS = {"<answer>": "</answer>", "<|START_RESPONSE|>": "<|END_RESPONSE|>", "<|begin_of_solution|>": "<|end_of_solution|>"}
_MARK = re.compile("|".join(map(re.escape, [*_PAIRS, *_PAIRS.values()])))
_CHANNEL = re.compile(r"<\|(channel|message|start|end|call|return)\|>")


def split_reasoning(text: str, prompt: str = "") -> tuple[str, str]:
    """(reasoning, answer) of a response: parts of `text` without the whitespace around them, empty if there are none.

    The response begins within reasoning if its prompt ends with an opening mark, or if a closing mark comes without one. Reasoning that
    nothing closes goes to the end, and there is no answer. Of several pieces, all up to the end of the last one is reasoning. The answer
    is what follows; what stands in the last `<answer>...</answer>` if it has one; the last `final` message of gpt-oss.
    """
    prompt = prompt[-256:].rstrip()
    if found := _channels(text, prompt):
        return found
    opened = next((mark for mark in _PAIRS if prompt.endswith(mark)), "")
    if opened and text.lstrip().startswith(opened):  # some models write it again
        opened = ""
    awaited, start = _PAIRS.get(opened, ""), 0  # of the piece that is open
    begin, stop, rest = -1, 0, 0  # of the reasoning, and of what follows
    for mark in _MARK.finditer(text):
        if awaited and mark[0] == awaited or not awaited and mark[0] not in _PAIRS and begin < 0:
            begin, stop, rest, awaited = start if begin < 0 else begin, mark.start(), mark.end(), ""
        elif not awaited and mark[0] in _PAIRS:
            awaited, start, before = _PAIRS[mark[0]], mark.end(), mark.start()
    if awaited and begin < 0 and (start == 0 or not text[:before].strip()):
        return text[start:].strip(), ""
    return text[max(begin, 0) : stop].strip(), _answer(text[rest:])


def _answer(text: str) -> str:
    for mark, end in _ANSWERS.items():
        if (at := text.rfind(mark)) >= 0:
            return text[at + len(mark) :].partition(end)[0].strip()
    return text.strip()


def _channels(text: str, prompt: str) -> tuple[str, str] | None:
    """Of what gpt-oss writes, `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; None: no such."""
    head = prompt.rpartition("<|channel|>")[2] if prompt.endswith("<|message|>") else ""
    name, body, begun = head.removesuffix("<|message|>"), 0 if head else -1, 0 if prompt.endswith("<|channel|>") else -1
    found: list[tuple[str, int, int]] = []
    for mark in (*_CHANNEL.finditer(text), None):
        at = len(text) if mark is None else mark.start()
        if mark is None or mark[1] != "message":
            found += [(name.strip().partition(" ")[0], body, at)] if body >= 0 else []
            body, begun = -1, mark.end() if mark is not None and mark[1] == "channel" else -1
        elif body < 0:
            name, body, begun = text[begun:at] if begun >= 0 else "", mark.end(), -1
    if not any(name in ("analysis", "commentary", "final") for name, *_ in found):
        return None
    _, begin, stop = next((part for part in reversed(found) if part[0] == "final"), ("", len(text), len(text)))
    thought = [part for part in found if part[0] == "analysis" and part[1] < begin]
    return text[thought[0][1] : thought[-1][2]].strip() if thought else "", _answer(text[begin:stop])
