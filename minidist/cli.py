"""The ``minidist`` command: a table of commands, each imported only when it is called.

``minidist --help`` and a wrong command answer at once, without importing torch. Every mistake in
the arguments is one line on stderr and exit code 2; every failure of a run is a message and exit
code 1; neither shows a traceback. Typer and rich are imported in this file and in the command
modules below and nowhere else, so that the library itself needs only torch and numpy.
"""

from __future__ import annotations

import importlib
import os
import sys

# name -> (module, one line for the overview). The module has a function of the command's name whose
# signature typer reads (dashes are underscores); nothing needs to be registered.
COMMANDS = {
    "compare": (
        "minidist.train.commands",
        "train one GPT with every strategy; what each costs",
    ),
    "train": ("minidist.train.commands", "train it with one strategy, locally or under torchrun"),
    "plan": ("minidist.plan.commands", "which layout for which model on which GPUs, and why"),
    "simulate": ("minidist.plan.commands", "predict step times; compare with published ones"),
    "bench": ("minidist.measure.commands", "time our strategies beside torch's own"),
    "claims": ("minidist.learn.claims_commands", "measure every statement of the course documents"),
    "check": ("minidist.learn.exercise_commands", "run the checks of the exercises"),
    "start-exercises": (
        "minidist.learn.exercise_commands",
        "copy the exercises to a folder of your own",
    ),
    "learn": ("minidist.learn.commands", "open the chapters in JupyterLab"),
    "doctor": ("minidist.comm.commands", "what this machine can run"),
}
EXAMPLE = "minidist compare --steps 5 --json out.json"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 failed, 2 wrong arguments)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        return _overview()
    if arguments[0] in ("--version", "-V"):
        from minidist import __version__

        print(f"minidist {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        return _wrong(f"unknown command {name!r}; choose one of {', '.join(COMMANDS)}")
    try:
        import rich  # noqa: F401
        import typer
    except ImportError:
        print("the command line needs typer and rich: pip install minidist[cli]", file=sys.stderr)
        return 1
    module = COMMANDS[name][0]
    try:
        command = getattr(importlib.import_module(module), name.replace("-", "_"), None)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            print(f"minidist {name} needs the package {error.name}", file=sys.stderr)
            return 1
        command = None
    if command is None:
        print(f"minidist {name} is not part of this version", file=sys.stderr)
        return 1
    return _call(typer, command, name, arguments[1:])


def _call(typer, command, name: str, arguments: list[str]) -> int:
    from minidist.comm.launch import RankFailure

    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name, no_args_is_help=False)(command)
    # typer's own kind of mistake, whichever click it carries.
    usage_error = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        code = app(arguments, prog_name=f"minidist {name}", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except usage_error as error:
        # What a command raises itself as typer.BadParameter("...") is already a whole sentence.
        own = type(error) is typer.BadParameter and error.param is None
        return _wrong(f"minidist {name}: {error.message if own else error.format_message()}")
    except RankFailure as error:
        print(f"minidist {name}: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `minidist ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _wrong(message: str) -> int:
    if os.environ.get("RANK", "0") == "0":  # under torchrun every rank finds the same mistake
        print(" ".join(message.split()), file=sys.stderr)
    return 2


def _overview() -> int:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for name, (_, words) in COMMANDS.items():
            print(f"  {name:<10}{words}")
        return 0
    table = Table.grid(padding=(0, 2))
    for name, (_, words) in COMMANDS.items():
        table.add_row(f"  [bold cyan]{name}", words)
    console = Console(highlight=False)
    console.print("Distributed training strategies, small enough to read.\n")
    console.print(table)
    console.print(f"\n[bold]minidist COMMAND --help[/] tells more, with an example.\n\n  {EXAMPLE}")
    return 0
