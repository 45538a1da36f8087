"""The page at `/`, in a real browser: chat that streams, what a key and an error look like, the engine's state."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.api.conftest import Front, FrontFactory
from tests.helpers.server import ServerProcess

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SECONDS = 60.0

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium and chromedriver on the path: apt-get install chromium chromium-driver",
)


class Page:
    """The page as somebody sees and uses it."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver
        self._wait = WebDriverWait(driver, SECONDS, poll_frequency=0.05)

    def open(self, base_url: str) -> None:
        self.driver.get(base_url)
        self.wait_for(lambda: self.element("model").get_attribute("value") or self.text("problem"))

    def element(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return self.element(name).text

    def answers(self) -> list[str]:
        return [found.text for found in self.driver.find_elements(By.CSS_SELECTOR, ".assistant .content")]

    def facts(self) -> str:
        return self.driver.find_elements(By.CSS_SELECTOR, ".assistant .facts")[-1].text

    def ask(self, text: str) -> None:
        self.element("question").send_keys(text, Keys.ENTER)

    def set(self, name: str, value: str) -> None:
        if not self.element(name).is_displayed():
            self.driver.find_element(By.CSS_SELECTOR, "form summary").click()
        self.element(name).send_keys(value, Keys.TAB)

    def wait_for(self, condition: object) -> None:
        self._wait.until(lambda _: condition())  # type: ignore[operator]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--window-size=1100,800",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield Page(driver)
    driver.quit()


def test_its_files_come_without_a_key_and_may_load_nothing_foreign(make_front: FrontFactory) -> None:
    front = make_front(api_key=("secret",))
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        response = front.client.get(path)
        assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "http://" not in response.text and "https://" not in response.text


@needs_browser
def test_a_chat_streams_and_markup_stays_text(page: Page, front: Front) -> None:
    page.open(front.base_url)
    page.ask("say <b>bold</b> <img src=x onerror=alert(1)>")
    page.wait_for(lambda: page.answers() and "tokens" in page.facts())
    assert page.answers() == ["<b>bold</b> <img src=x onerror=alert(1)>"]
    page.ask("say again")
    page.wait_for(lambda: page.answers()[1:] == ["again"] and "tokens" in page.facts())
    # The second request carries the first question and answer.
    prompt = front.engine.seen[-1]["prompt"]
    assert "bold</b>" in (prompt if isinstance(prompt, str) else front.engine.tokenizer.decode(prompt))
    addresses = page.driver.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert addresses and all(address.startswith(front.base_url) for address in addresses)
    assert [entry for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"] == []
    page.element("clear").click()
    assert page.answers() == []


@needs_browser
def test_an_answer_can_be_stopped(page: Page, front: Front) -> None:
    page.open(front.base_url)
    page.ask("hang 3")
    page.wait_for(lambda: page.answers() == ["He"])
    page.element("stop").click()
    page.wait_for(lambda: "stopped" in page.facts())
    page.wait_for(lambda: not front.engine.live)
    assert page.element("send").is_enabled()


@needs_browser
def test_an_error_is_told_and_the_question_kept(page: Page, front: Front) -> None:
    page.open(front.base_url)
    page.set("max-tokens", "100000")
    page.ask("say anything")
    page.wait_for(lambda: page.text("problem"))
    assert "100000 more were asked for" in page.text("problem") and page.answers() == []
    assert page.element("question").get_attribute("value") == "say anything"


@needs_browser
def test_a_server_with_keys_asks_for_one(page: Page, make_front: FrontFactory) -> None:
    page.open(make_front(api_key=("secret",)).base_url)
    assert "key" in page.text("problem")
    page.set("key", "secret")
    page.wait_for(lambda: page.element("model").get_attribute("value") == "fake")
    assert not page.text("problem")
    page.ask("say open")
    page.wait_for(lambda: page.answers() == ["open"])


@needs_browser
def test_the_engines_state_is_that_of_the_metrics(page: Page, tiny: ServerProcess, tmp_path: Path) -> None:
    page.open(tiny.base_url)
    body = {"model": "tiny", "prompt": "x", "n": 32, "max_tokens": 400, "ignore_eos": True}
    enough = threading.Event()

    def keep_busy() -> None:
        while not enough.is_set():
            httpx.post(f"{tiny.base_url}/v1/completions", json=body, timeout=60).raise_for_status()

    with ThreadPoolExecutor() as pool:
        busy = pool.submit(keep_busy)
        try:
            page.wait_for(lambda: page.text("running") == "1" and page.text("kv") not in ("–", "0.0 %"))
            page.wait_for(lambda: float(page.text("rate").replace("–", "0")) > 0)
            assert page.text("waiting") == "0"
        finally:
            enough.set()
        busy.result()
    page.wait_for(lambda: page.text("running") == "0")
    picture = tmp_path / "page.png"
    assert page.driver.save_screenshot(str(picture)) and picture.stat().st_size > 5_000
