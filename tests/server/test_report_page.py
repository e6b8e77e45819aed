"""fleet.html, opened from disk in a real headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bench.report import fleet
from edgellm.reports.html import page as page_of

HOSTS = 40


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "these tests need Debian's package chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "fleet.html"
    path.write_text(page_of(fleet(HOSTS)))
    return path


@pytest.fixture
def open_page(browser: Browser, path: Path) -> Iterator[Callable[..., Page]]:
    contexts = []
    faults: list[str] = []

    def open_page(scheme: str = "light") -> Page:
        contexts.append(browser.new_context(color_scheme=scheme))  # type: ignore[arg-type]
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text))
        page.on(
            "request",
            lambda request: None if request.url == path.as_uri() else faults.append(request.url),
        )
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def names(page: Page) -> list[str]:
    """Also those below the window's end: they have no rendered text yet."""
    return page.locator("tr.host:not([hidden]) th button").all_text_contents()


def test_every_host_has_a_row_and_what_needs_a_person_is_first(
    open_page: Callable[..., Page],
) -> None:
    page = open_page()
    expect(page.locator("tr.host")).to_have_count(HOSTS)
    expect(page.locator("tr.host").first).to_contain_text("failed")


def test_a_header_sorts_by_mouse_and_by_keyboard(open_page: Callable[..., Page]) -> None:
    page = open_page()
    header = page.locator("#hosts > thead").get_by_role("button", name="TTFT ms")
    header.click()
    expect(page.locator("#hosts > thead th[aria-sort=descending]")).to_have_text("TTFT ms")
    texts = page.locator("tr.host td:nth-child(4)").all_text_contents()
    slowest = [float(text) for text in texts]
    assert slowest == sorted(slowest, reverse=True)
    header.press("Enter")
    expect(page.locator("#hosts > thead th[aria-sort=ascending]")).to_have_text("TTFT ms")


def test_filters_leave_the_hosts_that_fit(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.get_by_label("Filter hosts").fill("hall-1 edge-00")
    assert names(page)
    assert all(name.startswith("hall-1-edge-00") for name in names(page))
    expect(page.locator("tr.host[hidden]").first).to_be_hidden()
    page.get_by_label("Filter hosts").fill("")
    page.locator("#statuses button.ok").click()
    assert len(names(page)) == HOSTS // 10


def test_a_host_opens_with_its_knobs_reasons_and_runs(open_page: Callable[..., Page]) -> None:
    page = open_page()
    button = page.locator("tr.host th button").first
    button.press("Enter")
    expect(button).to_have_attribute("aria-expanded", "true")
    detail = page.locator("tr.detail")
    for text in ("Knobs that are not simply in order", "Why", "Runs before", "The plan"):
        expect(detail).to_contain_text(text)
    button.click()
    expect(detail).to_have_count(0)


def test_the_command_to_go_on_is_copied(open_page: Callable[..., Page]) -> None:
    page = open_page()
    expect(page.locator("#again pre").first).to_contain_text("--limit hall-")
    page.get_by_role("button", name="Copy").first.click()
    expect(page.locator("#again .command > button").first).to_have_text("Copied")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_page_in_both_schemes(
    open_page: Callable[..., Page], scheme: str
) -> None:
    page = open_page(scheme)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
    assert dark == (scheme == "dark")
