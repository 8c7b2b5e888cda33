"""A client of a bucket that tries once: what tests look at, and change, behind the proxy's back."""

from datetime import timedelta

from obstore.store import S3Store

from tests.lab.buckets import BUCKET, KEY_ID, SECRET


def open_bucket(endpoint: str, prefix: str = "", patience_seconds: float = 60.0) -> S3Store:
    """Return a client of the lab's bucket at *endpoint*, below a *prefix*."""
    return S3Store(
        BUCKET,
        prefix=prefix or None,
        access_key_id=KEY_ID,
        secret_access_key=SECRET,
        endpoint=endpoint,
        region="us-east-1",
        disable_bulk_delete=True,  # JuiceFS deletes, and answers what obstore does not read
        client_options={"allow_http": True, "timeout": timedelta(seconds=patience_seconds)},
        retry_config={"max_retries": 0},
    )
