"""A prompt that is evaluated while another slot runs, on a CPU with AMX: the answer is wrong.

Start a model with gated delta nets (Qwen3.5, Qwen3-Next) with two slots, on the CPU:
    llama-server -m MODEL.gguf -c 16384 -np 2 --cache-ram 0
    python prompts_at_once.py http://127.0.0.1:8080

Two prompts of 1,500 and 700 tokens are evaluated one after the other, each in its slot, then at the same
time, and then the second while the first slot generates. Expected: the same log-probabilities, but for
rounding. Seen: slot 1 has another distribution altogether. These models multiply weights by a tensor of
three dimensions (embedding, token, sequence). ggml_backend_amx_mul_mat (ggml-cpu/amx/mmq.cpp) takes the
weights of the second sequence from behind the end of the weights: ggml_batch_offset(src0, ...) does not
broadcast a src0 whose ne[2] is 1. Such a read can also end the process. With --no-repack, which keeps the
weights out of AMX buffers, all is right, and so it is on CPUs without AMX.

Exit status: 0 if the defect shows, 1 if not.
"""

import json
import random
import sys
import threading
import urllib.request

LENGTHS = (1500, 700)
N_TRIALS = 5
N_GENERATED = 300
ROUNDING = 0.05


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def log_probabilities(
    server: str, slot: int, prompt: list[int], n_more: int = 1
) -> dict[int, float]:
    body = {"prompt": prompt, "n_predict": n_more, "temperature": 0, "n_probs": 10, "id_slot": slot}
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

    def ask(slot: int, n_more: int) -> None:
        found[slot] = log_probabilities(server, slot, prompts[slot], n_more)

    for n_generated in [1] * N_TRIALS + [N_GENERATED] * N_TRIALS:
        first = threading.Thread(target=ask, args=(0, n_generated))
        first.start()
        ask(1, 1)
        first.join()
        furthest = max(furthest, *(apart(found[slot], alone[slot]) for slot in (0, 1)))
    print(f"at the same time: up to {furthest:.3f} from one after the other")
    return 0 if furthest > ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
