"""Asks the kernel to kill llama-server should the proxy be killed, then becomes llama-server.

It is a program of its own and imports nothing of the proxy: Python's `preexec_fn` would run this code in a
copy of a process with threads, where it could hang. Usage: guard.py PROXY_PID COMMAND...
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""prctl(2). The kernel sends the signal when the thread that started us ends (the proxy's main thread), and
again when the thread ends that the kernel has made our parent instead.

So the signal is SIGKILL: llama-server's handler of a second SIGTERM calls exit(), and two threads in exit()
wait for each other for ever. llama-server has nothing of its own to save.
"""


def main() -> None:
    proxy_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != proxy_pid:  # the proxy was killed before the call
            sys.exit(1)
    # Python ignores SIGPIPE, and exec keeps that: llama-server goes on if its log is no longer read.
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
