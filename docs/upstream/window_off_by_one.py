"""A saved sliding window cannot be continued: its gate misses by one cell.

Start any sliding-window model (Gemma, gpt-oss) with a window below 2,200 tokens:
    llama-server -m MODEL.gguf -c 8192 -np 1 --cache-ram 0 -fa on --slot-save-path DIR
    python window_off_by_one.py http://127.0.0.1:8080 [DIR]

A state of 2,200 tokens is saved, the slot erased, the state restored, and the prompt continued by 100
tokens. Expected: 100 tokens are evaluated. Seen from b9538 to b11063: all 2,300. llama-server saves the
cells from n_tokens - n_swa on, and the server asks for one position further back (server-context.cpp,
`pos_min >= pos_min_thold`). With DIR the file is repaired and restored again: the lowest cell, which is
masked for every later token, is moved one position down (needs llama-prefix-cache).

Exit status: 0 if the defect shows, 1 if not.
"""

import json
import sys
import urllib.request
from pathlib import Path

NAME, N_STATE, N_MORE = "window-off-by-one.bin", 2200, 100


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def evaluate(server: str, n_tokens: int) -> dict:
    prompt = [(7919 * i) % 900 + 50 for i in range(n_tokens)]
    body = {"prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": True}
    return post(f"{server}/completion", body)["timings"]


def continued(server: str) -> int:
    """Return how many tokens a restored state spares its continuation."""
    post(f"{server}/slots/0?action=erase", {})
    post(f"{server}/slots/0?action=restore", {"filename": NAME})
    return evaluate(server, N_STATE + N_MORE)["cache_n"]


def main() -> int:
    server, *folder = sys.argv[1:]
    evaluate(server, N_STATE)
    post(f"{server}/slots/0?action=save", {"filename": NAME})
    n_reused = continued(server)
    print(f"restored {N_STATE} tokens, reused {n_reused} of them")
    if folder and n_reused == 0:
        from proxy.llama.state_edits import repair_window

        repair_window(Path(folder[0], NAME))
        print(f"with the lowest cell one position lower: reused {continued(server)}")
    return 0 if n_reused == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
