"""Settings that are an address to listen on, and how people write them."""

from typing import Annotated

from msgspec import Meta

_PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
Address = Annotated[str, Meta(title="HOST:PORT", pattern=rf"^([^:]*|\[[0-9a-fA-F:]+\]):{_PORT}$")]
Hosts = Annotated[
    str,
    Meta(title="names, separated by commas", pattern=r"^\s*([\w.-]+\s*(,\s*[\w.-]+\s*)*)?$"),
]

_URL = r"https?://[^/?#,\s]+[^?#,\s]*"
Urls = Annotated[
    str,
    Meta(
        title="http:// or https:// URL, or several, separated by commas",
        pattern=rf"^\s*{_URL}\s*(,\s*{_URL}\s*)*$",
    ),
]

_ANY_HOST = ("", "0.0.0.0", "[::]")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def parse_hosts(hosts: str) -> list[str]:
    """Return the names of a setting that has several, separated by commas."""
    return [host.strip() for host in hosts.split(",") if host.strip()]


def parse_urls(urls: str) -> list[str]:
    """Return the base URLs of a setting that has several, separated by commas."""
    return [url.strip().rstrip("/") for url in urls.split(",") if url.strip()]


def reachable(address: str) -> str:
    """Return where a listener at HOST:PORT is reached from this machine."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in _ANY_HOST else address
