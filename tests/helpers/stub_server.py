"""A proxy before an MLflow server that answers with errors, slowly, or not at all, as a test wants; or a server alone."""

import contextlib
import http.client
import http.server
import threading
import time
from urllib.parse import urlsplit


class Handler(http.server.BaseHTTPRequestHandler):
    """Passes requests on, unless the server says otherwise."""

    protocol_version = "HTTP/1.0"  # one request for each connection, so that none outlives the server

    def _answer(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.requests += 1
        server.seen.append((self.path.partition("?")[0], self.headers.get("Authorization")))
        time.sleep(server.delay_s)
        lost = server.lose_every and server.requests % server.lose_every == 0
        if server.status is None or lost:
            target = urlsplit(server.target)
            upstream = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            status, content, kind = answer.status, answer.read(), answer.headers.get("Content-Type", "")
            upstream.close()
        if server.status is not None or lost:
            # A request that is lost was carried out, and its answer is an error.
            status, content, kind = server.status or 500, server.body, "application/json"
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def log_message(self, *_):
        pass


class Stub(http.server.ThreadingHTTPServer):
    """A proxy before the MLflow server at `target`; None: `status` is always set."""

    daemon_threads = True

    def __init__(self, target, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.target = target
        self.status = None
        """The HTTP status of all answers; None: those of the server."""
        self.delay_s = 0.0
        self.lose_every = 0
        """Every nth request is carried out, and answered with status 500. A pass of `sync` that begins after a loss must
        be shorter, or no pass gets to its end."""
        self.body = b'{"error_code": "INTERNAL_ERROR"}'
        """What it answers itself."""
        self.requests = 0
        self.seen = []
        """Path and credentials of each request."""
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()  # ends at once
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
