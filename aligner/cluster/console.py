"""Streams the ranks' output: raw into their log files, in whole prefixed lines (of a live view, byte by byte) to our output."""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import pty
import selectors
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from aligner.cluster.component import Component
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import LaunchError, describe_os_error
from aligner.telemetry.terminal import Guarded, clean, plain, unguarded

_MAX_LINE_BYTES = 64 * 1024
_COLOURS = ("36", "35", "33", "32", "34", "96", "95", "93")  # ANSI foreground colours, one per component in turn
_NOTE_COLOUR = "1"


class LineAssembler:
    """Cuts a byte stream into lines; a line redrawn with carriage returns (progress bars) keeps its last state."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completed. An unterminated line is passed on after 64 KiB to bound memory."""
        *complete, pending = (self._pending + data).split(b"\n")
        pending = pending[pending.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(pending) > _MAX_LINE_BYTES:
            complete.append(pending)
            pending = b""
        self._pending = pending
        return [self._text(line) for line in complete]

    def flush(self) -> list[str]:
        """The unterminated rest at the end of the stream."""
        rest, self._pending = self._pending, b""
        return [self._text(rest)] if rest else []

    @staticmethod
    def _text(line: bytes) -> str:
        return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class Echo:
    """Writes prefixed lines, in colours on a terminal without NO_COLOR. If its reader leaves (`launch | head`), the run continues."""

    def __init__(self, stream: TextIO, prefixes: Sequence[str], groups: Sequence[int]) -> None:
        """`prefixes[i]` is shown in the colour of `groups[i]` (the component's number)."""
        self._stream = unguarded(stream)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drawing = Guarded(self._stream, drawn=True)
        self._colour = stream.isatty() and not os.environ.get("NO_COLOR")
        width = max(len(prefix) for prefix in (*prefixes, "run"))
        self._width = width + 2
        self._colours = {prefix: _COLOURS[group % len(_COLOURS)] for prefix, group in zip(prefixes, groups, strict=True)}
        self.closed = False

    def line(self, prefix: str, text: str) -> None:
        """One line of the process called `prefix`."""
        label = f"[{prefix}]".ljust(self._width)
        if self._colour:
            text = clean(text)
            reset = "\x1b[0m" if "\x1b" in text else ""
            self._write(f"\x1b[{self._colours.get(prefix, _NOTE_COLOUR)}m{label}\x1b[0m {text}{reset}\n")
        else:
            self._write(f"{label} {plain(text)}\n")

    def raw(self, data: bytes) -> None:
        """Pass on the bytes of a process that draws the whole terminal itself, limited to what a live view draws with."""
        self._write(self._decoder.decode(data), self._drawing)

    def _write(self, text: str, stream: TextIO | Guarded | None = None) -> None:
        if self.closed:
            return
        try:
            (stream or self._stream).write(text)
            self._stream.flush()
        except BrokenPipeError:
            self.closed = True


_READ_BYTES = 1 << 16
_KEPT_LINES = 200
_DEFAULT_TERMINAL = (40, 120)  # rows, columns if the terminal does not report them


class LogFile:
    """An append-only file; a full disk costs data and one call of `warn`, never the run. Raises LaunchError if it cannot be opened."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._is_whole = True
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise LaunchError(describe_os_error(error, path)) from error

    def write(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            if self._is_whole:
                self._is_whole = False
                self._warn(f"warning: {describe_os_error(error, self._path)}; the log lacks lines, the run continues")

    def close(self) -> None:
        self._file.close()


class Channel:
    """The reading end of one rank's stdout and stderr."""

    def __init__(self, prefix: str, log_path: Path, reader: int, draws: bool, warn: Callable[[str], None]) -> None:
        self.prefix = prefix
        self.log_path = log_path
        self.reader = reader
        self.draws = draws  # the rank draws on the terminal itself
        self.lines = LineAssembler()
        self.tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self.log = LogFile(log_path, warn)

    def last_lines(self, count: int) -> list[str]:
        """The last `count` lines, without colours."""
        return [plain(line) for line in self.tail][-count:]


class Console:
    """Context manager that owns the channels of all ranks; single-threaded, so lines never mix."""

    def __init__(self, components: Sequence[Component], run_directory: RunDirectory, stream: TextIO) -> None:
        ranks = [(c.prefix(rank), i) for i, c in enumerate(components) for rank in range(c.num_processes)]
        self._echo = Echo(stream, [prefix for prefix, _ in ranks], [i for _, i in ranks])
        self._terminal = stream.fileno() if stream.isatty() else None
        self._drawn = self._terminal is not None and any(component.terminal for component in components)
        self._selector = selectors.DefaultSelector()
        self._open: list[Channel] = []
        self.log = run_directory.logs / "launcher.log"
        self._warn = partial(self._echo.line, "run")
        self._notes = LogFile(self.log, self._warn)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in list(self._open):
            self.drain(channel)
        for channel in list(self._open):  # pipes that a process still holds
            self._close(channel)
        self._selector.close()
        self._notes.close()

    def note(self, text: str) -> None:
        """A line of the launcher itself."""
        self._notes.write(f"{plain(text)}\n".encode())
        if not self._drawn:
            self._warn(text)

    def drawing_ended(self) -> None:
        """Show lines again: the rank that drew on the terminal is gone."""
        self._drawn = False

    def open_channel(self, component: Component, rank: int, log_path: Path) -> tuple[Channel, int]:
        """A channel and the writing end for the rank's stdout and stderr (the caller closes it once the rank has it)."""
        draws = component.terminal and rank == 0 and self._terminal is not None
        reader, writer = self._open_terminal() if draws else os.pipe()
        os.set_blocking(reader, False)
        channel = Channel(component.prefix(rank), log_path, reader, draws, self._warn)
        self._selector.register(reader, selectors.EVENT_READ, channel)
        self._open.append(channel)
        return channel, writer

    def _open_terminal(self) -> tuple[int, int]:
        """A pseudo-terminal of our terminal's size: the rank sees a terminal, and its output is still logged."""
        rows, columns = _DEFAULT_TERMINAL
        size = fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, b"\0" * 8)
        if any(struct.unpack("HHHH", size)[:2]):
            rows, columns = struct.unpack("HHHH", size)[:2]
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        attributes = termios.tcgetattr(writer)
        attributes[1] &= ~termios.OPOST  # our own terminal translates line ends already
        termios.tcsetattr(writer, termios.TCSANOW, attributes)
        return reader, writer

    def pump(self, seconds: float) -> None:
        """Wait at most `seconds` for output and pass it on."""
        for key, _ in self._selector.select(seconds):
            self._read(key.data)

    def drain(self, channel: Channel) -> None:
        """Pass on everything in the pipe. Called when a rank ended (its descendants may hold the pipe open)."""
        while channel in self._open and self._read(channel):
            pass
        self._show(channel, channel.lines.flush())

    def _read(self, channel: Channel) -> bool:
        """Read once; False if there is no data. Closes the channel at the end of the stream."""
        try:
            data = os.read(channel.reader, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:  # how Linux reports that the last writer of a pseudo-terminal left
                raise
            data = b""
        if not data:
            self._show(channel, channel.lines.flush())
            self._close(channel)
            return False
        channel.log.write(data)
        if channel.draws:
            self._echo.raw(data)
        self._show(channel, channel.lines.feed(data))
        return True

    def _show(self, channel: Channel, lines: list[str]) -> None:
        channel.tail.extend(lines)
        if not self._drawn:
            for line in lines:
                self._echo.line(channel.prefix, line)

    def _close(self, channel: Channel) -> None:
        self._selector.unregister(channel.reader)
        os.close(channel.reader)
        channel.log.close()
        self._open.remove(channel)
