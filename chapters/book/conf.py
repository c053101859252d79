"""The static book of the chapters: `make book`, then open out/book/index.html.

The notebooks are shown as they are committed; nothing is executed, and a page fetches nothing from
outside: formulas become MathML here, and the theme brings its own fonts and scripts.
"""

import re

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.lexers import Python3Lexer
from pygments.token import Keyword, Operator, Text
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

project = "minidist"
author = "minidist contributors"
html_title = "minidist"
root_doc = "index"
extensions = ["myst_nb"]
exclude_patterns = ["**/.ipynb_checkpoints"]

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # would come from outside; a widget shows as the text or picture beside it
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
nb_render_error_lexer = "myst-ansi"  # our errors are no Python tracebacks
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath"]
smartquotes = False  # quotes and dashes as they are in the notebooks

html_theme = "sphinx_book_theme"
html_theme_options = {
    "navbar_persistent": [],
    "article_header_end": ["language-switch.html", "article-header-buttons.html"],
    "footer_content_items": [],
    "toc_title": "本页 | On this page",
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
html_context = {"default_mode": "auto"}  # light or dark as the system is
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]  # not deferred: the choice stands before anything is painted
html_copy_source = False
html_show_sourcelink = False
html_use_index = False
html_search_language = "zh-en"

# The theme's own words that a reader sees.
WORDS = {
    "Search": "搜索 Search",
    "Search Results": "搜索结果 Search Results",
    "previous": "上一页 previous",
    "next": "下一页 next",
    "previous page": "上一页 previous page",
    "next page": "下一页 next page",
    "Color mode": "明暗 Color mode",
    "System Settings": "跟随系统 System Settings",
    "Light": "浅色 Light",
    "Dark": "深色 Dark",
    "Back to top": "回到顶部 Back to top",
}

# "2. DDP: 数据分布式并行 | Distributed Data Parallel": what both languages share, 中文, English
TITLE = re.compile(r"((?:\d\.\d? (?!节))?(?:[A-Za-z]+: )?)(.+?) \| (.+)")


class BilingualTitles(SphinxTransform):
    """Mark the two languages of a title, so that the switch works on headings and navigation too."""

    default_priority = 400  # before Sphinx collects the titles for the navigation

    def apply(self, **kwargs) -> None:
        for title in self.document.findall(nodes.title):
            parts = TITLE.fullmatch(title.astext())
            if parts is None or len(title.children) != 1:
                continue
            common, chinese, english = parts.groups()
            # docutils writes the class language-zh as lang="zh".
            title.children = []
            title += nodes.Text(common)
            title += nodes.inline("", chinese, classes=["language-zh"])
            title += nodes.inline("", " | ", classes=["both-languages"])
            title += nodes.inline("", english, classes=["language-en"])


class SearchBoth(SearchEnglish):
    """Finds English words and, without a dictionary, every one or two characters of Chinese in a row.

    The browser cuts what is searched for into the same pieces.
    """

    lang = "zh-en"
    pieces = re.compile(r"[a-zA-Z0-9_]+|[\u3400-\u9fff]+")
    js_splitter_code = r"""
function splitQuery(query) {
  return (query.match(/[a-zA-Z0-9_]+|[\u3400-\u9fff]+/g) || []).flatMap((piece) =>
    piece < "\u3400" || piece.length < 3
      ? [piece]
      : Array.from({ length: piece.length - 1 }, (_, i) => piece.slice(i, i + 2)));
}
"""

    def split(self, text: str) -> list[str]:
        found = []
        for piece in self.pieces.findall(text):
            if piece < "\u3400":
                found.append(piece)
            else:
                found += [*piece, *(piece[i : i + 2] for i in range(len(piece) - 1))]
        return found


class RanksLexer(IPython3Lexer):
    """Colours what follows ``%%ranks 4`` as Python."""

    tokens = {**IPython3Lexer.tokens}
    tokens["root"] = [
        (
            r"(?s)(%%)(ranks)([^\n]*\n)(.*)",
            bygroups(Operator, Keyword, Text, using(Python3Lexer)),
        ),
        *tokens["root"],
    ]


def write_math(writer, node) -> None:
    """MathML, which every browser of today shows by itself."""
    block = isinstance(node, nodes.math_block)
    mathml = tex2mathml(node.astext(), as_block=block)
    writer.body.append(f'<div class="formula">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


def describe_pictures(app, doctree, docname) -> None:
    """A picture is read out as that of its section, not as a file name."""
    for section in doctree.findall(nodes.section):
        for picture in section.findall(nodes.image):  # an inner section comes later
            picture["alt"] = f"图 Figure: {section.next_node(nodes.title).astext()}"


def use_both_languages(app, pagename, templatename, context, doctree) -> None:
    context["_"] = lambda word: WORDS.get(word, word)


def setup(app) -> dict:
    app.add_transform(BilingualTitles)
    app.add_search_language(SearchBoth)
    app.add_lexer("ipython3", RanksLexer)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.config.html_math_renderer = "mathml"
    app.connect("doctree-resolved", describe_pictures)
    app.connect("html-page-context", use_both_languages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
