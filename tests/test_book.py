"""The static book: complete, well formed, nothing from outside; its switch, search, phone layout.

Built once, into a temporary folder. The browser tests need Chromium or Chrome on this machine.
"""

import html
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("myst_nb", reason="the book's packages are not installed (the extra 'book')")
pytest.importorskip("sphinx_book_theme", reason="the book's packages are not installed")

CHAPTERS = Path(__file__).resolve().parents[1] / "chapters"
NOTEBOOKS = sorted(CHAPTERS.glob("*.ipynb"))
PAGES = [*(f"{n.stem}.html" for n in NOTEBOOKS), "index.html", "book/exercises.html",
         "book/documents.html"]  # fmt: skip
BROWSERS = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
            "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"]  # fmt: skip
PHONE = {"width": 390, "height": 844}

each_notebook = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
each_page = pytest.mark.parametrize("name", PAGES)


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", CHAPTERS / "book",
         "-d", folder / "doctrees", CHAPTERS, folder / "html"],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


# Without a browser.


class Reader(HTMLParser):
    """Checks that tags nest, and gathers what a page loads by itself."""

    VOID = {"br", "hr", "img", "input", "link", "meta", "source", "wbr"}

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.languages = [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("script", "img", "iframe", "source", "video", "audio"):
            self.loads.append(attributes.get("src") or "")
        if tag == "link":
            self.loads.append(attributes["href"])
        if tag == "div" and "lang" in attributes:
            self.languages.append(attributes["lang"])

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def read(book: Path, name: str) -> str:
    return (book / name).read_text(encoding="utf-8")


@each_page
def test_page_is_well_formed_bilingual_and_loads_nothing_from_outside(book, name):
    reader = Reader()
    reader.feed(read(book, name))
    assert reader.open == []
    assert reader.loads
    assert not [link for link in reader.loads if re.match(r"(\w+:)?//", link)]
    if name != "book/documents.html":  # a table in both languages at once
        assert reader.languages and set(reader.languages) == {"zh", "en"}
        assert reader.languages.count("zh") == reader.languages.count("en")


def test_styles_load_nothing_from_outside(book):
    styles = [file.read_text(encoding="utf-8") for file in book.rglob("*.css")]
    assert len(styles) > 2
    for style in styles:
        assert not re.search(r"""(url\(|@import)\s*["']?(https?:)?//""", style)


@each_notebook
def test_committed_outputs_formulas_and_pictures_are_there(book, file):
    page = read(book, f"{file.stem}.html")
    text = re.sub(r"\s+", "", html.unescape(re.sub(r"<[^>]+>", "", page)))
    pictures = formulas = 0
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"```.*?```|`[^`\n]*`", "", cell.source, flags=re.DOTALL)
            formulas += len(re.findall(r"\$\$[^$]+\$\$|\$[^$\n]+\$", prose))
            continue
        assert re.sub(r"\s+", "", cell.source) in text
        for output in cell.outputs:
            pictures += "image/png" in output.get("data", {})
            if output.output_type == "stream":
                assert re.sub(r"\s+", "", output.text) in text, cell.source
    assert len(re.findall(r'<img alt="图 Figure: [^"]+" src="_images/', page)) == pictures
    assert page.count("<math ") == formulas


@each_notebook
def test_headings_are_marked_in_their_languages(book, file):
    page = html.unescape(read(book, f"{file.stem}.html"))
    separator = '<span class="both-languages"> | </span>'
    headings = re.findall(r"<h[1-3]>(.+?)<a class", page)
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#") and " | " in cell.source:
            level, text = cell.source.split(" ", 1)
            zh, en = text.split(" | ")
            common = ""
            if len(level) < 3 and zh[1] == ".":  # "2. DDP: 数据" and "2.1 原理" share a number
                common = re.match(r"[\d.]+ (\w+: )?", zh).group()
            expected = (
                f'{common}<span lang="zh">{zh.removeprefix(common)}</span>{separator}'
                f'<span lang="en">{en}</span>'
            )
            assert expected in headings


def test_navigation_leads_to_every_page_in_both_languages(book):
    navigation = read(book, "index.html").split('aria-label="Main"')[1].split("</nav>")[0]
    assert all(f'href="{name}"' in navigation for name in PAGES if name != "index.html")
    assert '2. DDP: <span lang="zh">分布式数据并行</span>' in navigation
    assert '<span lang="en">Distributed Data Parallel</span>' in navigation


def test_sections_of_the_documents_link_to_their_chapters(book):
    page = read(book, "book/documents.html")
    assert all(f'href="../{file.stem}.html"' in page.split("<article")[1] for file in NOTEBOOKS)


# In a browser, from the disk as a reader opens it.


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("there is no Chromium or Chrome on this machine")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page of a fresh reader; whatever it complains about or asks from outside fails the test."""
    context = browser.new_context()
    context.set_default_timeout(20_000)
    page = context.new_page()
    complaints = []
    page.on("console", lambda m: m.type in ("error", "warning") and complaints.append(m.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: r.url.startswith(("file:", "data:")) or complaints.append(r.url))
    yield page
    context.close()
    assert complaints == []


def choose(page, language: str) -> None:
    page.locator(f"[data-show-language={language}]").click()


def shown(page) -> dict:
    """How many blocks of each language the article, and titles the navigation, show."""
    return page.evaluate(
        """() => Object.fromEntries(["article", "nav.bd-docs-nav"].flatMap((place) =>
             ["zh", "en"].map((lang) => [`${place} ${lang}`, [...document.querySelectorAll(
               `${place} [lang=${lang}]`)].filter((e) => e.getClientRects().length).length])))"""
    )


def test_switch_hides_a_language_everywhere_and_is_remembered(book, page):
    address = (book / "02_ddp.html").as_uri()
    page.goto(address)
    everything = shown(page)
    assert min(everything.values()) > 5
    for language, other, name in (("zh", "en", "zh-CN"), ("en", "zh", "en")):
        choose(page, language)
        expected = {k: 0 if k.endswith(other) else n for k, n in everything.items()}
        assert shown(page) == expected
        page.reload()
        assert shown(page) == expected
        assert page.locator("html").get_attribute("lang") == name
        pressed = page.locator("[data-show-language][aria-pressed=true]")
        assert pressed.get_attribute("data-show-language") == language
        title = page.locator("article h1").inner_text()
        assert title.startswith("2. DDP: ") and "|" not in title
    page.goto((book / "book" / "exercises.html").as_uri())  # every page of the book, one choice
    assert shown(page)["article zh"] == 0 < shown(page)["article en"]
    choose(page, "both")
    page.goto(address)
    assert shown(page) == everything


def test_choice_stands_before_anything_is_painted(book, page):
    page.add_init_script(
        """new MutationObserver((_, observer) => {
             if (!document.body) return;
             window.atFirst = document.documentElement.dataset.language;
             observer.disconnect();
           }).observe(document, { childList: true, subtree: true })"""
    )
    page.goto((book / "index.html").as_uri())
    choose(page, "en")
    page.goto((book / "01_overview.html").as_uri())
    assert page.evaluate("atFirst") == "en"


def test_switching_keeps_the_place(book, page):
    page.goto((book / "02_ddp.html").as_uri())
    heading = page.locator("h3", has_text="Step 2: one flat buffer")
    heading.evaluate("e => e.scrollIntoView({ behavior: 'instant' })")
    place = heading.bounding_box()["y"]
    assert 0 < place < 500
    for language in ("en", "zh", "both"):
        # Not click(), which would scroll a sticky button into view first.
        page.locator(f"[data-show-language={language}]").evaluate("button => button.click()")
        assert abs(heading.bounding_box()["y"] - place) < 5


@each_page
def test_page_shows_everything_and_fits_a_phone(book, page, name):
    page.set_viewport_size(PHONE)
    page.goto((book / name).as_uri())
    for language in ("zh", "en", "both"):
        choose(page, language)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], language
    missing = page.evaluate(
        """() => [...document.querySelectorAll("article img, article math")].filter((e) =>
             e.tagName === "IMG" ? !e.complete || !e.naturalWidth
                                 : e.getBoundingClientRect().width < 3).length"""
    )
    assert missing == 0
    too_wide = page.evaluate(
        """() => [...document.querySelectorAll("article pre, article img, article table")]
             .filter((e) => e.getBoundingClientRect().right > innerWidth
                            && !e.closest(".pst-scrollable-table-container"))
             .map((e) => e.outerHTML.slice(0, 200))"""
    )
    assert too_wide == []


def test_menu_of_a_phone_leads_to_a_chapter(book, page):
    page.set_viewport_size(PHONE)
    page.goto((book / "index.html").as_uri())
    page.locator("button.primary-toggle").locator("visible=true").click()
    page.locator("nav.bd-docs-nav a", has_text="4. FSDP").locator("visible=true").click()
    page.wait_for_url("**/04_fsdp.html")


@pytest.mark.parametrize("words, chapter", [("扁平参数", "04_fsdp"), ("桶", "04_fsdp"),
                                            ("overlapped with backward", "02_ddp")])  # fmt: skip
def test_search_opens_a_page_where_the_words_stand(book, page, words, chapter):
    page.goto((book / "index.html").as_uri())
    page.locator("button.search-button-field").locator("visible=true").click()
    page.locator("dialog input[type=search]").fill(words)
    page.keyboard.press("Enter")
    page.locator(f"#search-results a[href*='{chapter}']").first.click()
    page.wait_for_url(f"**/{chapter}*")
    page.wait_for_function("scrollY > 100")
