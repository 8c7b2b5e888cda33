"""A restore that fails leaves the slot empty.

Start any model: llama-server -m MODEL.gguf -c 4096 -np 1 --cache-ram 0 --slot-save-path DIR
    python failed_restore_empties_slot.py http://127.0.0.1:8080

A prompt is evaluated, then a file that does not exist is restored. Expected: an error, and the slot as
it was. Seen: 400, and the same prompt is evaluated again from its first token. The sequence is cleared
before the file is opened, so a typing error costs a conversation.

Exit status: 0 if the defect shows, 1 if not.
"""

import json
import sys
import urllib.error
import urllib.request


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def reused(server: str) -> int:
    prompt = [(7919 * i) % 900 + 50 for i in range(1000)]
    body = {"prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": True}
    return post(f"{server}/completion", body)["timings"]["cache_n"]


def main() -> int:
    server = sys.argv[1]
    reused(server)
    before = reused(server)
    try:
        post(f"{server}/slots/0?action=restore", {"filename": "there-is-no-such-file.bin"})
    except urllib.error.HTTPError as error:
        print(f"restore answered {error.code}: {error.read().decode()}")
    after = reused(server)
    print(f"reused before the failed restore: {before} tokens, after it: {after}")
    return 0 if after < before else 1


if __name__ == "__main__":
    sys.exit(main())
