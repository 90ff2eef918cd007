"""The page at ``/`` in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from oscar_serving.engines.hf import Engine

from .conftest import Served, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")


def test_page_needs_nothing_from_elsewhere(served: Served) -> None:
    response = served.client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    [nonce] = set(re.findall(r"'nonce-([^']+)'", policy))
    assert response.text.count(f'nonce="{nonce}"') == 3
    assert not re.search(r"(src|href)=\"(?!data:,)", response.text)
    assert nonce not in served.client.get("/").text


def test_names_are_escaped(load: Callable[..., Engine]) -> None:
    name = '</script><script>alert("x")</script>'
    with serve(load(), served_model_names=(name,)) as served:
        text = served.client.get("/").text
        assert name not in text
        assert text.count("</script>") == 2


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=[*quiet, "--disable-sync", "--disable-quic"])
        yield chromium
        chromium.close()


def _is_complaint(message: ConsoleMessage) -> bool:
    """Errors, but for the note that a response had an error's status, which one test is about."""
    return message.type == "error" and "Failed to load resource" not in message.text


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, served: Served, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The loaded page; whatever the browser complains about fails the test."""
    complaints: list[str] = []
    tab = browser.new_page(color_scheme=request.param, base_url=served.url)
    tab.on("console", lambda message: complaints.append(message.text) if _is_complaint(message) else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda call: None if call.url.startswith((served.url, "data:")) else complaints.append(call.url))
    tab.goto("/")
    yield tab
    tab.close()
    assert not complaints


@in_a_browser
def test_chat_by_keyboard_alone(page: Page, served: Served) -> None:
    from playwright.sync_api import expect

    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    expect(page.locator("#log p")).to_have_count(2)
    assert page.locator("#log p").first.inner_text() == "You\nfirst line\nsecond line"
    # The random model talks until the context is full; the answer grows until Escape.
    expect(page.locator("#log p").last).to_have_text(re.compile(r".{20}", re.DOTALL))
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled()
    served.wait_until_idle()


@in_a_browser
def test_gauges_follow_the_engine(page: Page, served: Served) -> None:
    from playwright.sync_api import expect

    body = {"prompt": "x" * 600, "max_tokens": 1400, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        expect(page.locator("#running")).to_have_text("1")
        bar = page.locator("[data-tier=int2] .bar")
        expect(bar).to_have_attribute("aria-label", re.compile(r"^[1-9][\d,]* in use"))
        expect(bar.locator(".used")).not_to_have_css("width", "0px")
    expect(page.locator("#running")).to_have_text("0")


@in_a_browser
def test_errors_are_shown(page: Page) -> None:
    from playwright.sync_api import expect

    page.fill("#text", "word " * 2000)
    page.click("#send")
    expect(page.locator("#log p.error")).to_contain_text("context")


@in_a_browser
def test_text_is_readable(page: Page) -> None:
    """Contrast of 4.5 to 1 between each text's colour and what it stands on."""
    poor = page.evaluate(
        """() => {
          const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
            .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
          const ground = (element) => {
            for (let e = element; e; e = e.parentElement) {
              const colour = rgb(getComputedStyle(e).backgroundColor);
              if (colour.length === 3 || colour[3] > 0) return colour;
            }
            return [255, 255, 255];
          };
          return [...document.querySelectorAll("h1, h2, p, dt, dd, span, label, small, button:enabled, textarea")]
            .filter((element) => element.offsetParent)
            .map((element) => {
              const [a, b] = [light(rgb(getComputedStyle(element).color)), light(ground(element))];
              return [element.outerHTML.slice(0, 60), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
            })
            .filter(([, contrast]) => contrast < 4.5);
        }"""
    )
    assert poor == []
