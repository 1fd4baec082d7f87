"""The site, as a reader's browser sees it: built without a warning, opened from the file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from launcher import ROOT
from requirements import needs, require

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("site")]

# Of each kind of page one, which is looked at in both colour schemes; the others in one of them.
IN_BOTH = {"index", "operations", "algorithms", "errors", "benchmarks/README", "api/collectives"}
# A look takes seconds where cores are slow: the pages are divided, since a test has a limit.
PARTS = 4
SEARCHES = {
    "allreduce": {"operations", "api/collectives", "algorithms"},
    "spare replicas": {"spare-replicas", "tutorials/spare-replicas"},
    "ranks do not mean the same call": {"errors"},
    "has ended its program": {"errors"},
    "UNISONO_CHECK=always says in what they differ": {"api/messages"},
    "UNISONO_TIMEOUT": {"settings", "when-it-hangs"},
}
PHONE = {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder with the pages."""
    needs("sphinx", "myst_parser", "furo")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(folder)], capture_output=True, text=True, timeout=540
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def browser():
    """Chromium, of the system."""
    needs("playwright")
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chrome")
    if path is None:
        require("site", "there is no chromium on PATH")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, site):
    """An empty page; what its console says, or what it does not find, is an error at the end."""
    opened = browser.new_page()
    trouble: list[str] = []
    opened.on("console", lambda said: trouble.append(said.text) if said.type == "error" else None)
    opened.on("pageerror", lambda error: trouble.append(str(error)))
    opened.on("requestfailed", lambda request: trouble.append(f"{request.url}: {request.failure}"))
    yield opened
    opened.close()
    assert not trouble


def address(site: Path, name: str) -> str:
    """Where a page is, without a server."""
    return (site / f"{name}.html").as_uri()


def names_of(site: Path) -> list[str]:
    """The pages that people read, in order; not the sources that viewcode shows."""
    paths = [path for path in sorted(site.rglob("*.html")) if "_modules" not in path.parts]
    return [str(path.relative_to(site).with_suffix("")) for path in paths]


class Anchors(HTMLParser):
    """The ids of a page, and where it leads to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        """Take what an element says."""
        said = dict(attributes)
        self.ids |= {said[name] for name in ("id", "name") if said.get(name)}
        self.targets += [said[name] for name in ("href", "src") if said.get(name)]


def test_every_link_leads_to_a_file_and_an_anchor_that_are_there(site):
    pages = {path: Anchors(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 60
    lost = []
    for path, here in pages.items():
        if "_modules" in path.parts:
            continue  # of viewcode, which takes names of one source to be described on one page
        for target in here.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchored = parts.fragment and file in pages and unquote(parts.fragment)
            if not file.exists() or (anchored and anchored not in pages[file].ids):
                lost.append(f"{path.relative_to(site)}: {target}")
    assert not lost


def test_every_page_loads_without_an_error_or_a_missing_file(site, page):
    names = names_of(site)
    assert len(names) > 70
    for name in names:
        page.goto(address(site, name))
        assert page.title()
        broken = "() => [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
        assert page.evaluate(broken) == [], name


@pytest.mark.parametrize("words", SEARCHES)
def test_a_search_finds_the_page(site, page, words):
    page.goto(address(site, "index"))
    page.locator("input[name=q]").first.fill(words)
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a", timeout=20_000)
    page.wait_for_function("() => /found|matching/.test(document.body.innerText)")
    found = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.pathname)")
    names = [str(Path(unquote(path)).relative_to(site).with_suffix("")) for path in found]
    assert SEARCHES[words] & set(names[:10]), names[:10]


def test_a_phone_shows_pages_without_scrolling_sideways_and_has_the_navigation(site, page):
    page.set_viewport_size(PHONE)
    for name in names_of(site):
        page.goto(address(site, name))
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= PHONE["width"], name
    page.goto(address(site, "index"))
    link = page.locator(".sidebar-tree a", has_text="Quickstart")
    box = link.bounding_box()
    assert box is None or box["x"] + box["width"] <= 0  # beside the screen
    page.locator("label[for=__navigation]:visible").click()
    link.click()
    assert "Quickstart" in page.title()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_can_be_read_by_everybody(site, browser, scheme, part):
    """Contrast, alternative texts and the like, by axe: each page in one scheme, some in both."""
    needs("axe_playwright_python")
    from axe_playwright_python.sync_playwright import Axe

    rules = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa"]}}
    rules["resultTypes"] = ["violations"]  # what is well, of thousands of elements, is not told
    page = browser.new_page(color_scheme=scheme)
    violations = {}
    chosen = [
        name
        for number, name in enumerate(names_of(site))
        if name in IN_BOTH or number % 2 == (scheme == "dark")
    ]
    for name in chosen[part::PARTS]:
        page.goto(address(site, name))
        found = Axe().run(page, options=rules)
        if found.violations_count:
            violations[name] = found.generate_report()
    page.close()
    assert not violations
