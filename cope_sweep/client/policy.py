"""Which requests are repeated, and after which time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from cope_sweep.client.errors import ConnectionFailed, ServiceError

REPEATED_STATUSES = (429, 503)
NO_CLUSTER = "no_cluster"
"""The code of a 503 that waiting does not change."""
MAX_WAIT_S = 60.0
"""Where the service wants to be asked later than this, its error is raised at once."""


@dataclass(frozen=True)
class RetryPolicy:
    """GET requests are repeated after connection errors and the statuses 429 and 503."""

    retries: int = 4
    """How often."""
    first_wait_s: float = 0.5
    """Doubled for each further time, and shortened at random by up to a half."""

    def wait_s(self, error: ServiceError | ConnectionFailed, attempt: int) -> float | None:
        """How long to wait after the attempt with this number, from 0; None to raise the error."""
        if attempt >= self.retries:
            return None
        wait_s = self.first_wait_s * 2**attempt * random.uniform(0.5, 1.0)
        if isinstance(error, ServiceError):
            if error.status not in REPEATED_STATUSES or error.code == NO_CLUSTER:
                return None
            wait_s = max(wait_s, error.retry_after_s or 0.0)
        return wait_s if wait_s <= MAX_WAIT_S else None


def service_error(response: httpx.Response) -> ServiceError:
    """The error in a response whose body was read: problem details, or the text of something else that answered."""
    try:
        body = response.json()
    except ValueError:
        body = None
    problem = body if isinstance(body, dict) else {}
    detail = problem.get("detail") or f"{response.url} answers {response.status_code} {response.reason_phrase}"
    code = problem.get("code") or response.reason_phrase.lower().replace(" ", "_")
    return ServiceError(response.status_code, str(code), str(detail), _retry_after_s(response))


def _retry_after_s(response: httpx.Response) -> float | None:
    """The seconds of a Retry-After header, which may be a number or a date."""
    text = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def connection_failed(server: str, error: Exception) -> ConnectionFailed:
    """The error that a service cannot be reached."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConnectionFailed(f"the service at {server} does not answer ({reason}); start one with `cope-sweep serve`")
