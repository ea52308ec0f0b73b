"""The filter of all text that reaches a terminal: nothing passes it, it changes nothing twice, and it does not matter how text is cut."""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from preloaded import preloaded
from terminals import COLOUR, DRAWN, HOSTILE_NAMES, LIVE, on_a_terminal

from aligner.cluster.console import Echo
from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.steps import Place
from aligner.data.report import LoadReport
from aligner.reporting.config import LoggingConfig, Progress
from aligner.reporting.progress import open_view
from aligner.telemetry import terminal
from aligner.telemetry.terminal import Guarded, clean, plain

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "nlp" / "data" / "digits" / "tokenizer"
# What a sequence is made of, and text that would complete one when something between them is removed.
PIECES = [
    *"\x1b|\x1b[|\x1b]|\x1bP|[|]|P|X|^|_|\\|(|c|0|1|3|8|31|38;5;1|;|:|?25l|m|2J|J|2K|1A|H|0;title|\x07|\x08|\r|\n|\t|\0".split("|"),
    *"\x0e|\x7f|a|é|ю|🙂| |\x9b|\x9d|\x90|\x9c|\x85|\u202e|\u2066|\u2069|\u200f|\u061c|\ud83d|\udc00".split("|"),
    *("x" * 70, "y" * 260),
]
ATTACKS = {
    "\x1b[\x002J": "[2J",  # each becomes live where what stands inside is removed once
    "\x1b[2\x07J": "[2J",
    "\x1b[\x1b[2J2J": "[2J",
    "\x1b\x1b[2J[2J": "[2J",
    "\x1b]0;title\x07a": "a",
    "\x1b]0;title\x1b\\a": "a",
    "\x1b]8;;http://x\x1b\\a": "a",
    "\x1bP+q544e\x1b\\a": "a",
    "\x1b]0;never closed": "]0;never closed",
    "\x9b2Ja\x9d0;x\x9c": "2Ja0;x",
    "\x1b[8mhidden\x1b[28m": "hidden",
    "\x1b[1;8mhidden": "hidden",
    "\x1b[40m\x1b[5mblinks": "blinks",
    "\x1bc\x1b(0": "c(0",
    "\x1b[31mred\x1b[0m \x1b[1;36mbold\x1b[m": "\x1b[31mred\x1b[0m \x1b[1;36mbold\x1b[m",
    "\u202egnp.exe\u2066a": "gnp.exea",
    "10%\r20%\r\nend\x08\x7f": "10%\n20%\nend",
    "\ud800 \U0001f642": "\ufffd \U0001f642",
}


def texts(seed: int, count: int) -> list[str]:
    draws = random.Random(seed)
    return ["".join(draws.choice(PIECES) for _ in range(draws.randrange(1, 16))) for _ in range(count)]


def guarded(*pieces: str, drawn: bool = False) -> str:
    stream = io.StringIO()
    out = Guarded(stream, drawn=drawn)
    for piece in pieces:
        assert out.write(piece) == len(piece)
    return stream.getvalue()


def test_attacks() -> None:
    assert {text: clean(text) for text in ATTACKS} == ATTACKS
    assert plain("\x1b[31mred\x1b[0m \x1b[\x002Ja\x1b[8m") == "red [2Ja"


@pytest.mark.parametrize("drawn", [False, True])
def test_nothing_passes_and_cleaning_twice_changes_nothing(drawn: bool) -> None:
    for text in texts(1, 20_000):
        found = clean(text, drawn=drawn)
        assert clean(found, drawn=drawn) == found, text
        assert not LIVE.search((DRAWN if drawn else COLOUR).sub("", found)), text
        assert not any("8" in re.split("[;[m]", colour[0]) and "38;" not in colour[0] for colour in COLOUR.finditer(found)), text
        assert not LIVE.search(plain(text)) and plain(plain(text)) == plain(text), text
        assert not LIVE.search((DRAWN if drawn else COLOUR).sub("", found + clean(text[::-1], drawn=drawn))), text


@pytest.mark.parametrize("drawn", [False, True])
def test_a_stream_does_not_depend_on_how_it_is_cut(drawn: bool) -> None:
    for text in texts(2, 2_000):
        whole = guarded(text, "\n", drawn=drawn)
        assert whole == clean(text + "\n", drawn=drawn)  # the newline ends what has begun
        for cut in range(len(text) + 1):
            assert guarded(text[:cut], text[cut:], "\n", drawn=drawn) == whole, (text, cut)
        assert guarded(*text, "\n", drawn=drawn) == whole, text


def test_long_text_is_cleaned_in_one_pass() -> None:
    for piece in ("\x1b]", "\x1b[", "\x1b", "\r", "\x1b[1;", "\x1b]a", "\x1b[31m", "\u202e"):
        text = piece * (1_000_000 // len(piece))
        assert not LIVE.search(COLOUR.sub("", clean(text))) and not LIVE.search(COLOUR.sub("", guarded(text)))


def test_lines_of_a_process_and_a_drawn_view_pass_the_same_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    for text in texts(3, 2_000):
        for stream in (io.StringIO(), Screen()):
            echo = Echo(stream, ["actor"], [0])
            echo.line("actor", text)
            assert not LIVE.search(COLOUR.sub("", stream.getvalue())), text
        screen = Screen()
        echo = Echo(screen, ["actor"], [0])
        for byte in text.encode(errors="surrogatepass"):  # also in the middle of characters
            echo.raw(bytes([byte]))
        assert not LIVE.search(DRAWN.sub("", screen.getvalue())), text
    screen = Screen()
    drawn = "\r\x1b[2K\x1b[1A\x1b[2K\x1b[?25l\x1b[38;5;197mé\x1b[0m\x1b[38;2;1;2;3m\x1b[?25h\n"
    Echo(screen, ["actor"], [0]).raw(drawn.encode() + b"\x1b[2J\x1b[10;1H\x1b]0;x\x07")
    assert screen.getvalue() == drawn


def test_names_of_fields_are_shown_escaped() -> None:
    counts = {"num_records": 1, "num_kept": 1, "num_too_long": 0, "num_truncated": 0, "num_bad": 0}
    unused = {"note": 2, "\x1b[2J\x1b]0;T\x07": 1, "a\n[run] done": 1, "\x9b2J\u202e\ud800": 1, "k" * 9999: 1}
    report = LoadReport(location="d.jsonl", too_long=(), problems=(), unused=unused, **counts)
    shown = report.summary().split("\n")
    assert len(shown) == 2 and "d.jsonl: fields that are not used: note (2 records), \\x1b[2J\\x1b]0;T\\x07 (1 records), " in shown[1]
    assert "a\\n[run] done (1 records), \\x9b2J\\u202e\\ud800 (1 records), kkk" in shown[1] and len(shown[1]) < 400


@pytest.mark.parametrize("progress", [Progress.plain, Progress.live])
def test_notes_phases_and_prints_beside_a_view(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, hostile = io.StringIO(), "\x1b[\x002J\x1b]0;T\x07\x9b2J\u202e\x08\x1b[8m\ud800"
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    view = open_view(LoggingConfig(progress=progress), columns=(), title=hostile, total_steps=2, start_step=0, stream=stream)
    view.note(f"note {hostile}")
    view.log(1, {f"time/{hostile}": 1.0, "time/step": 1.0})
    if progress is Progress.live:
        for _ in range(2):
            print(f"print {hostile}")
        print(f"x\x1b[1A\x1b[2Kovertyped {hostile}", file=sys.stderr)
    view.close()
    shown = stream.getvalue()
    assert "note" in shown and not LIVE.search(DRAWN.sub("", shown))
    if progress is Progress.live:
        assert "print [2J" in shown and "xovertyped" in shown


PROGRAM = """
import sys
from aligner.telemetry import terminal
terminal.guard(); terminal.guard()
print("a\\x1b[2J", "\\x1b[31mb\\x1b[0m", "\\ud800", flush=True)
sys.stderr.write("\\x9b2Jc\\n"); sys.stdout.writelines(["d\\x1b]0;", "x\\x07\\n"])
assert sys.stdout.fileno() == 1 and sys.stdout.encoding and not sys.stdout.isatty()
raise ValueError("\\x1b[2J\\u202e")
"""


def test_prints_and_tracebacks_of_a_guarded_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, encoding="utf-8", cwd=ROOT, timeout=120)
    assert done.stdout == "a \x1b[31mb\x1b[0m \ufffd\nd\n"
    assert done.stderr.startswith("2Jc\n") and done.stderr.endswith("ValueError: \n") and not LIVE.search(done.stderr)
    assert terminal.unguarded(Guarded(Guarded(sys.stderr))) is terminal.unguarded(sys.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "validate", "--kind", "sft", "{file}", "--tokenizer", "{digits}"),
        ("data", "validate", "--kind", "\x1b[2J", "{file}"),
        ("data", "inspect", "{file}"),
        ("train", "sft", "model.path=\x1b[\x1b[2J2J", "x\x9by=1"),
        ("no\x1b]0;T\x07such",),
        ("report", "run\x1b[8m\u202e"),
    ],
)
def test_commands_on_a_terminal(arguments: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    lines = [f'{{"prompt": "{number}+1=", "response": "2", "{key}": 1}}' for number, key in enumerate(HOSTILE_NAMES)]
    file.write_text("\n".join([*lines, '{"prompt": 1, "\\u001b[2J": 1}', '{"\\u001b[2J'.replace("\\u001b", "\x1b")]) + "\n")
    filled = [one.replace("{file}", str(file)).replace("{digits}", str(DIGITS)) for one in arguments]
    _, shown = on_a_terminal(filled, ROOT)
    assert shown and not LIVE.search(COLOUR.sub("", shown)), shown
    if "{file}" in arguments and "\x1b[2J" not in arguments:
        assert "\\x1b[2J\\x1b]0;T\\x07 (1 records)" in shown, shown


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "aligner.cluster.slurm", "--config", "x", "--script", "y", "--no\x1b[2J\u202esuch=1"),  # into Slurm's .out
        ("-m", "aligner.commands.slurm", "1", "sft", "no\x1b[\x1b[2J2J\u202esuch=1"),
        ("examples/nlp/train_sft.py", "no\x1b[2J\u202esuch=1"),
    ],
)
def test_programs_beside_the_command(command: tuple[str, ...]) -> None:
    code, shown = preloaded().run(command, dict(os.environ), ROOT, timeout=300)
    assert code == 2 and "such" in shown and not LIVE.search(shown), shown


def test_lines_of_a_log_that_the_conductor_repeats(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    log = "".join(f"{text}\n" for text in ATTACKS).encode(errors="surrogatepass")
    run.log("actor", 0).write_bytes(log)
    lines = Place.last_lines(SimpleNamespace(run=run), SimpleNamespace(name="actor"), 0, 1000)  # type: ignore[arg-type]
    assert len(lines) > len(ATTACKS) and not LIVE.search("".join(lines))
