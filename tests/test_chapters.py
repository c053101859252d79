"""The chapters: text and notebook in step, well formed, complete; `make chapters` executes them."""

import re
from pathlib import Path

import jupytext
import nbformat
import pytest

from minidist.learn import claims

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
# The document's own numbering; chapter 0 follows the document on foundations, heading by heading.
SECTIONS = {
    "00": ["什么是分布式训练", "为什么需要分布式训练", "数据并行与模型并行", "数据并行详解",
           "模型并行详解", "混合并行", "术语表"],
    "01": ["# 1. "],
    "02": ["## 2.1 ", "## 2.2 ", "## 2.3 "],
    "03": ["## 3.1 ", "## 3.2 ", "## 3.3 "],
    "04": ["## 4.1 ", "## 4.2 ", "## 4.3 ", "## 4.4 ", "## 4.5 "],
    "05": ["## 5.1 ", "## 5.2 ", "## 5.3 ", "## 5.4 "],
    "06": ["# 6. "],
    "07": ["# 7. "],
}  # fmt: skip
EXPECTED_ERROR = "raises-exception"

each_chapter = pytest.mark.parametrize("file", CHAPTERS, ids=lambda file: file.stem)


def read(file: Path):
    return nbformat.read(file, as_version=4)


def prose(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def test_every_chapter_is_there_in_both_forms():
    assert [file.stem[:2] for file in CHAPTERS] == list(SECTIONS)
    texts = sorted((ROOT / "chapters").glob("*.py"))
    assert [file.stem for file in CHAPTERS] == [file.stem for file in texts]


@each_chapter
def test_notebook_and_text_are_in_step(file):
    text = jupytext.read(file.with_suffix(".py"))
    here = [(c.cell_type, c.source, tags(c)) for c in read(file).cells]
    there = [(c.cell_type, c.source, tags(c)) for c in text.cells]
    assert here == there, f"run .ci/notebooks {file.stem}"


@each_chapter
def test_notebook_is_well_formed(file):
    notebook = read(file)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "executed once, from top to bottom"
    for cell in code:
        assert "execution" not in cell.metadata, "timing metadata changes with every run"
        lines = len(cell.source.splitlines())
        assert lines <= 35, f"{lines} lines are too many for a cell: {cell.source[:60]!r}"
        failed = [output for output in cell.outputs if output.output_type == "error"]
        assert bool(failed) == (EXPECTED_ERROR in tags(cell)), cell.source


@each_chapter
def test_outputs_are_those_of_any_machine(file):
    for cell in read(file).cells:
        if cell.cell_type == "code":
            for output in cell.outputs:
                text = re.sub(r"'image/png': '[^']*'", "", str(dict(output)))
                assert str(ROOT) not in text and "/site-packages/" not in text, cell.source
                assert not re.search(r"0x[0-9a-f]{6}|ipykernel_\d+", text), cell.source
                assert "Warning" not in text, cell.source
                # A saved widget shows nothing, and its id is another one at every run.
                assert "widget-view" not in text, cell.source


@each_chapter
def test_prose_is_in_both_languages(file):
    first, *others = prose(read(file))
    # A name is the same in both languages: DeepSpeed ZeRO.
    assert re.fullmatch(r"# \d\. ([^\n|]+ \| [^\n|]+|[ -~]+)", first), "one H1, alone in its cell"
    for cell in others:
        if cell.startswith("#"):
            # A heading stands alone, in both languages unless it is a name in both.
            assert "\n" not in cell.strip(), cell
            assert " | " in cell or cell.isascii(), cell
            continue
        blocks = re.findall(r'<div lang="(zh|en)">\n\n(.*?)\n\n</div>', cell, re.DOTALL)
        assert [language for language, _ in blocks] == ["zh", "en"], cell[:80]
        (_, chinese), (_, english) = blocks
        assert re.search("[\u4e00-\u9fff]", chinese), cell[:80]
        plain = re.sub("```.*?```", "", chinese + "\n" + english, flags=re.DOTALL)
        assert not re.search("^#", plain, re.MULTILINE), "headings go outside"


def test_the_job_script_keeps_its_first_line():
    # As a comment of a comment it would look like a magic, and lose its #.
    assert "#!/bin/bash" in "\n".join(prose(read(ROOT / "chapters" / "07_cluster.ipynb")))


@each_chapter
def test_a_chapter_has_what_a_learner_needs(file):
    notebook = read(file)
    words = "\n".join(prose(notebook))
    for heading in SECTIONS[file.stem[:2]]:
        assert heading in words, f"section {heading!r} of the document is missing"
    number = int(file.stem[:2])
    if number < 7:
        assert f"minidist check {number}" in words, "a link to its exercises"
    assert "先猜" in words and "Predict" in words, "a question before the measurement"
    assert "延伸阅读" in words and "Further reading" in words
    assert "%load_ext minidist" in notebook.cells[2].source
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "%%ranks " in source or "torchrun" in source


def test_every_claim_is_shown_in_a_chapter():
    source = "\n".join(file.with_suffix(".py").read_text(encoding="utf-8") for file in CHAPTERS)
    shown = set(re.findall(r'claims\.show\("(\w)"\)', source))
    assert shown == {claim.id for claim in claims.all_claims()}


def test_every_chapter_shows_something_going_wrong():
    for file in CHAPTERS[:7]:
        cells = read(file).cells
        wrong = any(EXPECTED_ERROR in tags(cell) for cell in cells)
        caught = any(cell.cell_type == "code" and "except " in cell.source for cell in cells)
        assert wrong or caught, file.stem
