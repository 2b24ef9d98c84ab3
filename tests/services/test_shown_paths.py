"""Messages name files of the service, not where they are on its machine."""

from __future__ import annotations

from pathlib import Path

import httpx
from cope_services.http.shown_paths import ShownPaths

from tests.services.sample_store import API, SampleStore


def test_folders_of_the_service_are_named_without_those_above(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    shown = ShownPaths([tmp_path / "link" / "ablations", tmp_path / "store"])
    assert shown(f"{tmp_path}/link/ablations/a.yaml:3: model: wrong") == "ablations/a.yaml:3: model: wrong"
    assert shown(f"{tmp_path}/real/ablations/a.yaml: wrong") == "ablations/a.yaml: wrong"
    assert shown(f"no run in the store {tmp_path}/store") == "no run in the store store"
    assert shown("/etc/passwd and ablations/a.yaml") == "/etc/passwd and ablations/a.yaml"


def test_folders_at_the_root_hide_nothing() -> None:
    assert ShownPaths([Path("/store")])("the store /store/x and https://host/store") == (
        "the store /store/x and https://host/store"
    )


def test_no_answer_tells_where_the_files_are(client: httpx.Client, sample: SampleStore) -> None:
    asked = ["/ablations", "/ablations/broken", "/ablations/broken/table", "/ablations/none", "/runs/" + "0" * 16]
    asked += ["/sweeps/20260101-000000-none", "/runs?sweep=none", f"/diff?left={sample.ids[0]}&right=none"]
    texts = {path: client.get(API + path).text for path in asked}
    assert "ablations/broken.yaml:3" in texts["/ablations/broken"]
    assert "metricz" in texts["/ablations/broken/table"]
    assert [path for path, text in texts.items() if str(sample.root) in text] == []
