"""``%lang zh | en | both``: show one language of the prose, or both.

Prose cells hold ``<div lang="zh">`` and ``<div lang="en">`` blocks. Without this extension (on
GitHub, in a plain viewer) both show; with it, a few lines of style hide the other language. The
static book uses the same blocks and the same rule.
"""

from __future__ import annotations

CHOICES = ("zh", "en", "both")
_NAMES = {"zh": "中文", "en": "English", "both": "中文 + English"}
# One id for every switch of a notebook: choosing again replaces the style of all earlier outputs.
# Two outputs with opposite styles would hide both languages.
_DISPLAY_ID = "minidist-lang"


def css(choice: str) -> str:
    """The style that hides the language not chosen: ``zh``, ``en`` or ``both`` (hides nothing)."""
    if choice not in CHOICES:
        raise ValueError(f"unknown language {choice!r}: choose zh, en or both")
    if choice == "both":
        return ""
    hidden = '[lang="en"]' if choice == "zh" else '[lang="zh"]'
    return (
        f".jp-RenderedMarkdown {hidden} {{ display: none; }} "
        # A cell that holds nothing but the hidden language would leave an empty gap.
        f".jp-MarkdownCell:has({hidden}):not(:has([lang]:not({hidden})))"
        f":not(:has(h1, h2, h3, h4)) {{ display: none; }}"
    )


def lang(line: str = "") -> None:
    """``%lang zh``, ``%lang en`` or ``%lang both``: which language of the prose to show."""
    from IPython.core.error import UsageError
    from IPython.display import display, update_display

    choice = line.strip().lower() or "both"
    try:
        style = css(choice)
    except ValueError as error:
        raise UsageError(f"%lang: {error} / 可选 zh、en、both") from None
    note = f"语言 language: {_NAMES[choice]}"
    bundle = {"text/html": f"<style>{style}</style><small>{note}</small>", "text/plain": note}
    display(bundle, raw=True, display_id=_DISPLAY_ID)
    update_display(bundle, raw=True, display_id=_DISPLAY_ID)
