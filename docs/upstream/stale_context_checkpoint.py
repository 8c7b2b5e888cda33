"""A prompt is answered from a context checkpoint of other tokens: wrong logits.

Start any sliding-window, hybrid or recurrent model (Gemma, gpt-oss, Qwen3.5, Mamba):
    llama-server -m MODEL.gguf -c 8192 -np 1 --cache-ram 0
    python stale_context_checkpoint.py http://127.0.0.1:8080

*First token*: a prompt of 5 tokens leaves a context checkpoint of its first token (4 before its end). A
prompt that begins with another token follows, then one that shares its first token with the second.
*Adjacent* (hybrid and recurrent): a prompt leaves a context checkpoint of 996 tokens. A second one shares
these and leaves one of 997; a third one differs at token 997; a fourth shares more than 997 tokens with
the third. Expected: the last prompt is answered as in an empty slot. Seen: it is answered from the oldest
tokens' context checkpoint; its log-probabilities differ.

What follows the reused tokens is erased by `cur.pos_max > pos_next` (server-context.cpp, "erased
invalidated context checkpoint"). A context checkpoint with pos_max == pos_next holds the token at
pos_next, which the new prompt has changed: `>=` would erase it.

Exit status: 0 if the defect shows, 1 if not.
"""

import json
import sys
import urllib.request

LEAST = 0.02
"""Rounding alone moves a log-probability by up to 0.01."""


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def words(seed: int, n_tokens: int) -> list[int]:
    """Return tokens that begin with others for each seed."""
    return [50 + seed + (i * (31 + 2 * seed) + i // 30) % 800 for i in range(n_tokens)]


def ask(server: str, prompt: list[int]) -> tuple[int, dict[int, float]]:
    body = {"prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": True, "n_probs": 10}
    reply = post(f"{server}/completion", body | {"temperature": 0})
    top = reply["completion_probabilities"][0]["top_logprobs"]
    return reply["timings"]["cache_n"], {t["id"]: t["logprob"] for t in top}


def is_wrong(server: str, name: str, *prompts: list[int]) -> bool:
    """Return whether the last prompt is answered otherwise than in an erased slot."""
    post(f"{server}/slots/0?action=erase", {})
    replies = [ask(server, prompt) for prompt in prompts]
    post(f"{server}/slots/0?action=erase", {})
    n_reused, live = replies[-1]
    fresh = ask(server, prompts[-1])[1]
    away = max((abs(live[t] - fresh[t]) for t in live.keys() & fresh.keys()), default=99.0)
    print(f"{name}: {n_reused} reused; log-probabilities differ by up to {away:.3f}")
    return away > LEAST


def main() -> int:
    server = sys.argv[1]
    first = words(1, 5), words(2, 551), words(2, 1) + words(3, 250)
    head, third = words(4, 996), words(6, 1500)
    fourth = head + third[:300] + words(7, 50)
    adjacent = head + words(8, 4), head + words(5, 5), head + third, fourth
    found = [is_wrong(server, "first token", *first), is_wrong(server, "adjacent", *adjacent)]
    return 0 if any(found) else 1


if __name__ == "__main__":
    sys.exit(main())
