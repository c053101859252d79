"""``%%ranks N``: run a notebook cell on N standing ranks.

    %load_ext minidist

    %%ranks 4 --out total
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    total

The ranks stay between cells, with their variables. What they print appears as it comes, grouped by
rank. When one of them raises, or they wait for each other for ever, the cell ends with what failed
on which rank at which line, and where every other rank was.
"""

from __future__ import annotations

import argparse
import base64
import linecache
import pickle
import re
import shlex
import threading
import traceback
from pathlib import Path

from minidist.comm.launch import RankFailure, Ranks, RanksInterrupted
from minidist.learn import cell as rank_side
from minidist.learn.ship import Shipment, names_assigned

REFRESH = 0.1  # seconds between two updates of the shown output
MOST_LINES = 1000  # of one rank's output that stay visible
_RESERVED = {"rank", "world_size"}  # mean the rank itself, whatever the notebook calls so
_NEW_RANKS = "{n} new ranks: earlier variables are gone. / 新启动 {n} 个 rank，之前的变量已清空。"
_RANKS_STAY = "The ranks are still there, with their variables. / 各 rank 仍在运行，变量保留。"
_TOO_LATE = "More time: %%ranks N --timeout SECONDS. / 需要更多时间：%%ranks N --timeout 秒数。"
_DEADLOCK = (
    "A collective needs the same call from every rank, in the same order; a send its receive.\n"
    "集合通信需要所有 rank 以相同顺序做相同的调用；每个 send 都要有对应的 recv。"
)
_RANKS_ENDED = (
    "The ranks were ended. The next %%ranks cell starts new ones: rerun the cells that made their "
    "variables.\n所有 rank 已结束。下一个 %%ranks 单元格会启动新的：请重新运行定义变量的单元格。"
)
# torch's own log lines: what they say is in the error, and their times differ on every run.
_TORCH_LOG = re.compile(r"\[rank\d+\]:\[[A-Z]\d+ .*ProcessGroup")
_NOTEBOOK_FILE = re.compile(r"[^\s\"']*ipykernel_\d+[/\\]\d+\.py")
# Where a library is installed says nothing, and a saved notebook would differ by machine.
_INSTALLED_IN = re.compile(
    r'(?:(?<=File ")|(?<= at ))'
    rf'([^"\n ]*[/\\]site-packages[/\\]|{re.escape(str(Path(__file__).parents[2]))}[/\\])'
)


class RanksMagic:
    """%%ranks [N] [--out NAMES] [--timeout S] [--fresh] [--fast]: run this cell on N ranks.

    N: how many ranks (default: as many as last time, at first 2). A different number starts new
    ranks. In the cell, ``rank``, ``world_size``, ``torch`` and ``dist`` are there; functions,
    classes and values of the notebook that the cell uses are sent along.

    --out a,b     bring variables back: each becomes a list with one entry per rank (None where a
                  rank has no such variable)
    --timeout S   end the cell after S seconds (default 60) and show where every rank was;
                  ranks that wait for each other for ever are found within about 2 seconds
    --fresh       start new ranks first: nothing is left of earlier cells
    --fast        no checks that all ranks call the same collective with the same shape; for timing
    """

    def __init__(self, ipython):
        self.ipython = ipython
        self.__doc__ = type(self).__doc__  # what `%%ranks?` shows
        self._ranks: Ranks | None = None
        self._shipment = Shipment(ipython.user_ns, set(ipython.user_ns_hidden) | _RESERVED)

    def __call__(self, line: str, cell: str) -> None:
        options = _parse(line)
        # Line 1 stands for `%%ranks ...`: line numbers in tracebacks are those shown in the cell.
        source = f"# %%ranks {line}\n{cell}"
        # The last input is this cell; `execution_count` may already be that of the next one.
        name = f"<cell In[{len(self.ipython.user_ns['In']) - 1}]>"
        _check_syntax(source, name)
        # For the line at which a rank died: the rank cannot tell any more.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        ranks, news = self._standing(options)
        values, refused = self._shipment.pack(source)
        self._shipment.assigned_on_ranks(names_assigned(source))
        try:
            with _Output(ranks.n, news) as output:
                answers = ranks.run(
                    rank_side.run_cell, name, source, values, options.out,
                    timeout=options.timeout, on_output=output.add,
                )  # fmt: skip
        except (RankFailure, RanksInterrupted) as failure:
            raise self._explained(failure, refused) from None
        _show_figures([answer["figures"] for answer in answers])
        self._bring_back(options.out, answers)

    def _standing(self, options) -> tuple[Ranks, str]:
        """The ranks to run on, and what to tell about them if they are not those of last time."""
        old = self._ranks
        n = options.n or (old.n if old else 2)
        debug = not options.fast
        if old and old.alive and not options.fresh and (old.n, old.debug) == (n, debug):
            return old, ""
        lost = old and old.alive and not options.fresh
        if old:
            old.close()
        self._ranks = None
        self._shipment.forget()
        # Each cell has its own limit; an error that leaves the ranks in step keeps their variables.
        self._ranks = Ranks(n, timeout=None, debug=debug, keep=True)
        return self._ranks, _NEW_RANKS.format(n=n) if lost else ""

    def _bring_back(self, names: list[str], answers: list[dict]) -> None:
        for name in names:
            if not any(name in answer["values"] for answer in answers):
                raise NameError(f"--out {name}: no rank has a variable of that name")
            self.ipython.user_ns[name] = [
                pickle.loads(answer["values"][name]) if name in answer["values"] else None
                for answer in answers
            ]
        self._shipment.assigned_on_ranks(set(names))

    def _explained(self, failure, refused: dict[str, str]) -> RankFailure | RanksInterrupted:
        story = _NOTEBOOK_FILE.sub(self._cell_of, str(failure))
        story = _INSTALLED_IN.sub("", story)
        lines = [story]
        for name, reason in refused.items():
            if f"name '{name}' is not defined" in story:
                lines.append(f"`{name}` of the notebook cannot be sent to a rank: {reason}")
        if story.startswith("not finished"):
            lines.append(_TOO_LATE)
        elif story.startswith("deadlock"):
            lines.append(_DEADLOCK)
        lines.append(_RANKS_STAY if self._in_step() else _RANKS_ENDED)
        return type(failure)("\n".join(lines), failure.rank, failure.traceback, failure.states)

    def _in_step(self) -> bool:
        """After an error: whether the ranks can go on together, with their variables."""
        if self._ranks is None or not self._ranks.alive:
            return False
        if self._ranks.debug:  # without the checks, ranks out of step could damage later results
            try:
                self._ranks.run(rank_side.in_step, timeout=2, on_output=lambda *_: None)
                return True
            except RankFailure:
                return False
        self._ranks.kill()
        return False

    def _cell_of(self, match: re.Match) -> str:
        """``/tmp/ipykernel_17/2904.py`` -> ``<cell In[3]>``."""
        label = self.ipython.compile.format_code_name(match[0])
        return f"<cell {label[1]}>" if label else match[0]


# -------------------------------------------------------------------------------- reading the line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        from IPython.core.error import UsageError

        raise UsageError(f"%%ranks: {message} (%%ranks? shows the options)")


def _parse(line: str) -> argparse.Namespace:
    parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("n", type=_at_least_one, nargs="?")
    parser.add_argument("--out", type=_names, default=[])
    parser.add_argument("--timeout", type=_seconds, default=60.0)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--fast", action="store_true")
    return parser.parse_args(shlex.split(line, comments=True))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number of ranks must be 1 or more, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"--timeout must be seconds above 0, got {text!r}")
    return seconds


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not name.isidentifier():
            raise argparse.ArgumentTypeError(f"--out needs names separated by commas, got {text!r}")
    return names


class InvalidCell(ValueError):
    """The cell is not Python; shown without the stack of this file."""

    def _render_traceback_(self):
        return str(self).splitlines()


def _check_syntax(source: str, name: str) -> None:
    try:
        compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        text = "".join(traceback.format_exception_only(error)).rstrip()
        if error.text and error.text.lstrip().startswith(("%", "!")):
            text += "\nCommands that begin with % or ! work in the notebook, not on a rank."
        raise InvalidCell(text) from None


# ---------------------------------------------------------------------------------- showing output


class _Output:
    """What the ranks print: one display, grouped by rank, updated while the cell runs."""

    def __init__(self, n: int, news: str):
        self.news = [news] if news else []
        self.lines: list[list[str]] = [[] for _ in range(n)]
        self.unfinished: list[str] = [""] * n  # the present state of a progress bar
        self.handle = None
        self.shown = ""
        # A thread of its own: the last line before a long silence must appear as well.
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> _Output:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.thread.join()
        self._show()

    def add(self, rank: int, stream: str, line: str) -> None:
        if stream == "stderr" and _TORCH_LOG.match(line):
            return
        if line.endswith("\r"):
            self.unfinished[rank] = line.rstrip("\r").rpartition("\r")[2]
        else:
            self.lines[rank].append(line.rpartition("\r")[2])
            self.unfinished[rank] = ""

    def text(self) -> str:
        shown = list(self.news)
        for rank, lines in enumerate(self.lines):
            unfinished = self.unfinished[rank]
            if len(lines) > MOST_LINES:
                shown.append(f"[rank {rank}] ... {len(lines) - MOST_LINES} earlier lines")
            shown += [f"[rank {rank}] {line}" for line in lines[-MOST_LINES:]]
            shown += [f"[rank {rank}] {unfinished}"] if unfinished else []
        return "\n".join(shown)

    def _follow(self) -> None:
        while not self.over.wait(REFRESH):
            self._show()

    def _show(self) -> None:
        from IPython.display import display

        text = self.text()
        if text == self.shown:
            return
        self.shown = text
        bundle = {"text/plain": text}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)


def _show_figures(figures: list[list[bytes]]) -> None:
    from IPython.display import display

    for rank, pictures in enumerate(figures):
        for picture in pictures:
            display({"text/plain": f"[rank {rank}] figure"}, raw=True)
            bundle = {
                "image/png": base64.b64encode(picture).decode(),
                "text/plain": f"<figure of rank {rank}>",
            }
            display(bundle, raw=True)
