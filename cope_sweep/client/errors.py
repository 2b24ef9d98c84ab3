"""Errors of the client."""

from __future__ import annotations

from cope_sweep.errors import UserError


class ServiceError(UserError):
    """The service has answered with an error."""

    def __init__(self, status: int, code: str, detail: str, retry_after_s: float | None = None) -> None:
        """Create the error.

        Args:
            status: The HTTP status.
            code: What is wrong, as `not_found`.
            detail: A sentence about it.
            retry_after_s: When the service wants to be asked again.
        """
        super().__init__(f"{detail} ({status} {code})")
        self.status, self.code, self.detail, self.retry_after_s = status, code, detail, retry_after_s


class ConnectionFailed(UserError):
    """The service cannot be reached, or has closed the connection."""


class DownloadError(UserError):
    """A downloaded file is not the one that the service has announced."""
