"""Asks a running proxy at its admin listener."""

import asyncio
import io
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import aiohttp
import click
import msgspec

from proxy.commands.options import EXIT_FAILED, EXIT_UNAVAILABLE, fail
from proxy.upstream.llama_server import new_session

T = TypeVar("T")
Query = Mapping[str, str]


class Admin:
    """The admin listener of one proxy."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, path: str, type_: type[T], query: Query | None = None) -> T:
        """Return what a request is answered with; exits with a plain word if it is not."""
        return self.decode(self.raw(method, path, query), type_)

    async def ask_async(self, path: str, type_: type[T]) -> T:
        """Return what GET *path* is answered with; exits as `ask` does."""
        return self.decode((await self._raw("GET", path, None, ()))[1], type_)

    def decode(self, body: bytes, type_: type[T]) -> T:
        """Return what an answer says; exits if it is not one of ours."""
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.DecodeError:
            self.fail_foreign()

    def raw(self, method: str, path: str, query: Query | None = None) -> bytes:
        """Return an answer's body; exits as `ask` does."""
        return self.try_raw(method, path, query)[1]

    def try_raw(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        refusals: tuple[int, ...] = (),
    ) -> tuple[int, bytes]:
        """Return an answer's status and body; exits as `ask` does, but not for *refusals*."""
        return asyncio.run(self._raw(method, path, query, refusals))

    async def _raw(
        self, method: str, path: str, query: Query | None, refusals: tuple[int, ...]
    ) -> tuple[int, bytes]:
        async with new_session() as session:
            try:
                async with session.request(method, self.url + path, params=query) as reply:
                    body = await reply.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.fail_unreachable(error)
        if reply.status not in (200, *refusals):
            _fail_refused(reply.status, body)
        return reply.status, body

    async def follow(
        self,
        path: str,
        body: bytes,
        query: Query,
        headers: Query,
        on_line: Callable[[Any], None],
    ) -> None:
        """Post *body* and hand over each line of JSON of the answer; exits as `ask` does."""
        async with new_session() as session:
            try:
                async with session.post(
                    self.url + path, data=io.BytesIO(body), params=query, headers=headers
                ) as reply:
                    if reply.status != 200:
                        _fail_refused(reply.status, await reply.read())
                    async for line in reply.content:
                        on_line(self.decode(line, Any))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.fail_unreachable(error)

    def fail_foreign(self) -> NoReturn:
        fail(f"what answers at {self.url} is not llama-prefix-cache", EXIT_UNAVAILABLE)

    def fail_unreachable(self, error: Exception) -> NoReturn:
        context = click.get_current_context(silent=True)
        can_do_without = context is not None and any(
            option.name == "slot_save_path" for option in context.command.params
        )
        fail(
            f"no proxy answers at {self.url} ({error}). If one runs with another `admin`, give --admin "
            "http://HOST:PORT"
            + ("; if none runs, --slot-save-path to work on the directory" * can_do_without),
            EXIT_UNAVAILABLE,
        )


def _fail_refused(status: int, body: bytes) -> NoReturn:
    fail(complaint(body), EXIT_UNAVAILABLE if status == 503 else EXIT_FAILED)


def complaint(body: bytes) -> str:
    """Return what an error body says."""
    try:
        return str(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace").strip()
