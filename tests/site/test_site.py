"""The site, as a reader's browser sees it: built without a warning, opened from the file system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import collectives as cc
from launcher import ROOT
from requirements import needs, require

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("site")]

# Of each kind of page one, which is looked at in both colour schemes; the others in one of them.
IN_BOTH = {"index", "operations", "algorithms", "errors", "benchmarks/README", "api/collectives"}
# A look takes seconds where cores are slow: the pages are divided, since a test has a limit.
PARTS = 4
# Query -> the page that must be first.
FIRST = {
    "DDP": "torch-backend",
    "allreduce": "operations/reductions",
    "benchmarks": "benchmarks/README",
    "broadcast": "operations",
    "checkpoint": "how-to/checkpoints",
    "compression fp16": "how-to/sixteen-bits",
    "elastic": "reliability",
    "gpu": "how-to/gpus",
    "hang": "how-to/hangs",
    "horovod": "migrate-from-horovod",
    "install": "start",
    "jax": "jax",
    "jupyter": "faq",
    "keras": "keras",
    "launcher mpirun": "how-to/my-launcher",
    "learning rate": "optimizers",
    "mixed precision": "how-to/sixteen-bits",
    "mpi4py": "operations/mpi4py",
    "parameter server": "parameter-server",
    "queues": "input",
    "resume training": "checkpoints",
    "seed": "faq",
    "slurm": "slurm",
    "timeout": "when-it-hangs",
    "torch backend": "torch-backend",
    "uneven data": "how-to/uneven-data",
}
# Texts of errors, settings and names -> the page that must be first.
FIRST_OF_NAMES = {
    "All messages": "api/messages",
    "UNISONO_CHECK=always shows the difference": "api/messages",
    "UNISONO_TIMEOUT": "settings",
    "all-reduce": "operations/reductions",
    "has ended its program": "errors",
    "calls differ between ranks": "errors",
    "spare replicas": "spare-replicas",
}
PHONE = {"width": 390, "height": 800}
# Blocks of code that are wider than their place.
CUT_OFF = """selector => [...document.querySelectorAll(selector)]
    .filter(block => block.scrollWidth > block.clientWidth).map(block => block.innerText)"""


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


def search(page, site: Path, words: str) -> list[str]:
    """Return the names of the pages that the search of the home page finds."""
    page.goto(address(site, "index"))
    page.locator("input[name=q]").first.fill(words)
    page.keyboard.press("Enter")
    page.wait_for_function("() => /found for/.test(document.body.innerText)")
    found = page.eval_on_selector_all("#search-results > li > a", "all => all.map(a => a.pathname)")
    return [str(Path(unquote(path)).relative_to(site).with_suffix("")) for path in found]


@pytest.mark.parametrize("words", FIRST)
def test_a_search_finds_the_page_first(site, page, words):
    names = search(page, site, words)
    assert names[0] == FIRST[words], names[:5]
    assert "api/messages" not in names[:5]


@pytest.mark.parametrize("words", FIRST_OF_NAMES)
def test_a_search_finds_names_and_texts(site, page, words):
    names = search(page, site, words)
    assert names[0] == FIRST_OF_NAMES[words], names[:5]


def test_a_search_shows_excerpts_and_leads_to_sections(site, page):
    assert search(page, site, "jupyter notebooks") == ["faq", "how-to/notebooks"]
    marked = page.locator("#search-results > li").first.locator("p mark")
    assert set(marked.all_inner_texts()) == {"notebook"}
    page.locator("#search-results > li > a").first.click()
    assert page.url.endswith("faq.html#does-it-work-in-a-jupyter-notebook")
    page.wait_for_selector("#does-it-work-in-a-jupyter-notebook")


def test_a_search_without_a_result_says_so(site, page):
    assert search(page, site, "xylophone") == []
    assert page.inner_text("#search-status") == '0 pages found for "xylophone"'


def test_no_code_is_cut_off_on_a_desktop(site, page):
    cut: dict[tuple[str, int], list[str]] = {}
    blocks = 0
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        for width in (1440, 1920):
            page.set_viewport_size({"width": width, "height": 900})
            blocks += page.locator("pre").count()
            if found := page.evaluate(CUT_OFF, "pre"):
                cut[str(path.relative_to(site)), width] = found
    assert blocks > 1000
    assert not cut


def test_output_has_no_colours_and_code_has(site, page):
    page.goto(address(site, "start"))
    output = page.locator(".highlight-none pre")
    assert "rank 0 of 2: [0. 1. 2.]" in output.first.inner_text()
    assert output.locator("span[class]").count() == 0
    assert page.locator(".highlight-python pre span.kn").count() > 0


def test_a_button_copies_code_without_prompts_and_output(site, page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copied = "() => navigator.clipboard.readText()"
    for name, text in {
        "start": "import numpy as np\nimport collectives as cc\n\ncomm = cc.init()\nx = ",
        "operations": "import numpy as np\nimport collectives as cc\ncomm = cc.init()\nmean = ",
    }.items():
        page.goto(address(site, name))
        page.locator(".highlight-python").first.hover()
        page.locator(".highlight-python .copy").first.click()
        page.wait_for_selector(".copy:has-text('Copied')")
        assert page.evaluate(copied).startswith(text)
        assert "(3, True)" not in page.evaluate(copied)


def test_every_page_shows_the_version_and_its_stage(site, page):
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    stage = re.findall(r"Development Status :: \d - (\w+)", settings["metadata"]["classifiers"])
    for name in ("index", "start", "api/collectives"):
        page.goto(address(site, name))
        shown = page.locator(".sidebar-brand-text").inner_text()
        assert shown == f"Unisono {cc.__version__} ({stage[0].lower()})"


def test_pages_lead_to_their_sources_and_to_files_that_they_name(site, page):
    for name, selector, file in [
        ("start", ".view-this-page a", "docs/start.md"),
        (
            "model-parallel",
            "a:has(:text-is('examples/vertical_split.py'))",
            "examples/vertical_split.py",
        ),
        ("architecture", "a:has(:text-is('core/topology.py'))", "collectives/core/topology.py"),
    ]:
        page.goto(address(site, name))
        target = page.locator(selector).first.evaluate("link => link.pathname")
        assert Path(unquote(target)).read_text() == (ROOT / file).read_text()


def test_a_phone_shows_pages_without_scrolling_sideways_and_has_the_navigation(site, page):
    page.set_viewport_size(PHONE)
    for name in names_of(site):
        page.goto(address(site, name))
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= PHONE["width"], name
        assert page.evaluate(CUT_OFF, ".highlight-none pre") == [], name
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
