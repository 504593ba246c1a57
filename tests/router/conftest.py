# SPDX-License-Identifier: Apache-2.0
"""A browser for the tests of the page."""

from __future__ import annotations

import os
import re

import pytest

from tools.browser import BrowserError, ensure


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium; where there can be none, the test is skipped, but not in CI as root."""
    from playwright.sync_api import sync_playwright

    try:
        path = ensure()
    except BrowserError as error:
        if os.environ.get("CI") and os.geteuid() == 0:
            pytest.fail(str(error))
        pytest.skip(str(error))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium):
    """Opens an address in a window of its own: ``browse(url, width, height, …)``.

    At the end nothing may have gone wrong in it, but what ``expected`` (a pattern) matches. Without
    ``real_time`` the page's clock can be moved on.
    """
    contexts, problems = [], []

    def opened(url, width=1280, height=900, *, expected="never", real_time=False, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        if not real_time:
            page.clock.install()

        def note(text):
            if not re.search(expected, text):
                problems.append(text)

        page.on("console", lambda said: said.type in ("error", "warning") and note(said.text))
        page.on("pageerror", lambda error: note(str(error)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
