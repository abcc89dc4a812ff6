"""A real browser, and a page in it that notes everything it complains of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evenstep.report.html.page import write_page, write_page_of_runs
from tests.browser import examples

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

BROWSERS = ("/usr/bin/chromium-headless-shell", "/usr/bin/chromium")


@dataclass
class Seen:
    """A page in the browser, what it complained of, and what it asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def note(self, message: ConsoleMessage) -> None:
        """Errors and warnings; a violation of the content policy is an error."""
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


Visit = Callable[..., Seen]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    driver = pytest.importorskip("playwright.sync_api")
    found = next((path for path in BROWSERS if Path(path).exists()), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed; apt-get install chromium-headless-shell")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    with visits(browser) as open_page:
        yield open_page


@pytest.fixture(scope="session")
def seen_compared(browser: Browser, compared: Path) -> Iterator[Seen]:
    """The page of four strategies, opened once, for tests that leave it as it was."""
    with visits(browser) as open_page:
        yield open_page(compared)


@contextmanager
def visits(browser: Browser) -> Iterator[Visit]:
    """`visit(address, color_scheme="dark")` opens a page and waits until its charts are drawn."""
    contexts = []

    def open_page(address: str | Path, width: int = 1200, **options: Any) -> Seen:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        seen = Seen(context.new_page())
        seen.page.on("console", seen.note)
        seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.goto(address.as_uri() if isinstance(address, Path) else address)
        if options.get("java_script_enabled", True):
            seen.page.wait_for_selector("body[data-drawn]")
        return seen

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of four strategies."""
    folder = tmp_path_factory.mktemp("compared")
    return write_page(examples.comparison(folder), folder)


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two plain runs."""
    path = tmp_path_factory.mktemp("ran") / "page.html"
    runs = [examples.finished(examples.record("single", 1, name="one")), examples.finished(examples.record("ddp", 2))]
    return write_page_of_runs(runs, path)
