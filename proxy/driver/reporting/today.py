"""What requests have reused today, added up as they end."""

from datetime import date, datetime, time

from proxy.core.explaining.records import RequestRecord
from proxy.core.views.overview import Today


class DaySums:
    """Sums of one day, in local time; the first look at another day begins anew."""

    def __init__(self, now: float) -> None:
        self._day = date.fromtimestamp(now)
        self._today = Today(since=now)

    def at(self, now: float) -> Today:
        """Return the sums of the day that *now* lies in, in seconds since 1970."""
        day = date.fromtimestamp(now)
        if day != self._day:
            midnight = datetime.combine(day, time.min).timestamp()
            self._day, self._today = day, Today(since=midnight)
        return self._today

    def add(self, record: RequestRecord, now: float) -> None:
        today = self.at(now)
        n_reused, is_known = record.confirmed or 0, record.confirmed is not None
        saved_seconds = today.saved_seconds
        if record.saved_seconds is not None:
            saved_seconds = round((saved_seconds or 0.0) + record.saved_seconds, 4)
        self._today = Today(
            since=today.since,
            n_requests=today.n_requests + 1,
            n_reusing=today.n_reusing + (n_reused > 0),
            n_prompt=today.n_prompt + (record.n_prompt or 0) * is_known,
            n_reused=today.n_reused + n_reused,
            n_restored=today.n_restored + n_reused * (record.chosen == "restore"),
            n_missed=today.n_missed + record.n_missed,
            saved_seconds=saved_seconds,
        )
