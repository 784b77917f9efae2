"""A browser, websites to visit, and a page that fails the test for what no visitor may meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.app.fake_engine import FakeEngine, Script
from tests.app.running import Website
from tests.browser import chromium
from tests.browser.visit import Visit

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 375, "height": 720}
MANY = 100_000


# Of the package, not the session: Playwright keeps an event loop running in this thread until it is closed.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    found = chromium.find()
    if found is None:
        pytest.skip("no Chromium: make test installs one, or set ARENA_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(chromium.FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def engine() -> Iterator[FakeEngine]:
    """Of all tests that script its words; each test begins with short answers for both models."""
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="package")
def shared_site(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Website]:
    folder = tmp_path_factory.mktemp("site")
    limits = {"battles_per_visitor": MANY, "battles_per_address": MANY}
    with Website(folder, engine_url=engine.url, views=True, **limits) as site:
        yield site.ready()


@pytest.fixture
def site(shared_site: Website, engine: FakeEngine) -> Website:
    """The shared website with two models, alpha and beta, that answer at once."""
    for name in ("alpha", "beta"):
        engine.say(name, Script.of(f"A short answer.\n\n- one\n- two\n\nAnd no more from this {len(name)}."))
    return shared_site


@pytest.fixture(scope="package")
def warm_contexts(browser: Browser) -> dict[bool, BrowserContext]:
    """Desktop and phone, whose caches live for all of these tests: a page then opens in a third of the time."""
    return {phone: browser.new_context(viewport=PHONE if phone else DESKTOP) for phone in (False, True)}


@pytest.fixture
def open_site(browser: Browser, warm_contexts: dict[bool, BrowserContext]):
    """open_site(website, path="/", phone=False, accepts=True, **options of a browser context of its own) -> Visit.

    Visits of one test without options are tabs of one browser; the next test has no cookie of theirs.
    """
    pages: list[Page] = []
    own: list[BrowserContext] = []

    def open_one(website: Website, path: str = "/", *, phone: bool = False, accepts: bool = True, **options) -> Visit:
        if options:
            context = browser.new_context(viewport=PHONE if phone else DESKTOP, **options)
            own.append(context)
        else:
            context = warm_contexts[phone]
        context.set_default_timeout(30_000)
        if accepts:
            context.request.post(f"{website.url}/api/notice")
        page = watched(context.new_page(), website.url)
        pages.append(page)
        return Visit(page, website).go(path)

    yield open_one
    for page in pages:
        page.close()
    for context in warm_contexts.values():
        context.clear_cookies()
    for context in own:
        context.close()
    assert [fault for page in pages for fault in page.faults] == []


def watched(page: Page, url: str) -> Page:
    """Notes in `page.faults` every script error, policy violation, dialog and request to another host."""
    page.faults = faults = []
    page.on("pageerror", lambda error: faults.append(f"script error: {error}"))
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("console", lambda message: note_console(message, faults))
    page.on("request", lambda request: note_request(request.url, urlsplit(url).netloc, faults))
    return page


def note_console(message, faults: list[str]) -> None:
    """A status of 400 and more and a lost connection show in the console too; what they mean is for each test."""
    if message.type == "error" and not message.text.startswith("Failed to load resource"):
        faults.append(f"console: {message.text}")


def note_request(url: str, own_host: str, faults: list[str]) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("data", "blob") and parts.netloc != own_host:
        faults.append(f"request to another host: {url}")


@contextmanager
def one_site(folder: Path, **options) -> Iterator[Website]:
    """A website of this test's own."""
    with Website(folder, views=True, **options) as website:
        yield website
