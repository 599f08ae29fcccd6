"""Headless Chromium, driven by its command line: what a page has become once its script ran."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
SCHEMES = {"dark": 0, "light": 1}
TALLER_THAN_ANY_PAGE = 20_000


def chromium(folder: Path, page: Path | str, *options: str) -> str:
    """Open a page, a file or an address, with a profile of its own and return what is printed."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=4000",
        *options,
        page if isinstance(page, str) else page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def dom(folder: Path, page: Path | str, *, width: int = 1280, scheme: str = "light") -> str:
    """Return the page as it is after its script ran."""
    options = (f"--window-size={width},900", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}")
    return chromium(folder, page, *options, "--dump-dom")


def asked(folder: Path, page: Path, question: str, *, width: int) -> object:
    """Return what a JavaScript function body answers; `page` is the window of the page, of that width.

    The page lies in a frame, since a browser's own window has a least width. Its security policy holds there too.
    """
    outside = folder / "outside.html"
    outside.write_text(
        f'<!DOCTYPE html><iframe width="{width}" height="{TALLER_THAN_ANY_PAGE}" '
        f'srcdoc="{html.escape(page.read_text())}"></iframe><pre id="answer"></pre><script>'
        "document.querySelector('iframe').addEventListener('load', (event) => {"
        f"const page = event.target.contentWindow; const answer = (() => {{ {question} }})();"
        "document.getElementById('answer').textContent = JSON.stringify(answer); });</script>"
    )
    found = re.search(r'<pre id="answer">(.*?)</pre>', dom(folder, outside), re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found.group(1)))
