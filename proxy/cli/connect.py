"""`llama-prefix-cache connect`: points a client at the proxy, and checks that its requests are cached.

clients.yaml has the clients.
"""

import difflib
import json
import os
import re
import secrets
import sys
import tomllib
from functools import partial
from math import inf
from pathlib import Path
from string import Template
from typing import Any

import click
import msgspec
import yaml

from proxy.cli.command import Exit, Json, RunningProxy, agree, answer, fail, with_proxy, yes_option
from proxy.explain.sketch import visible
from proxy.store.files import replacing

TABLE = Path(__file__).with_name("clients.yaml").read_text(encoding="utf-8")
NAMES = [line[:-1] for line in TABLE.splitlines() if line[:1].isalpha()]
_MARK = "# llama-prefix-cache connect"
_NOT_KEPT = {"X-Prefix-Cache": "no-store"}
_LONG_WORDS = " ".join(f"Rule {i}: be brief." for i in range(60))
"""The first trial request sends this behind a random word, so that each trial is a new conversation."""

_USUAL_CONTEXT = 16_384


@click.command()
@click.argument("name", metavar="CLIENT", type=click.Choice(NAMES))
@click.option("--write", is_flag=True, help="Merge it into the client's own file.")
@click.option("--undo", is_flag=True, help="Put the file back that was there before --write.")
@yes_option
@click.option("--file", type=click.Path(path_type=Path), help="Another file than the usual one.")
@click.option("--url", help="Where clients reach the proxy. [its --listen]")
@click.option("--model", help="What to call the model; a router loads it. [the one that runs]")
@click.option("--api-key", envvar="LLAMA_API_KEY", default="none", help="llama-server's API key.")
@with_proxy
def connect(
    proxy: RunningProxy,
    name: str,
    write: bool,
    undo: bool,
    file: Path | None,
    url: str | None,
    model: str | None,
    api_key: str,
) -> None:
    """Point a client at the running proxy.

    \b
    llama-prefix-cache connect opencode            prints the settings for the client's own file
    llama-prefix-cache connect opencode --write    merges them there, and tries them out
    llama-prefix-cache connect opencode --undo     restores the file from before --write

    CLIENT: opencode, kilo, claude-code, codex, copilot, qwen-code, kimi, pi, cline, crush, continue,
    hermes, openclaw, open-webui, openai-sdk, anthropic-sdk. Any other client of OpenAI's API takes the URL
    that openai-sdk prints. URL, model and context are those of the running proxy. --write shows the
    difference, asks, keeps the old file, and tries the settings out with two small requests.
    """
    if write and undo:
        raise click.UsageError("--write and --undo are opposites: give one")
    usual = client_of(name, {}).get("file")
    own = file or Path(os.path.expanduser(usual or ".env"))
    if (write or undo) and not (file or usual):
        fail(f"{name} has no file to write: set what `connect {name}` prints", Exit.USAGE)
    if undo:
        return _undo(own)
    overview, api_key = proxy.overview(), api_key or "none"  # many clients refuse an empty one
    server = proxy.for_clients(overview, url, api_key)
    overview = _with_model(proxy, server, overview, model) if model else overview
    chosen, servers = server.model_that_runs(overview, model)
    model = str(chosen["id"])
    # A path is shortened: with one model, any name works.
    model = Path(model).stem if model.endswith(".gguf") else model
    facts = {"URL": server.url, "MODEL": model, "KEY": api_key}
    n_ctx = min(each["n_ctx"] for each in servers)
    output = min(8192, n_ctx // 4)
    sizes = {"CONTEXT": n_ctx, "PROMPT": n_ctx - output, "OUTPUT": output}
    client = client_of(name, facts | sizes | {"WINDOW": max(n_ctx, 100_000)})
    content, hint = client["content"], client.get("hint", "")
    other = own.with_suffix(".jsonc")  # OpenCode makes one that only names its schema
    beside = other.read_text("utf-8", "replace") if other != own and other.exists() else ""
    if re.search(r'"(?!\$schema)\w+"\s*:', beside):
        hint = f"{other} is read too, and wins: change by hand what it already sets."
    goes = f"goes into {file or usual}; --write merges it there" if usual and not write else ""
    hints = goes, hint, _short_context(n_ctx) if usual else "", proxy.why_forwarding(overview)
    hint = "\n".join(map(visible, filter(None, hints)))
    if not write:
        answer(content, written(own, content).rstrip())
        # Not on stdout: people send the settings into a file, or to `env`.
        return click.echo(f"\n{hint}".rstrip(), err=True, nl=bool(hint))
    _write(own, content)
    n_prompt, n_cached = _try(server, client["api"], model)
    cached = f"{n_cached:,} of {n_prompt:,} tokens of a second request came from the cache."
    shown = f"{own} has the settings. {cached} {hint}".rstrip()
    answer({"n_prompt": n_prompt, "n_cached": n_cached}, shown)
    sys.exit(0 if n_cached > n_prompt // 2 else Exit.FAILED)


def _with_model(proxy: RunningProxy, server: RunningProxy, overview: Json, model: str) -> Json:
    """Return the overview; have a router or llama-swap load *model* first; exits if there is none such."""
    known = {each["id"] for each in server.ask("GET", "/v1/models", Json)["data"]}
    running = {each["name"] for each in overview["servers"]}
    if model in running or (running and not running & known):
        return overview  # it is loaded, or the llama-server that runs has only one model
    said = [{"role": "user", "content": "Hello."}]
    body = msgspec.json.encode({"model": model, "messages": said, "max_tokens": 1})
    server.ask("POST", "/v1/chat/completions", Json, body=body, headers=_NOT_KEPT)
    return proxy.overview()


def _short_context(n_ctx: int) -> str:
    """Return a warning if the first prompt of most agents does not fit: OpenCode then compacts for ever."""
    if n_ctx >= _USUAL_CONTEXT:
        return ""
    short = f"A slot has {n_ctx:,} tokens, too few for the first prompt of most agents"
    return f"{short}: a larger -c, fewer slots (-np) or a model with a longer context helps."


def client_of(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Return a client's entry of clients.yaml with the *facts* filled in."""
    quoted = {}
    for key, value in facts.items():
        in_quotes = str(yaml.safe_dump(str(value), default_style='"', width=inf))
        quoted[key] = in_quotes.strip()[1:-1]
    client: dict[str, Any] = yaml.safe_load(Template(TABLE).safe_substitute(quoted))[name]
    return client


def written(path: Path, content: dict[str, Any]) -> str:
    """Return the text of a file with this content; a file of another kind has variables."""
    match path.suffix:
        case ".toml":
            quoted = partial(json.dumps, ensure_ascii=False)
            return "".join(f"{name} = {quoted(value)}\n" for name, value in content.items())
        case ".yaml" | ".yml":
            return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
        case ".json" | ".jsonc":
            return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return "".join(f"{name}={visible(value)}\n" for name, value in content.items())


def merged(there: Any, content: Any) -> Any:
    """Return *there* with the content merged in; a list item replaces the item of the same name."""
    if isinstance(there, dict) and isinstance(content, dict):
        return there | {name: merged(there.get(name), value) for name, value in content.items()}
    if isinstance(there, list) and isinstance(content, list):
        names = [item.get("name") for item in content if isinstance(item, dict)]
        return [i for i in there if not (isinstance(i, dict) and i.get("name") in names)] + content
    return content


def merged_text(path: Path, before: str, content: dict[str, Any]) -> str:
    """Return the text of a file with the content merged in; raises ValueError if that is impossible."""
    if path.suffix == ".toml":
        # At the top, where no table has begun. A name that is there already makes the text invalid.
        rest = re.sub(f"(?ms)^{_MARK}\n.*^{_MARK} ends\n", "", before)
        after = f"{_MARK}\n{written(path, content)}{_MARK} ends\n{rest}"
        tomllib.loads(after)
        return after
    is_json = path.suffix in (".json", ".jsonc")
    if not is_json and re.search(r"(?m)(^|\s)#", before):
        raise ValueError("comments would be lost")
    there = (json.loads if is_json else yaml.safe_load)(before) if before.strip() else {}
    if not isinstance(there, dict):
        raise ValueError("no settings")
    return written(path, merged(there, content))


def _write(path: Path, content: dict[str, Any]) -> None:
    """Merge the content into a file, after the user agreed to the difference."""
    try:
        before = path.read_text(encoding="utf-8-sig") if path.exists() else ""
        after = merged_text(path, before, content)
    except (ValueError, yaml.YAMLError):
        why = "has comments, or is in no form that can be merged"
        if path.suffix == ".toml":
            why = "sets some of this already, or is no TOML"
        fail(f"{path} {why}: put in by hand what `connect` prints")
    if before == after:
        return
    _agree(path, before, after)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not _backup(path).exists():
        _put(_backup(path), path.read_bytes() if path.exists() else b"")
    _put(path, after.encode())


def _undo(path: Path) -> None:
    if not _backup(path).exists():
        fail(f"nothing to undo: there is no {_backup(path)}")
    before = path.read_text("utf-8", "replace") if path.exists() else ""
    after = _backup(path).read_bytes()
    _agree(path, before, after.decode(errors="replace"))
    if after:
        _put(path, after)
    else:
        path.resolve().unlink(missing_ok=True)
    _backup(path).unlink()
    click.echo(f"{path} is as it was before --write.", err=True)


def _backup(path: Path) -> Path:
    return path.with_name(f"{path.name}.before-connect")


def _put(path: Path, content: bytes) -> None:
    """Write a file in one step; only its owner may read a new file, because it may hold a key."""
    real = path.resolve()
    with replacing(real, real.with_name(f".{path.name}.new")) as file:
        if real.exists():
            os.fchmod(file.fileno(), real.stat().st_mode & 0o777)
        file.write(content)


def _agree(path: Path, before: str, after: str) -> None:
    """Show the difference, and exit unless the user agrees to it."""
    old, new, name = before.splitlines(), after.splitlines(), str(path)
    lines = difflib.unified_diff(old, new, name, name, lineterm="")
    click.echo("\n".join(lines), err=True)
    agree(f"Write {path}?")


def _try(server: RunningProxy, api: str, model: str) -> tuple[int, int]:
    """Send two requests as the client would; return prompt tokens and reused tokens of the second one."""
    said: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    of_responses = api == "/v1/responses"
    names = ("input", "max_output_tokens") if of_responses else ("messages", "max_tokens")
    for words in (f"Try {secrets.token_hex(4)}. {_LONG_WORDS}", "Go on."):
        said += [{"role": "user", "content": words}]
        body = msgspec.json.encode({"model": model, names[0]: said, names[1]: 1})
        usage = server.ask("POST", api, Json, body=body, headers=_NOT_KEPT)["usage"]
        answered = [{"type": "output_text", "text": "Yes."}] if of_responses else "Yes."
        said += [{"type": "message", "role": "assistant", "content": answered}]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details:
        return usage.get("prompt_tokens") or usage["input_tokens"], details["cached_tokens"]
    # Anthropic's API does not count these in its input tokens.
    n_cached = usage.get("cache_read_input_tokens", 0)
    return usage["input_tokens"] + n_cached, n_cached
