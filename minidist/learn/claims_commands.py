"""``minidist claims``: every statement of the course documents, measured now."""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table

from minidist.comm.launch import RankFailure
from minidist.learn import claims as register
from minidist.train.report import document, writable, write_json

# typer reads annotations itself, and on Python 3.10 only knows Optional.
OptionalText = Optional[str]  # noqa: UP045
COLORS = {"right": "green", "imprecise": "yellow", "wrong": "red", "not measured": "magenta"}


def claims(
    only: Annotated[
        OptionalText, typer.Option(help="Only these, e.g. a,c,m.", show_default="all")
    ] = None,
    why: Annotated[bool, typer.Option(help="The whole statements and findings, and why.")] = False,
    zh: Annotated[bool, typer.Option("--zh", help="In Chinese.")] = False,
    json_file: Annotated[OptionalText, typer.Option("--json", help="Write the rows here.")] = None,
) -> int:
    """Measure every checkable statement of the course documents, and judge it by the numbers.

    Runs ranks, the schedules, dry runs at scale and the planner; about a minute. Sections are those
    of the chapter on distributed training, 0 is the document on foundations.

      minidist claims --why --json claims.json
    """
    problem = writable(json_file)
    if problem:
        raise typer.BadParameter(problem)
    known = [claim.id for claim in register.all_claims()]
    wanted = known if only is None else [name.strip() for name in only.split(",")]
    for name in wanted:
        if name not in known:
            raise typer.BadParameter(f"there is no claim {name!r}; choose from {', '.join(known)}")
    rows = []
    waiting = Console(stderr=True, highlight=False)
    for name in sorted(set(wanted)):
        with waiting.status(f"measuring claim {name}"):
            rows.append(_row(name))
    Console(file=sys.stdout, highlight=False).print(
        _lines(rows, zh) if not why else _table(rows, zh), soft_wrap=not why
    )
    if json_file is not None:
        write_json(json_file, document(rows))
    return 1 if any(row["verdict"] == "not measured" for row in rows) else 0


def _row(name: str) -> dict:
    """The claim's row; one that cannot be measured here is said to be so, the others go on."""
    try:
        return register.check(name).row()
    except (RankFailure, RuntimeError, OSError) as error:
        claim, line = register.get(name), str(error).partition("\n")[0]
        return {
            "claim": claim.id, "section": claim.section, "statement": claim.statement[0],
            "statement_zh": claim.statement[1], "title": claim.title[0],
            "title_zh": claim.title[1], "short": line, "short_zh": line,
            "measured": line, "measured_zh": line,
            "verdict": "not measured", "why": line, "why_zh": line, "numbers": {},
        }  # fmt: skip


def _lines(rows: list[dict], zh: bool) -> str:
    """One line per claim, however narrow the terminal."""
    end = "_zh" if zh else ""
    cells = [
        (row["claim"], row["section"], row["title" + end], row["short" + end], _verdict(row, zh))
        for row in rows
    ]
    if zh:
        cells.insert(0, ("", "节", "文档的说法", "实测", "结论"))
    else:
        cells.insert(0, ("", "section", "the document says", "measured now", "verdict"))
    widths = [max(cell_len(line[i]) for line in cells) for i in range(4)]
    return "\n".join(
        "  ".join([*map(set_cell_size, line[:4], widths), line[4]]).rstrip() for line in cells
    )


def _table(rows: list[dict], zh: bool) -> Table:
    end = "_zh" if zh else ""
    heads = ("", "节", "文档的说法", "实测", "结论", "原因") if zh else (
        "", "section", "the document says", "measured now", "verdict", "why",
    )  # fmt: skip
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 1, 0))
    for head, ratio in zip(heads, (None, None, 3, 5, None, 5), strict=True):
        table.add_column(head, ratio=ratio)
    for row in rows:
        table.add_row(
            row["claim"], row["section"], row["statement" + end], row["measured" + end],
            _verdict(row, zh), row["why" + end],
        )  # fmt: skip
    return table


def _verdict(row: dict, zh: bool) -> str:
    words = {**register.VERDICT_ZH, "not measured": "未能测量"}
    return f"[{COLORS[row['verdict']]}]{words[row['verdict']] if zh else row['verdict']}[/]"
