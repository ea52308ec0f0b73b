"""`aligner chat`: a conversation with a policy in a terminal, or with lines of standard input; with two policies side by side."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aligner.commands.generate import is_chat, sampling_of
from aligner.commands.parts import ChatOptions
from aligner.data.encoding import PromptStyle, encode_prompt, with_begin
from aligner.data.messages import Message
from aligner.endpoint.text import Decoder
from aligner.errors import AlignerError, ConfigError
from aligner.jobs.serving_policy import OpenPolicy, open_policy
from aligner.online.collect import sample_seeds
from aligner.rollout.engine import GenResult
from aligner.rollout.live import LiveRequest
from aligner.telemetry.terminal import Guarded, clean
from aligner.types import FinishReason, SamplingConfig

HELP = "/reset: forget the conversation; /system TEXT: another system message; /quit; Ctrl-C stops an answer, Ctrl-D ends"
LEAST_COLUMNS = 100  # of a terminal that shows two answers side by side
POLL_SECONDS = 0.02  # of an answer
_HALF = "\N{REPLACEMENT CHARACTER}"  # of a character whose other tokens never came


@dataclass
class Talk:
    """One policy's side of a conversation. Without a chat template, it continues the text of all turns."""

    policy: OpenPolicy
    chats: bool
    sampling: SamplingConfig
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    text: str = ""  # the answer so far, in whole characters

    def ask(self, text: str, seed: int) -> Future[GenResult]:
        """Begin to answer. Raises AlignerError for a conversation that leaves no room."""
        self.turns.append(Message(role="user", content=text))
        prompt = tuple(self._tokens())
        pieces: queue.SimpleQueue[Sequence[int] | None] = queue.SimpleQueue()  # the answer's next ids; None: its end
        self.text, self._decoder, self._pieces = "", Decoder(self.policy.tokenizer, prompt), pieces
        told = LiveRequest(tokens=prompt, seed=seed, sampling=self.sampling, on_tokens=lambda ids, *_: pieces.put(ids))
        answer = self.policy.live.submit(told)
        answer.add_done_callback(lambda _: pieces.put(None))
        return answer

    def take(self, stopped: threading.Event) -> bool:
        """Wait a moment for the next tokens; whether more may come. Raises KeyboardInterrupt once it is `stopped`."""
        if stopped.is_set():
            raise KeyboardInterrupt
        with suppress(queue.Empty):
            ids = self._pieces.get(timeout=POLL_SECONDS)
            self.text += self._decoder.feed(ids or (), last=ids is None).rstrip(_HALF)
            return ids is not None
        return True

    def _tokens(self) -> list[int]:
        tokenizer = self.policy.tokenizer
        if self.chats:
            system = (Message(role="system", content=self.system),) if self.system else ()
            return encode_prompt(tokenizer, (*system, *self.turns), PromptStyle(apply_chat_template=True))
        text = "".join(turn.content + ("\n" if turn.role == "assistant" else "") for turn in self.turns)
        return with_begin(tokenizer, tokenizer.encode(text, plain=True), PromptStyle(apply_chat_template=False))


class Keyboard:
    """Lines of standard input, and Ctrl-C: an exception while a line is waited for, once a line; `stopped` at any other time, because an
    exception could come where nothing handles it."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._waits = False

    def __enter__(self) -> Keyboard:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, *_: object) -> None:
        if self._waits:
            self._waits = False
            raise KeyboardInterrupt
        self.stopped.set()

    def lines(self) -> Iterator[str]:
        """What the user types, line by line; Ctrl-C begins a new one."""
        shows = sys.stdin.isatty()
        while True:
            self.stopped.clear()
            try:
                self._waits = True
                line = input("> ") if shows else sys.stdin.readline()
                self._waits = False
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            if not shows and not line:
                return
            if line.strip():
                yield line.strip("\r\n")


def chat(model: str, options: ChatOptions) -> int:
    """Talk until the input ends. Raises ConfigError for a model that cannot be used."""
    sampling = sampling_of(options)
    with ExitStack() as stack:
        talks = []
        for name in filter(None, (model, options.against)):
            policy = stack.enter_context(open_policy(name, max_batch_size=1, seed=options.seed))
            talks.append(Talk(policy, is_chat(policy.tokenizer, options), sampling))
        _set_system(talks, options.system)
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  edits lines of `input`
            for talk in talks:
                print(f"{talk.policy.name}: {'its chat template' if talk.chats else 'no chat template: it continues your text'}")
            print(HELP)
        keyboard = stack.enter_context(Keyboard())
        for turn, text in enumerate(keyboard.lines()):
            try:
                if text.startswith("/"):
                    if not _command(talks, text):
                        break
                else:
                    _answer(talks, text, sample_seeds(options.seed, turn, 1)[0], keyboard.stopped)
            except AlignerError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
    return 0


def _command(talks: Sequence[Talk], text: str) -> bool:
    """Do what a line that begins with / says; whether the conversation continues."""
    name, _, rest = text.partition(" ")
    if name == "/quit":
        return False
    if name == "/system":
        _set_system(talks, rest.strip())
    elif name != "/reset":
        raise ConfigError(f"{name}: no such command. {HELP}")
    for talk in talks:
        talk.turns.clear()
    return True


def _set_system(talks: Sequence[Talk], text: str) -> None:
    if text and (plain := [talk.policy.name for talk in talks if not talk.chats]):
        raise ConfigError(f"a system message needs a chat template, which {plain[0]} does not have or use")
    for talk in talks:
        talk.system = text


def _answer(talks: Sequence[Talk], text: str, seed: int, stopped: threading.Event) -> None:
    """Show the answers as they come, until they are `stopped`. Raises AlignerError, with the conversation as it was, if a policy cannot
    answer."""
    asked: list[Future[GenResult]] = []
    is_wide = len(talks) > 1 and sys.stdout.isatty() and Console().width >= LEAST_COLUMNS
    length = len(talks[0].turns)
    try:
        for talk in talks:
            asked.append(talk.ask(text, seed))
        (_columns if is_wide else _one_by_one)(talks, stopped)
        cut = [one.policy.name for one, found in zip(talks, asked, strict=True) if found.result().finish_reason is FinishReason.length]
        print(*(f"[{name}: cut at its most tokens]\n" for name in cut), sep="", end="", flush=True)
    except KeyboardInterrupt:
        print("\n[stopped]", flush=True)
    except AlignerError:
        for talk in talks:
            del talk.turns[length:]
        raise
    finally:
        for answer in asked:
            answer.cancel()
    for talk in talks:
        talk.turns[length + 1 :] = [Message(role="assistant", content=talk.text)]


def _one_by_one(talks: Sequence[Talk], stopped: threading.Event) -> None:
    for talk in talks:
        if len(talks) > 1:
            print(f"[{talk.policy.name}]", flush=True)
        shown, has_more = 0, True
        while has_more:
            has_more = talk.take(stopped)
            print(talk.text[shown:], end="", flush=True)
            shown = len(talk.text)
        print(flush=True)


def _columns(talks: Sequence[Talk], stopped: threading.Event) -> None:
    """Both at once while they are short enough for the screen, then whole."""
    console = Console(file=cast(TextIO, Guarded(sys.stdout, drawn=True)), highlight=False)

    def table() -> Table:
        found = Table(expand=True, box=None, padding=(0, 1))
        for talk in talks:
            found.add_column(Text(clean(talk.policy.name)), ratio=1)
        found.add_row(*(Text(clean(talk.text)) for talk in talks))
        return found

    running = list(talks)
    with Live(table(), console=console, transient=True, vertical_overflow="crop", auto_refresh=False) as live:
        while running:
            running = [talk for talk in running if talk.take(stopped)]
            live.update(table(), refresh=True)
    console.print(table())
