"""The documents of cope-sweep, if a checkout has built them (`make docs`): static files below `/documents`."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from fastapi import Response
from fastapi.staticfiles import StaticFiles

from cope_services.http.middleware import NO_FRAMES


def documents_folder(ablations: Path) -> Path | None:
    """The folder `site` beside the ablations, if `make docs` has built it; None otherwise."""
    site = ablations.absolute().parent / "site"
    return site if (site / "docs" / "tutorial.html").is_file() else None


class Documents(StaticFiles):
    """The files of the site. Its pages may run its own scripts, and those that stand in them when they are read."""

    def file_response(self, full_path: str | os.PathLike[str], *args: Any, **options: Any) -> Response:
        """A file, with a Content-Security-Policy if it is a page."""
        response = super().file_response(full_path, *args, **options)
        if Path(full_path).suffix == ".html":
            response.headers["content-security-policy"] = _policy(Path(full_path).read_bytes())
        return response


def _policy(page: bytes) -> str:
    """The policy of the service's own page, with the hashes of the inline scripts of this one, and inline styles."""
    digests = [hashlib.sha256(text).digest() for text in re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)]
    scripts = ["'self'", *(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)]
    return (
        f"default-src 'none'; script-src {' '.join(scripts)}; "
        f"style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
        f"worker-src 'self'; {NO_FRAMES}"
    )
