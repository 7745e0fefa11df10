"""The page, written once, and a browser that has it open without a network."""

import pytest

import longitude.explore as explore
from tests.study.test_report import launched


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("explore") / "explore.html"
    explore.write(path)
    return path


@pytest.fixture(scope="module")  # while one runs, no other test in the process can start another
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = launched(playwright)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, written):
    """(width, scheme, the part of the address after #) -> the page; requests and complaints of the browser fail the test."""
    contexts, wrong = [], []

    def open_(width=1280, scheme="light", address=""):
        context = chromium.new_context(viewport={"width": width, "height": 900}, offline=True, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        url = written.as_uri() + address
        page.on("request", lambda request: request.url.split("#")[0] == written.as_uri() or wrong.append(request.url))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(url)
        page.wait_for_function("document.querySelectorAll('.picture svg').length > 0")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []
