"""Sweeps on the web page: progress, retries, and the form that submits one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cope_services.http.access import KeysFile

from cope_sweep.config import expand, load_ablation
from cope_sweep.config.expand import row_of
from cope_sweep.records import SWEEP_ID
from cope_sweep.store import SweepRun
from cope_sweep.sweep.jobs import job_submission
from tests.helpers.finished_runs import stop as stop_early
from tests.helpers.sample_store import SEARCHED, serving
from tests.helpers.scripted_cluster import scripted_cluster
from tests.helpers.sweeps import end_sweep, members, write_sweep
from tests.services.page import page_site
from tests.services.page.page_site import SCREENS, Site, Visitor, accessibility

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Route

pytestmark = page_site.IN_A_BROWSER


def test_a_sweep_is_followed_until_it_ends_and_a_retry_is_confirmed(visitor: Visitor, site: Site) -> None:
    store = site.sample.store
    record = write_sweep(store, site.sample.plan)
    page = visitor.open(f"sweeps/{record.sweep_id}", ".tiles")
    assert page.locator(".tile dt").all_inner_texts() == [
        "remaining time",
        "steps per second",
        "worker groups",
        "nodes",
    ]
    assert page.locator(".counts").inner_text().startswith("2 of 4 finished")
    waiting = page.locator(".waiting li").all_inner_texts()
    assert sorted(each.split(": ")[0] for each in waiting) == ["1 run", "1 run"]
    assert all(each.split(": ")[1].startswith("waits for the first worker to start") for each in waiting)
    page.wait_for_selector("section:has(#curves) .uplot canvas")
    assert page.get_by_role("button", name="Stop", exact=True).is_visible()
    end_sweep(store, record, "failed")
    page.get_by_role("button", name="Retry 2 runs").click()
    assert page.locator(".tiles").count() == 0
    assert page.locator(".members thead th").all_inner_texts()[:4] == ["row", "seed", "status", "step"]
    assert "tokens/s" not in page.locator(".members thead").inner_text()  # no run is being trained
    assert accessibility(page) == []
    page.keyboard.press("Escape")
    assert not [url for url in visitor.requests if "/retry" in url]
    page.get_by_role("button", name="Retry 2 runs").click()
    page.get_by_role("button", name="Retry", exact=True).click()
    page.wait_for_function("() => document.querySelector('p[role=status]').textContent.length > 20")  # why it cannot be
    assert [each for each in visitor.problems if "the server responded with a status of" not in each] == []
    visitor.problems.clear()


def test_counts_go_on_without_live_progress_until_that_is_back(visitor: Visitor, site: Site) -> None:
    record = write_sweep(site.sample.store, site.sample.plan)
    failures, finished = [503], [2]

    def with_finished(route: Route) -> None:
        answer = route.fetch()
        content = answer.json()
        content["counts"]["finished"] = finished[-1]
        route.fulfill(response=answer, json=content, headers=answer.headers | {"etag": f'"{finished[-1]}"'})

    page = visitor.page
    page.clock.install()
    page.route(f"**/api/v1/sweeps/{record.sweep_id}", with_finished)
    page.route(
        "**/events",
        lambda route: route.fulfill(status=failures.pop(), json={"detail": "no"}) if failures else route.fallback(),
    )
    visitor.open(f"sweeps/{record.sweep_id}", ".note:has-text('There is no live progress')")
    finished.append(3)
    page.evaluate("() => dispatchEvent(new Event('routechange'))")
    page.wait_for_function("() => document.querySelector('.counts').innerText.startsWith('3 of ')")
    page.clock.fast_forward(6000)
    page.wait_for_selector(".tiles")
    end_sweep(site.sample.store, record, "interrupted")
    assert [each for each in visitor.problems if "503" not in each] == []
    visitor.problems.clear()


def test_a_retry_trains_stopped_runs_and_rows_that_the_search_has_not_chosen(
    visitor: Visitor, site: Site, tmp_path: Path
) -> None:
    file = tmp_path / "searched.yaml"
    file.write_text(SEARCHED)
    plan = expand(load_ablation(file))
    row = row_of(plan.ablation, {"train.lr": 0.001})
    stop_early(site.sample.store, row.runs[0])
    member = SweepRun(run_id=row.runs[0].run_id, row=row.name, labels=row.labels, seed=0)
    changes: dict[str, Any] = {"runs": [member], "data": plan.ablation.data, "status": "interrupted"}
    record = write_sweep(site.sample.store, plan, **changes)
    page = visitor.open(f"sweeps/{record.sweep_id}", "#members")
    assert page.locator(".head .badge").inner_text() == "interrupted"
    assert page.get_by_role("button", name="Retry 1 run and 1 row of the search").is_visible()
    assert page.locator(".waiting").inner_text().startswith("1 row not chosen yet")
    record = write_sweep(site.sample.store, plan, **changes, leave_out=["stopped"])  # of a schedule
    page = visitor.open(f"sweeps/{record.sweep_id}", "#members")
    assert page.get_by_role("button", name="Retry 1 row of the search").is_visible()


def test_a_sweep_shows_the_curves_of_the_loss_and_of_the_primary_metric(visitor: Visitor, site: Site) -> None:
    store = site.sample.store
    record = write_sweep(store, site.curves)
    page = visitor.open(f"sweeps/{record.sweep_id}", "section:has(#curves) figure:nth-child(2) .uplot canvas")
    end_sweep(store, record, "interrupted")
    titles = [each.split("\n")[0] for each in page.locator(".multiples figcaption").all_inner_texts()]
    assert titles == ["train/loss", "In-dist. (%)"]
    assert page.locator(".legend .entry").all_inner_texts() == ["CoPE", "Absolute", "RoPE"]


def test_a_sweep_shows_no_curves_of_other_runs_of_its_rows(visitor: Visitor, site: Site) -> None:
    """The file was changed since: its rows have other runs."""
    cope, absolute, _ = members(site.curves)
    earlier = absolute.model_copy(update={"run_id": "0123456789abcdef"})
    record = end_sweep(site.sample.store, write_sweep(site.sample.store, site.curves, runs=[cope, earlier]))
    page = visitor.open(f"sweeps/{record.sweep_id}", "section:has(#curves) .uplot canvas")
    assert page.locator(".legend .entry").all_inner_texts() == ["CoPE"]


def test_the_failures_of_a_sweep_are_grouped_by_message(visitor: Visitor, site: Site) -> None:
    many = expand(load_ablation(site.sample.ablations / "many.yaml"))
    record = end_sweep(site.sample.store, write_sweep(site.sample.store, many), "failed")
    page = visitor.open(f"sweeps/{record.sweep_id}", "#members")
    (group,) = page.locator(".failures li").all()
    assert group.locator("p").inner_text() == "Diverged: the training loss is nan at step 3"
    assert group.locator("a").count() == 105
    assert group.locator("a").first.inner_text() == "CoPE, seed 0"
    columns = page.locator("section:has(#members) th[scope=col]").all_text_contents()
    assert columns[:4] == ["row", "seed", "status", "step"]
    assert columns[-1] == "message"
    assert page.locator("table.members tbody tr").count() == 100
    page.get_by_role("button", name="Show all 105 runs").click()
    assert page.locator("table.members tbody tr").count() == 105
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every((each) => each.scrollHeight <= each.clientHeight)"
    )


def test_a_sweep_is_submitted_by_a_form(
    context: BrowserContext, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster accepts the job and runs none; test_sweeps_on_ray starts a real one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sample = site.sample.copy_to(tmp_path / "copy")
    shutil.copy(sample.ablations / "tiny.yaml", sample.ablations / "tiny_again.yaml")
    end_sweep(sample.store, write_sweep(sample.store, expand(load_ablation(sample.ablations / "tiny_again.yaml"))))
    with scripted_cluster() as cluster, serving(sample.settings(ray_address=cluster.url)) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        page = visitor.open("ablations/tiny?tab=train&scale=base", "form.train")
        page.get_by_text(
            "2 of 4 runs would be trained (1 failed); 2 have ended and will not be trained again."
        ).wait_for()
        page.get_by_text("4 runs of the plan are shared with tiny_again.").wait_for()
        for width, scheme in SCREENS:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert accessibility(page) == [], (width, scheme)
        page.get_by_label("train at most").fill("1")
        page.get_by_text(
            "1 of 4 runs would be trained (1 failed); 2 have ended and will not be trained again."
        ).wait_for()
        page.get_by_label("train at most").fill("")
        page.get_by_label("Overrides").fill("train.steps=21")
        page.get_by_text("4 of 4 runs would be trained.").wait_for()
        page.get_by_label("Overrides").fill("train.stepz=3")
        page.get_by_role("status").get_by_text("train.stepz").wait_for()
        page.get_by_role("button", name="Train", exact=True).click()
        page.wait_for_selector("form.train [role=alert]:not(:empty)")
        assert "train.stepz" in page.locator("form.train [role=alert]").inner_text()
        assert str(sample.root) not in page.locator("form.train [role=alert]").inner_text()
        assert cluster.submitted == []
        page.locator("form.train select").select_option("longer")
        page.wait_for_function("() => location.hash.includes('scale=longer')")
        assert page.get_by_label("Overrides").input_value() == "train.stepz=3"  # what was typed is kept
        page.wait_for_function("() => document.querySelector('form.train select').value === 'longer'")
        page.get_by_label("Overrides").select_text()
        page.evaluate("history.back()")  # the form is drawn again while somebody types in it
        page.wait_for_function("() => document.querySelector('form.train select').value === 'base'")
        page.keyboard.insert_text("train.lr=0.03")
        assert page.get_by_label("Overrides").input_value() == "train.lr=0.03"  # what was selected is replaced
        page.evaluate("history.forward()")
        page.wait_for_function("() => document.querySelector('form.train select').value === 'longer'")
        page.get_by_label("Overrides").fill("  seeds=[0, 7]\n\ntrain.lr=0.02\n")
        page.get_by_label("train at most").fill("3")
        page.get_by_label("for at most").fill("90")
        with page.expect_response(lambda response: response.request.method == "PUT") as sent:
            page.get_by_role("button", name="Train", exact=True).click()
        assert sent.value.status == 202, sent.value.text()
        assert SWEEP_ID.fullmatch(sent.value.url.rpartition("/")[2])
        page.wait_for_url("**/#/sweeps/*")
        page.wait_for_selector("#members")
        (job,) = cluster.submitted
        assert page.url.endswith(job["submission_id"])
        submission, plan = job_submission(sample.store, job["submission_id"])
        assert (submission.max_runs, submission.time_budget_s, submission.scale) == (3, 5400.0, "longer")
        assert {(run.seed, run.train.lr, run.train.steps) for run in plan.runs} == {(0, 0.02, 20), (7, 0.02, 20)}
        page.close()
    assert [each for each in visitor.problems if "422" not in each] == []


def test_the_form_is_offered_to_those_who_may_submit(context: BrowserContext, site: Site, tmp_path: Path) -> None:
    keys = KeysFile(tmp_path / "keys.txt")
    secrets = {True: keys.create("me", may_submit=True), False: keys.create("you")}
    settings = site.sample.settings(keys_file=keys.path, ray_address="http://127.0.0.1:1")
    with serving(settings) as client:
        for may, secret in secrets.items():
            visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
            page = visitor.open("ablations/tiny?tab=train", "dialog[open]")
            page.get_by_label("key", exact=True).fill(secret)
            page.keyboard.press("Enter")
            page.wait_for_selector("form.train" if may else ".uplot canvas")
            assert page.get_by_role("link", name="Train", exact=True).count() == may
            page.evaluate("sessionStorage.clear()")
            page.close()
            assert [each for each in visitor.problems if "401" not in each] == []
