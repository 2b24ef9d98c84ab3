"""The built documents of a checkout, below `/documents`."""

from __future__ import annotations

import base64
import hashlib

import httpx
from cope_services.http.access import KeysFile

from tests.helpers.sample_store import SampleStore, serving

LINK = '<a href="documents/index.html">Documentation</a>'
SCRIPT = "document.title = 'read'"
PAGE = f"<!doctype html><script>{SCRIPT}</script><p>The guide</p>"


def build_site(sample: SampleStore) -> None:
    """Write what `make docs` leaves beside the folder of the ablations."""
    folder = sample.ablations.parent / "site"
    (folder / "docs").mkdir(parents=True)
    for name in ("index.html", "docs/tutorial.html"):
        (folder / name).write_text(PAGE)
    (folder / "search.json").write_text("{}")


def test_without_built_documents_the_page_has_no_link(client: httpx.Client) -> None:
    assert LINK not in client.get("/").text
    assert client.get("/documents/index.html").status_code == 404


def test_built_documents_are_linked_and_served(own_sample: SampleStore) -> None:
    build_site(own_sample)
    with serving(own_sample.settings()) as client:
        assert LINK in client.get("/").text
        assert client.get("/documents/docs/tutorial.html").text == PAGE
        assert client.get("/documents/search.json").json() == {}
        assert client.get("/documents/", follow_redirects=True).text == PAGE
        for path in ("missing.html", "..%2Fablations%2Ftiny.yaml", "%2e%2e/ablations/tiny.yaml"):
            assert client.get(f"/documents/{path}").status_code == 404


def test_the_page_of_a_document_runs_its_own_scripts_only(own_sample: SampleStore) -> None:
    build_site(own_sample)
    with serving(own_sample.settings()) as client:
        headers = client.get("/documents/index.html").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


def test_documents_need_no_key_as_the_page_needs_none(own_sample: SampleStore) -> None:
    build_site(own_sample)
    settings = own_sample.settings()
    KeysFile(settings.keys_file).create("ada")
    with serving(settings) as client:
        assert client.get("/documents/docs/tutorial.html").status_code == 200
        assert client.get("/documents", follow_redirects=True).text == PAGE
        assert client.get("/api/v1/version").status_code == 401


def test_another_folder_of_this_name_is_not_served(own_sample: SampleStore) -> None:
    (own_sample.ablations.parent / "site").mkdir()
    (own_sample.ablations.parent / "site" / "index.html").write_text(PAGE)
    with serving(own_sample.settings()) as client:
        assert client.get("/documents/index.html").status_code == 404
