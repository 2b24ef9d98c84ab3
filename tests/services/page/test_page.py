"""The web page as a whole, in a real browser: its views, addresses, keyboard, keys and errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from cope_services.http.access import KeysFile

from tests.helpers.sample_store import serving
from tests.services.page import page_site
from tests.services.page.page_site import SCREENS, Site, Visitor, accessibility, short_ids

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

pytestmark = page_site.IN_A_BROWSER


VIEWS = {
    "overview": ("", "ul.ablations"),
    "results": ("ablations/tiny?row=CoPE&row=Absolute&open=CoPE|in_dist/token_error", ".uplot canvas"),
    "invalid": ("ablations/broken", ".error"),
    "planned": ("ablations/tiny?tab=runs", ".dots a"),
    "figures": ("ablations/tiny?tab=figures", ".figures img"),
    "file": ("ablations/tiny?tab=file", "pre.file"),
    "run": ("runs/{cope}", ".uplot canvas"),
    "failure": ("runs/{failed}", ".error pre"),
    "configuration": ("runs/{cope}?tab=configuration", ".groups"),
    "difference": ("runs/{cope}?tab=difference&against={absolute}", ".view-runs h3"),
    "logs": ("runs/{cope}?tab=logs", "pre.file"),
    "checkpoint": ("runs/{cope}?tab=checkpoint", "code"),
    "runs": ("runs?status=finished&sel={both}", ".comparison table"),
    "sweeps": ("sweeps", "table.sweeps"),
    "sweep": ("sweeps/{sweep}", "#members"),
    "playground": ("playground?run={cope}&run={absolute}&ask=1&text=1 _ 0 _ > 1 0", ".matrix canvas"),
    "tried": ("tried?q=model.position=cope,absolute", ".groups table"),
    "nothing": ("nothing/here", ".error"),
}
"""Name of a view → its address, and a selector of what it shows at last."""


FEW_VIEWS = ("overview", "results", "run", "runs", "sweep")
"""Those of `make test`; `make test-all` looks at all of them."""


@pytest.mark.parametrize(
    "view", [view if view in FEW_VIEWS else pytest.param(view, marks=pytest.mark.thorough) for view in VIEWS]
)
def test_every_view_on_a_wide_light_and_a_narrow_dark_screen(visitor: Visitor, site: Site, view: str) -> None:
    cope, absolute, failed, _ = site.sample.ids
    address, shown = VIEWS[view]
    names = {
        "cope": cope,
        "absolute": absolute,
        "failed": failed,
        "both": short_ids(cope, absolute),
        "sweep": site.sweep_id,
    }
    page = visitor.open(address.format(**names), shown)
    for width, scheme in SCREENS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        # Plots take their new size after the screen has it.
        page.wait_for_function("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        found = accessibility(page, *(["color-contrast"] if scheme == "dark" else []))
        assert not found, f"{width} px, {scheme}: {found}"


@pytest.mark.thorough
def test_the_documentation_shows_every_operation(visitor: Visitor) -> None:
    """`/docs`, under its Content-Security-Policy, and without a network."""
    page = visitor.page
    paths = page.request.get(f"{visitor.origin}/openapi.json").json()["paths"]
    page.goto(f"{visitor.origin}/docs")
    page.wait_for_selector(".opblock")
    assert page.locator(".opblock").count() == sum(map(len, paths.values()))
    assert page.locator(".errors-wrapper").count() == 0
    page.get_by_text("/api/v1/version", exact=True).click()
    page.get_by_text("Try it out").click()
    page.locator("button.execute").click()
    page.wait_for_selector(".live-responses-table")
    assert '"python"' in page.locator(".live-responses-table").inner_text()


def test_the_address_has_the_state_and_the_back_button_undoes_it(visitor: Visitor) -> None:
    page = visitor.open("ablations/curves", ".uplot canvas")
    page.get_by_label("logarithmic").check()
    page.get_by_role("button", name="In-dist.").click()
    page.get_by_label("Draw the curves of CoPE").check()
    page.wait_for_selector("[aria-sort=ascending]")
    address = page.url.partition("#/")[2]
    assert address == "ablations/curves?log=1&sort=in_dist%2Ftoken_error&row=CoPE"

    page = visitor.open(address, "[aria-sort=ascending]")
    assert page.get_by_label("logarithmic").is_checked()
    assert page.get_by_label("Draw the curves of CoPE").is_checked()
    assert page.locator(".legend button[aria-pressed=true]").all_inner_texts() == ["CoPE"]
    page.get_by_label("logarithmic").uncheck()
    page.wait_for_function("() => !location.hash.includes('log')")
    page.go_back()
    page.wait_for_function("() => location.hash.includes('log=1')")
    page.wait_for_selector("input:checked[data-key=logarithmic]")


def test_the_keyboard_reaches_the_main_controls(visitor: Visitor) -> None:
    page = visitor.open("ablations/tiny", ".uplot canvas")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.dataset.key ?? document.activeElement.textContent.trim()"))
        if page.evaluate("document.activeElement.getAttribute('role') === 'slider'"):
            break
    else:
        pytest.fail(f"the plot was not reached: {reached}")
    assert reached[0] == "Skip to the content"
    wanted = {"Runs", "Playground", "tab figures", "Scale longer", "CSV", "sort in_dist/token_error", "choose CoPE"}
    assert wanted | {"cell CoPE|in_dist/token_error", "metric", "logarithmic", "legend CoPE"} <= set(reached)
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith("step 5: CoPE ")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith("step 10: CoPE ")
    assert page.locator(".readout tr").all_inner_texts()[0].startswith(("CoPE\t", "Absolute\t"))
    page.keyboard.press("+")
    assert page.get_by_role("button", name="Reset zoom").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("button", name="Reset zoom").is_visible()


def test_the_theme_is_the_systems_or_the_chosen_one(browser: Browser, origin: str) -> None:
    with browser.new_context(color_scheme="dark") as context:
        page = Visitor.of(context, origin).open("sweeps", "table.sweeps")
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(ground)
        page.get_by_role("button", name="Light or dark").click()
        light = page.evaluate(ground)
        assert light != dark
        page.reload()
        assert page.evaluate(ground) == light
        page.get_by_role("button", name="Light or dark").click()
        assert page.evaluate(ground) == dark
        page.emulate_media(color_scheme="light")
        page.wait_for_function(f"() => {ground} === '{light}'")


def test_the_skip_link_and_the_dialog_of_the_key_hold_the_focus(visitor: Visitor) -> None:
    page = visitor.open("ablations", "ul.ablations")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("button", name="API key").click()
    assert page.evaluate("document.activeElement.id") == "keys-value"
    assert accessibility(page) == []
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "key"


def test_a_view_is_drawn_when_an_error_has_passed(visitor: Visitor) -> None:
    refusals = [429]
    busy = {"detail": "busy"}
    visitor.page.route(
        "**/api/v1/claims?*",
        lambda route: route.fulfill(status=refusals.pop(), json=busy) if refusals else route.fallback(),
    )
    recovered = {"ablations/tiny": "() => dispatchEvent(new Event('routechange'))"}
    recovered["ablations/tiny?metric=old"] = "() => { location.hash = '#/ablations/tiny' }"
    for address, again in recovered.items():
        page = visitor.open(address, ".error")
        assert page.locator("h1:visible").all_inner_texts() == ["This view cannot be shown"]
        page.evaluate(again)
        assert page.wait_for_selector(".uplot canvas").bounding_box()["width"] > 400
        page.locator(".claims").wait_for()
        assert page.locator("h1:visible").all_inner_texts() == ["Selective copy, tiny"]
        assert page.locator(".error").count() == 0
    assert [each for each in visitor.problems if "429" not in each and "422" not in each] == []
    visitor.problems.clear()


def test_an_address_without_a_view_is_not_found(visitor: Visitor) -> None:
    page = visitor.open("sweeps", ".view-sweeps table")
    assert page.locator("header [aria-current=page]").all_inner_texts() == ["Sweeps"]
    page.evaluate("() => { location.hash = '#/ablations/nope'; }")
    page.wait_for_function("() => document.title === 'Not found · cope-sweep'")
    for address in ("runs/%", "%", "constructor"):
        page = visitor.open(address, ".error")
        assert page.locator(".error h1").inner_text() == "Not found"
    visitor.page.close()  # it asks again and again
    assert [each for each in visitor.problems if "404" not in each] == []
    visitor.problems.clear()


@pytest.mark.thorough
def test_unchanged_answers_are_not_sent_again_and_a_hidden_tab_asks_nothing(visitor: Visitor) -> None:
    page = visitor.open("ablations/tiny", ".uplot canvas")
    again = "() => dispatchEvent(new Event('routechange'))"
    with page.expect_response(lambda response: "/curves" in response.url and response.status == 304):
        page.evaluate(again)
    page.wait_for_load_state("networkidle")
    page.evaluate("() => Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.evaluate(again)
    before = len(visitor.requests)
    page.wait_for_timeout(300)
    assert len(visitor.requests) == before
    page.evaluate("() => Object.defineProperty(document, 'hidden', { value: false })")
    with page.expect_response(lambda response: response.status == 304):
        page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")


def test_the_page_works_below_a_prefix(context: BrowserContext, site: Site, origin: str) -> None:
    cope, absolute = site.sample.ids[:2]
    both = short_ids(cope, absolute)
    with (
        httpx.Client(base_url=origin, timeout=120) as client,
        page_site.behind_proxy(client, "/user/me/proxy/8000") as address,
    ):
        visitor = Visitor.of(context, address)
        visitor.open("ablations/tiny?row=CoPE&open=CoPE|in_dist/token_error", ".uplot canvas")
        visitor.open("ablations/tiny?tab=figures", ".figures img")
        visitor.open(f"runs?sel={both}", ".uplot canvas")
        page = visitor.open(f"runs/{cope}?tab=checkpoint", "main code")
        assert f"curl -C - -O {address}/api/v1/runs/{cope}/checkpoint/" in page.locator("main code").inner_text()
        with page.expect_download() as download:
            page.get_by_role("button", name="Download model.safetensors").click()
        assert download.value.path().stat().st_size > 1000
        visitor.open(f"playground?run={cope}&ask=1&text=1 _ 0 _ > 1 0", ".matrix canvas")
        page.get_by_role("link", name="API", exact=True).click()
        page.get_by_text("/api/v1/version", exact=True).click()
        page.get_by_text("Try it out").click()
        page.locator("button.execute").click()
        page.wait_for_selector(".live-responses-table")
        assert '"python"' in page.locator(".live-responses-table").inner_text()
        page.close()
    assert visitor.problems == []


def test_a_server_with_keys_asks_for_one(context: BrowserContext, site: Site, tmp_path: Path) -> None:
    keys = KeysFile(tmp_path / "keys.txt")
    secret = keys.create("me")
    with serving(site.sample.settings(keys_file=keys.path)) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        page = visitor.open("ablations/tiny", "dialog[open]")
        assert "serve --new-key" in page.inner_text("dialog[open]"), "also where the server says why it asks"
        page.get_by_label("key", exact=True).fill(secret + "x")
        page.get_by_role("button", name="Use this key").click()
        page.wait_for_selector("dialog[open]")  # again, because the key is wrong
        page.get_by_label("key", exact=True).fill(secret)
        page.keyboard.press("Enter")
        page.wait_for_selector(".uplot canvas")
        kept = page.evaluate("[...Object.values(sessionStorage), ...Object.values(localStorage), document.cookie]")
        assert kept == [secret, ""]
        with page.expect_download() as download:
            page.get_by_role("button", name="Markdown").click()
        assert download.value.path().read_text().startswith("| position")
        visitor.open(f"playground?run={site.sample.ids[0]}&ask=1&text=1 _ > 1", ".matrix canvas")  # reading, too
        page.close()
    assert [each for each in visitor.problems if "401" not in each] == []
