"""The HTTP service: application, access, routes, caching, metrics, documentation."""
