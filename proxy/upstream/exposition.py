"""llama-server's own metrics, as fit to stand beside the proxy's in one answer."""

from prometheus_client.parser import text_string_to_metric_families

from proxy.errors import UpstreamRefused

PREFIX = "llamacpp:"


def check_exposition(content: bytes) -> bytes:
    """Return metrics of llama-server, whole lines of them; raises UpstreamRefused if they are not.

    A scraper drops the whole answer for one line that it cannot read.
    """
    try:
        names = [family.name for family in text_string_to_metric_families(content.decode())]
    except ValueError as error:  # a UnicodeDecodeError is one
        raise UpstreamRefused(200, f"/metrics: reply not understood: {error}") from error
    if not names or not all(name.startswith(PREFIX) for name in names):
        raise UpstreamRefused(200, "/metrics: reply without llama-server's metrics")
    return content.rstrip(b"\n") + b"\n"
