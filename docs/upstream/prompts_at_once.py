"""Two prompts that are evaluated at the same time on a hybrid model: one of the answers is wrong.

Start a model with gated delta nets (Qwen3.5, Qwen3-Next) with two slots:
    llama-server -m MODEL.gguf -c 16384 -np 2 --cache-ram 0
    python prompts_at_once.py http://127.0.0.1:8080

Two prompts of 1,500 and 700 tokens are evaluated one after the other, each in its slot, then at the same
time. Expected: the same log-probabilities. Seen: those of slot 0 are the same, to the last bit; slot 1 has
another distribution altogether. One physical batch then has several tokens of each of two sequences. A
prompt beside a slot that generates is answered rightly: their batch has one token of each. `--kv-unified`
and smaller batches change nothing; builds up to b11063 have no such defect.

Exit status: 0 if the defect shows, 1 if not.
"""

import json
import random
import sys
import threading
import urllib.request

LENGTHS = (1500, 700)
N_TRIALS = 5
ROUNDING = 0.05


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def log_probabilities(server: str, slot: int, prompt: list[int]) -> dict[int, float]:
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 10, "id_slot": slot}
    reply = post(f"{server}/completion", body | {"cache_prompt": False})
    return {t["id"]: t["logprob"] for t in reply["completion_probabilities"][0]["top_logprobs"]}


def apart(left: dict[int, float], right: dict[int, float]) -> float:
    """Return the largest difference of a log-probability; 99 if few tokens are likely in both."""
    common = left.keys() & right.keys()
    return max(abs(left[t] - right[t]) for t in common) if len(common) >= 8 else 99.0


def main() -> int:
    server, chance = sys.argv[1], random.Random(1)
    prompts = [[chance.randrange(100, 3000) for _ in range(n)] for n in LENGTHS]
    alone = [log_probabilities(server, slot, prompt) for slot, prompt in enumerate(prompts)]
    furthest = 0.0
    found: dict[int, dict[int, float]] = {}

    def ask(slot: int) -> None:
        found[slot] = log_probabilities(server, slot, prompts[slot])

    for _ in range(N_TRIALS):
        threads = [threading.Thread(target=ask, args=(slot,)) for slot in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        furthest = max(furthest, *(apart(found[slot], alone[slot]) for slot in (0, 1)))
    print(f"at the same time: up to {furthest:.3f} from one after the other")
    return 0 if furthest > ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
