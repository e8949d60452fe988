"""A headless Chromium for tests of the report page."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE = 30  # seconds
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVERS = ("chromedriver", "/usr/lib/chromium-browser/chromedriver")


def _found(names: tuple[str, ...]) -> str:
    """Return the path of the first program that exists. In CI a missing one is an error."""
    for name in names:
        if path := shutil.which(name):
            return path
    reason = f"needs {names[0]}: apt install chromium chromium-driver"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Start Chromium, with logs of its console and its network."""
    options = Options()
    options.binary_location = _found(BROWSERS)
    service = Service(_found(DRIVERS))
    # Root needs no-sandbox; the small /dev/shm of containers makes tabs crash.
    for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{word}")
    options.add_argument("--window-size=1280,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def open_page(driver: webdriver.Chrome, path: Path, fragment: str = "") -> None:
    """Load a page and wait until it is ready; forget earlier logs."""
    driver.get("about:blank")  # or a change of the fragment alone would not load the page
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get(path.resolve().as_uri() + fragment)
    wait(driver, "return document.body?.dataset.ready === 'true'")


def wait(driver: webdriver.Chrome, script: str) -> Any:
    """Wait until a script returns something true, and return that."""
    return WebDriverWait(driver, PATIENCE, 0.02).until(lambda d: d.execute_script(script), script)


def console_messages(driver: webdriver.Chrome) -> list[str]:
    """Return warnings and errors on the console since the last call."""
    entries = driver.get_log("browser")
    return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]


def requested_addresses(driver: webdriver.Chrome) -> list[str]:
    """Return every address that the browser asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
