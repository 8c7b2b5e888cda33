"""Several completions of one prompt overwrite a state that is restored after them: wrong logits.

Start any model that is not purely recurrent:
    llama-server -m MODEL.gguf -c 16384 -np 2 --slot-save-path DIR
    python late_copy_overwrites_restore.py http://127.0.0.1:8080

A prompt is evaluated in a slot and saved. A request for two completions (`n_cmpl`) of another prompt
follows, one token each. Then the saved state is restored, and its prompt goes on. *File* restores with
POST /slots; *RAM* lets llama-server restore from its own --cache-ram. Expected: the answer of an empty
slot. Seen: log-probabilities that have nothing to do with the prompt.

The slot of the first completion is copied to that of the second by llama_memory_seq_cp
(server_slot::copy_state_to). Between streams, llama_kv_cache::seq_cp copies the cells at once, but only
schedules the copy of K and V (sc_info) for the next decode (llama.cpp#14363). If each completion is one
token, or the client hangs up, there is no decode until the next request: a state that is restored meanwhile
is copied over. With --kv-unified there is one stream, and no such copy.

Exit status: 0 if the defect shows, 1 if not.
"""

import json
import sys
import urllib.request

LEAST = 0.1
"""Rounding alone moves a log-probability by up to 0.01."""


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def words(seed: int, n_tokens: int) -> list[int]:
    """Return tokens that begin with others for each seed."""
    return [50 + seed + (i * (31 + 2 * seed) + i // 30) % 800 for i in range(n_tokens)]


def ask(server: str, prompt: list[int], **fields: object) -> tuple[int, dict[int, float]]:
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 10, **fields}
    reply = post(f"{server}/completion", body)
    top = reply["completion_probabilities"][0]["top_logprobs"]
    return reply["timings"]["cache_n"], {t["id"]: t["logprob"] for t in top}


def several(server: str, seed: int) -> None:
    body = {"prompt": words(seed, 2000), "n_predict": 1, "n_cmpl": 2, "cache_prompt": False}
    post(f"{server}/completion", body)


def is_wrong(name: str, restored: tuple[int, dict], fresh: tuple[int, dict]) -> bool:
    away = max((abs(restored[1][t] - fresh[1].get(t, 0.0)) for t in restored[1]), default=99.0)
    print(f"{name}: {restored[0]} reused; log-probabilities differ by up to {away:.3f}")
    return away > LEAST


def from_file(server: str, prompt: list[int], slot: int) -> tuple[int, dict[int, float]]:
    ask(server, prompt[:1200], id_slot=slot)
    post(f"{server}/slots/{slot}?action=save", {"filename": "late-copy.bin"})
    several(server, 3)
    post(f"{server}/slots/{slot}?action=restore", {"filename": "late-copy.bin"})
    return ask(server, prompt, id_slot=slot)


def from_ram(server: str, prompt: list[int]) -> tuple[int, dict[int, float]]:
    ask(server, prompt[:1200])
    for seed in (4, 5, 6):
        ask(server, words(seed, 600))  # llama-server moves the first prompt to its RAM
    several(server, 7)
    return ask(server, prompt)


def main() -> int:
    server, prompt = sys.argv[1], words(1, 1280)
    fresh = ask(server, prompt, id_slot=0, cache_prompt=False)
    post(f"{server}/slots/0?action=erase", {})
    found = [is_wrong(f"file, slot {i}", from_file(server, prompt, i), fresh) for i in (0, 1)]
    found.append(is_wrong("RAM", from_ram(server, prompt), fresh))
    return 0 if any(found) else 1


if __name__ == "__main__":
    sys.exit(main())
