"""Learning: notebook cells on several ranks, pictures of what was measured, one language or both.

``%load_ext minidist`` in a notebook calls `load_ipython_extension`.
"""

from __future__ import annotations


def __getattr__(name: str):
    if name == "check":  # `from minidist.learn import check`: checks an exercise in a notebook
        from minidist.learn.exercise_notebook import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(ipython) -> None:
    """Register ``%%ranks`` and ``%lang``, and define ``check`` for the exercises."""
    from minidist.learn import lang, magic
    from minidist.learn.exercise_notebook import check

    if "check" not in ipython.user_ns:
        # Hidden: `%%ranks` does not send it to the ranks.
        ipython.push({"check": check}, interactive=False)
    ipython.register_magic_function(magic.RanksMagic(ipython), "cell", "ranks")
    ipython.register_magic_function(lang.lang, "line", "lang")
