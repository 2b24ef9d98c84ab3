"""`serve run services.serve:app` in a checkout; where cope-sweep is installed, `serve run cope_services.serve:app`."""

from cope_services.serve import app

__all__ = ["app"]
