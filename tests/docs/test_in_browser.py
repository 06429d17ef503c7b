"""The documentation in a browser: nothing is cut off on a phone or a screen, search finds what it should.

Needs Chromium (Debian's package ``chromium``), on PATH or named by the variable CHROMIUM.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from kit.places import ROOT

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH, nor in the variable CHROMIUM"),
]

# In each page: what ends outside of the window, and is in no element of the article that scrolls.
MEASURE = """
<script>
  const scrolls = e =>
    e.tagName != "ARTICLE" && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  addEventListener("load", () => setTimeout(() => {
    const wide = [...document.querySelectorAll("article *")]
      .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e)).map(e => e.outerHTML.slice(0, 120));
    const broken = [...document.images].filter(e => !e.naturalWidth).map(e => e.src);
    const page = document.documentElement.scrollWidth;
    parent.postMessage({name: document.title, page, window: innerWidth, wide, broken}, "*");
  }, 50));
</script>
"""
# Loads one page after the other into a frame of the window's width.
HARNESS = """
<body><script>
  const pages = PAGES, found = [];
  const frame = document.createElement("iframe");
  frame.width = WIDTH; frame.height = 900; document.body.append(frame);
  const next = () => {
    if (pages.length) frame.src = pages.shift();
    else document.body.dataset.found = JSON.stringify(found);
  };
  addEventListener("message", e => { found.push(e.data); next(); });
  next();
</script></body>
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def dom_of(folder: Path, page: str) -> tuple[str, str]:
    """Return a page's document once its scripts have run, and what Chromium has logged."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += ["--window-size=1400,1000", "--virtual-time-budget=120000"]
    # The search reads pages by fetch(), which browsers refuse for files.
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{page}"
        try:
            done = subprocess.run([*command, address], capture_output=True, text=True, timeout=300, check=True)
        finally:
            server.shutdown()
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, built = tmp_path_factory.mktemp("site"), ROOT / "docs" / "_build" / "html"
    if built.exists():  # of `make docs`: only pages that have changed since are built
        shutil.copytree(built, folder, dirs_exist_ok=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", ROOT / "docs", folder]
    subprocess.run(command, check=True, timeout=600)
    return folder


def pages_of(site: Path) -> list[str]:
    pages = [str(page.relative_to(site)) for page in sorted(site.rglob("*.html"))]
    return [
        page for page in pages if not page.startswith(("api/generated", "_modules", "search", "genindex", "py-mod"))
    ]


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_cut_off(width: int, site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    pages = pages_of(folder)
    for page in pages:
        path = folder / page
        path.write_text(path.read_text().replace("</body>", MEASURE + "</body>"))
    harness = folder / "harness.html"
    harness.write_text(HARNESS.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width)))
    dom, logged = dom_of(folder, harness.name)
    text = re.search(r'data-found="([^"]*)"', dom)
    assert text is not None, dom[-2000:]
    found: list[dict[str, Any]] = json.loads(html.unescape(text[1]))
    assert len(found) == len(pages)
    wrong = [one for one in found if one["wide"] or one["broken"] or one["page"] > one["window"] + 1]
    assert wrong == []
    assert logged == ""


@pytest.mark.parametrize("words, title", [("load_best", "Checkpoints"), ("class weights", "Common tasks")])
def test_search_finds(words: str, title: str, site: Path) -> None:
    dom, logged = dom_of(site, f"search.html?q={words.replace(' ', '+')}")
    results = re.findall(r'<a href="[^"]*"[^>]*>([^<]+)</a>', dom.partition('class="search"')[2])
    assert any(title in result for result in results), results
    assert logged == ""
