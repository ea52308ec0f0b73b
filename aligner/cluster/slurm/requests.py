"""Records signals to the batch script: clean stop (SIGUSR1, before the time limit), or end of the job."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequests:
    """Installed for the life of the process. `--signal=B:USR1@...` sends SIGUSR1; scancel, preemption and the time limit send SIGTERM."""

    def __init__(self) -> None:
        self.stop = False
        self.terminate = False

    def install(self) -> None:
        """From the main thread, before anything is started."""
        signal.signal(signal.SIGUSR1, self._stop)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._terminate)

    @property
    def any(self) -> bool:
        return self.stop or self.terminate

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.terminate = True
