"""Becomes llama-server, once the kernel is asked to end it should the proxy be killed.

A file of its own that imports nothing of the proxy, because it runs alone: Python's `preexec_fn` would
run it in a copy of a process with threads, where it could hang. Usage: guard.py PROXY_PID COMMAND...
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""prctl(2). The signal is sent when the thread that started us ends, the proxy's main thread, and again
when another one ends that the kernel has made our parent instead.

SIGKILL, therefore: llama-server calls exit() in its handler of a second SIGTERM, and two threads that do
wait for each other for ever. It has nothing of its own to save.
"""


def main() -> None:
    proxy_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != proxy_pid:  # it was killed before that
            sys.exit(1)
    # Python ignores SIGPIPE, and exec keeps that: llama-server goes on when nobody reads its log any more.
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
