"""Signals: the first one asks to finish, every further one to hurry."""

import asyncio
import signal

from proxy.log import get_logger

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """Tells when to stop; owns the handlers of SIGINT, SIGTERM and SIGHUP.

    Further signals cancel the task that made this, once each: what is waited for then is cut short, and
    the next step of the shutdown begins.
    """

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            # SIGHUP is ignored at nohup's wish; SIGINT merely for shells that start us with an "&".
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._tell)

    def _tell(self) -> None:
        if not self.told.is_set():
            self.told.set()
        elif self._task is not None:
            get_logger("main").warning("told again: not waiting any longer")
            self._task.cancel()
