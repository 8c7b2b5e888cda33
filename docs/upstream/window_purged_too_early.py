"""A prompt that goes back inside its slot's sliding window gets other answers than the same prompt alone.

Start a sliding-window model (Gemma, gpt-oss) whose window is 512 tokens long, with the default batches:
    llama-server -m MODEL.gguf -c 8192 -np 1 --cache-ram 0 -ub 512 -b 2048
    python window_purged_too_early.py http://127.0.0.1:8080

3,100 tokens are evaluated; then the same prompt with its last 300 tokens replaced by 1,100 others, once in
that slot and once from nothing. Expected: the same log-probabilities, up to rounding. Seen: 0.17 to 0.46
apart. The cells of the window are not in order of position any more after the cut. While `prepare` looks
for cells for all three batches, `apply_ubatch` drops every position below the cells that it overwrites, and
these are not put back (llama-kv-cache.cpp): the first batch then lacks part of its window. A restored slot
file and a restored context checkpoint have the same fault: their cells come back as they lay in the ring.
See llama.cpp#25297.

Exit status: 0 if the defect shows, 1 if not.
"""

import json
import random
import sys
import urllib.request

N_FIRST, N_BACK, N_MORE = 3100, 300, 1100
ROUNDING = 0.05


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def complete(server: str, prompt: list[int], **fields: object) -> dict:
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 10, "id_slot": 0}
    return post(f"{server}/completion", body | fields)


def log_probabilities(reply: dict) -> dict[int, float]:
    first = reply["completion_probabilities"][0]["top_logprobs"]
    return {top["id"]: top["logprob"] for top in first}


def main() -> int:
    server, chance = sys.argv[1], random.Random(1)
    first = [chance.randrange(100, 3000) for _ in range(N_FIRST)]
    more = [chance.randrange(100, 3000) for _ in range(N_MORE)]
    second = first[:-N_BACK] + more
    complete(server, first)
    in_slot = complete(server, second)
    alone = complete(server, second, cache_prompt=False)
    here, there = log_probabilities(in_slot), log_probabilities(alone)
    apart = max(abs(here[token] - there[token]) for token in here.keys() & there.keys())
    n_reused = in_slot["timings"]["cache_n"]
    print(f"reused {n_reused} tokens; log-probabilities are {apart:.3f} apart")
    return 0 if n_reused and apart > ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
