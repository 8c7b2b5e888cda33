"""Four changed bytes in a slot file end the server process.

Start a full-attention model:
    llama-server -m MODEL.gguf -c 4096 -np 1 --cache-ram 0 -fa on --slot-save-path DIR
    python damaged_file_aborts.py http://127.0.0.1:8080 DIR

The position of the first cell in a saved file is set to -1. Expected: the restore is refused. Seen: 200,
and the next request that leaves the state before its end meets GGML_ABORT (server-context.cpp, "pos_min
== -1, but n_past > 0"): every client of the server loses its connection. A check that the cells'
positions are those of the tokens, or a checksum, would turn that into a 400.

Exit status: 0 if the defect shows, 1 if not.
"""

import http.client
import json
import struct
import sys
import urllib.error
import urllib.request
from pathlib import Path

NAME = "damaged-file-aborts.bin"


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def evaluate(server: str, n_tokens: int) -> None:
    prompt = [(7919 * i) % 900 + 50 for i in range(n_tokens)]
    body = {"prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": True}
    post(f"{server}/completion", body)


def damage(path: Path) -> None:
    """Set the first cell's position to -1: docs/upstream/slot-file-format.md, "Attention"."""
    content = bytearray(path.read_bytes())
    _, _, n_words = struct.unpack_from("<III", content)
    n_streams_at = 12 + 4 * n_words
    n_streams = struct.unpack_from("<I", content, n_streams_at)[0]
    cell_at = n_streams_at + 8
    for _ in range(n_streams):
        if struct.unpack_from("<I", content, cell_at - 4)[0]:
            break
        cell_at += 4
    struct.pack_into("<i", content, cell_at, -1)
    path.write_bytes(content)


def main() -> int:
    server, folder = sys.argv[1:]
    evaluate(server, 600)
    post(f"{server}/slots/0?action=save", {"filename": NAME})
    damage(Path(folder, NAME))
    try:
        post(f"{server}/slots/0?action=restore", {"filename": NAME})
        evaluate(server, 700)
    except urllib.error.HTTPError as error:
        print(f"refused, as it should be: {error.code} {error.read().decode()}")
        return 1
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        print(f"the restore was accepted, then the server was gone: {error}")
        return 0
    print("the server took the file and went on")
    return 1


if __name__ == "__main__":
    sys.exit(main())
