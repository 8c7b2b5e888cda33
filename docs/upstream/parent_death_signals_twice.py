"""Several SIGTERMs at once may leave a llama-server that never ends.

    python parent_death_signals_twice.py 100 llama-server -m /MODEL.gguf --port 8080

With prctl(PR_SET_PDEATHSIG, SIGTERM) the kernel signals once for each thread of the dying parent that
was the child's parent for a moment, so two or three SIGTERMs arrive within microseconds. llama-server's
handler calls exit() at the second one; a third one in another thread does the same, and the two wait for
each other for ever. Expected: the process ends. Seen: about 2 of 140 tries hang, with both threads in
exit(). _exit() in the handler, or a flag that the main loop reads, would do. Whoever sets a parent-death
signal should set SIGKILL.

Exit status: 0 if the defect shows, 1 if not.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.request

END_SECONDS, TGKILL = 10.0, 234  # x86-64


def start(command: list[str]) -> subprocess.Popen:
    port = command[command.index("--port") + 1]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return process
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{command[0]} ended with {process.returncode}")


def ends(process: subprocess.Popen) -> bool:
    """Send the signals to three threads, as the kernel may; return whether the process ends."""
    libc = ctypes.CDLL(None)
    threads = [int(name) for name in os.listdir(f"/proc/{process.pid}/task")][:3]
    for thread in (threads * 3)[:3]:
        libc.syscall(TGKILL, process.pid, thread, signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
        return True
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def main() -> int:
    n_tries, command = int(sys.argv[1]), sys.argv[2:]
    n_hung = sum(not ends(start(command)) for _ in range(n_tries))
    print(f"{n_hung} of {n_tries} did not end within {END_SECONDS:.0f} s")
    return 0 if n_hung else 1


if __name__ == "__main__":
    sys.exit(main())
