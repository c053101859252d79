"""``minidist learn``: the chapters in JupyterLab."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import minidist


def learn(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to open.", show_default="the chapters")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
    port: Annotated[int, typer.Option(help="Port to serve on; the next free one is taken.")] = 8888,
) -> None:
    """Open the chapters in JupyterLab, with %%ranks ready to use.

    Example: minidist learn --no-browser --port 9000
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise typer.BadParameter("JupyterLab is not installed: pip install minidist[learn]")
    folder = folder or chapters()
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}")
    sys.stdout.flush()
    # Settings of ours beside the user's: without the question whether to fetch news from outside.
    ours = str(Path(__file__).with_name("jupyter"))
    others = os.environ.get("JUPYTER_CONFIG_PATH")
    os.environ["JUPYTER_CONFIG_PATH"] = f"{others}{os.pathsep}{ours}" if others else ours
    # In place of this process, so that Ctrl-C and the exit code are JupyterLab's own.
    os.execv(sys.executable, [sys.executable, *arguments(folder, browser, port)])


def chapters() -> Path:
    """The working folder's chapters, else those beside this package, else the working folder."""
    beside = Path(minidist.__file__).parents[1] / "chapters"
    return next((p for p in (Path("chapters"), beside) if p.is_dir()), Path()).resolve()


def arguments(folder: Path, browser: bool, port: int) -> list[str]:
    """What to call Python with. The kernel is this Python's; nothing is fetched from outside."""
    options = [
        f"--ServerApp.root_dir={folder.resolve()}",
        f"--ServerApp.port={port}",
        f"--ServerApp.open_browser={browser}",
        "--LabApp.extension_manager=readonly",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-root")  # in containers
    return ["-m", "jupyterlab", *options]
