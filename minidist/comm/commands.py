"""``minidist doctor``: what this machine can run."""

from __future__ import annotations

from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from minidist.comm.doctor import PROBLEM, examine, self_test

OptionalText = Optional[str]  # noqa: UP045 - typer on Python 3.10
_COLOUR = {"ok": "green", "note": "yellow", "problem": "red"}


def doctor(
    ranks: Annotated[int, typer.Option(help="Ranks of the self-test; 0 leaves it out.")] = 4,
    json_file: Annotated[OptionalText, typer.Option("--json", help="Write the lines here.")] = None,
) -> int:
    """Look at this machine and run a test of a few seconds. Exit code 1 if there is a problem.

    minidist doctor

    minidist doctor --ranks 2 --json machine.json
    """
    if ranks < 0:
        raise typer.BadParameter(f"ranks must be 0 or more, got {ranks}")
    lines = examine()
    if ranks:
        lines += self_test(ranks)
    table = Table.grid(padding=(0, 2))
    for line in lines:
        mark = f"[{_COLOUR[line.judgement]}]{line.judgement}"
        table.add_row(line.what, line.value, mark, line.advice)
    Console(highlight=False).print(table)
    if json_file:
        from minidist.train.report import document, write_json

        write_json(json_file, document([line._asdict() for line in lines]))
    return 1 if any(line.judgement == PROBLEM for line in lines) else 0
