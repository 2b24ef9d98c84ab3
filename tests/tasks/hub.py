"""A server that answers as the Hugging Face hub does, for datasets of a few files, and fails where a test asks it to."""

import json
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.helpers.processes import http_server

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """Repositories by name: files by path, and the content of the dataset's card.

    `refused`: repository, or repository:file → the code of the error that it answers with, as the hub does in
    `X-Error-Code`.
    `interrupted`: path of a file → how many answers about it end in the middle.
    """

    def __init__(self):
        self.files, self.cards, self.refused = {}, {}, {}
        self.interrupted, self.requests = Counter(), []
        self.url = ""

    def add(self, repository, files, configs=None):
        self.files[repository] = files
        self.cards[repository] = {"configs": configs} if configs else {}


@contextmanager
def serve(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def answer(self, data, status=200, headers=(), cut=False):
            self.send_response(status)
            for name, value in dict(headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(path)
            repository = next((name for name in (*hub.files, *hub.refused) if f"/{name}" in path), None)
            if repository is None or repository in hub.refused:
                code = hub.refused.get(repository, "RepoNotFound")
                status = 403 if code == "GatedRepo" else 404
                return self.answer(b"{}", status, {"X-Error-Code": code, "X-Error-Message": code})
            files = hub.files[repository]
            listed = [{"type": "file", "path": name, "rfilename": name, "size": len(data), "oid": "0" * 40}
                      for name, data in files.items()]  # fmt: skip
            if "/tree/" in path:
                folder = path.partition("/tree/")[2].partition("/")[2]
                inside = [each for each in listed if each["path"].rpartition("/")[0] == folder]
                return self.answer(json.dumps(inside).encode(), headers={"Content-Type": "application/json"})
            if path.startswith("/api/"):
                info = {"id": repository, "sha": COMMIT, "siblings": listed, "cardData": hub.cards[repository]}
                return self.answer(json.dumps(info).encode(), headers={"Content-Type": "application/json"})
            name = path.partition("/resolve/")[2].partition("/")[2]
            if name not in files:
                return self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
            if code := hub.refused.get(f"{repository}:{name}"):
                return self.answer(b"", 403, {"X-Error-Code": code})
            data = files[name]
            first, last = 0, len(data) - 1
            if wanted := self.headers.get("Range"):
                first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
                last = min(last, len(data) - 1)
            cut = self.command == "GET" and hub.interrupted[name] > 0
            hub.interrupted[name] -= cut
            headers = {
                "Content-Range": f"bytes {first}-{last}/{len(data)}", "ETag": '"0"', "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }  # fmt: skip
            return self.answer(data[first : last + 1], 206 if wanted else 200, headers, cut=cut)

        do_HEAD = do_GET

    with http_server(Handler) as hub.url:
        yield hub
