"""After about ten tool calls the start of the turn is lost.

Start a hybrid or recurrent model (Qwen3.5, Mamba):
    llama-server -m MODEL.gguf -c 16384 -np 1 --cache-ram 0
    python turn_start_dropped.py http://127.0.0.1:8080

A turn of 2,000 tokens is followed by tool calls, each a request that goes on from the one before. Then a
new user message drops the turn's reasoning, as the templates of Qwen3.5, gpt-oss and others do, so the
prompt goes back to the turn's start. Expected: the turn's start is reused, however many calls there
were. Seen: context checkpoints go oldest first (--ctx-checkpoints, 32), each request adds two or three,
and after 6 calls all tokens are reused, after 20 calls fewer. Keeping the first one behind the newest
user message would do.

Exit status: 0 if the defect shows, 1 if not.
"""

import json
import sys
import urllib.request

N_TURN, N_CALL, N_SLACK = 2000, 40, 16


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def reused(server: str, prompt: list[int]) -> int:
    body = {"prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": True}
    return post(f"{server}/completion", body)["timings"]["cache_n"]


def tokens(seed: int, n_tokens: int) -> list[int]:
    return [(7919 * (i + 1) * seed) % 887 + 50 for i in range(n_tokens)]


def after_calls(server: str, n_calls: int, seed: int) -> int:
    """Return how much of the turn is reused once its calls are dropped."""
    turn = tokens(seed, N_TURN)
    prompt = list(turn)
    reused(server, prompt)
    for call in range(n_calls):
        prompt += tokens(seed + call + 1, N_CALL)
        reused(server, prompt)
    return reused(server, turn + tokens(seed + 500, N_CALL))


def main() -> int:
    server = sys.argv[1]
    few, many = after_calls(server, 6, 1000), after_calls(server, 20, 2000)
    print(f"of {N_TURN} tokens are reused: after 6 calls {few}, after 20 calls {many}")
    return 0 if few >= N_TURN - N_SLACK > many else 1


if __name__ == "__main__":
    sys.exit(main())
