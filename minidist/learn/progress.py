"""What a learner has solved and tried, remembered in their own folder as one small file."""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from minidist.learn.strip import Task

FILE = ".minidist-progress.json"
_WRITTEN = ("passed", "failed", "timeout")  # a status that shows an honest try


@dataclass
class Progress:
    """`entries`: exercise -> {"status", "tries", "code"}, with a digest of what was checked."""

    folder: Path
    entries: dict[str, dict] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Progress:
        """What is remembered in a folder; nothing when there is no readable file."""
        try:
            entries = json.loads((folder / FILE).read_text(encoding="utf-8"))
            entries = {k: v for k, v in entries.items() if isinstance(v, dict)}
        except (OSError, ValueError, AttributeError):
            entries = {}
        return cls(folder, entries)

    def note(self, task: Task, status: str) -> None:
        """Remember a result."""
        entry = self.entries.setdefault(task.id, {"tries": 0})
        entry["status"] = status
        entry["tries"] = int(entry.get("tries", 0)) + (status in _WRITTEN)
        entry["code"] = written(self.folder, task)

    def save(self) -> None:
        """Write the file; a folder that cannot be written to is left as it is."""
        text = json.dumps(dict(sorted(self.entries.items())), indent=1) + "\n"
        try:
            aside = self.folder / (FILE + ".new")
            aside.write_text(text, encoding="utf-8")
            aside.replace(self.folder / FILE)
        except OSError:
            pass

    def status(self, task: Task) -> str:
        """passed, failed, timeout, not written, changed (since it was last checked) or unknown."""
        entry = self.entries.get(task.id)
        if not entry:
            return "unknown"
        if entry.get("code") != written(self.folder, task):
            return "changed"
        return str(entry.get("status", "unknown"))

    def tried(self, task: Task) -> bool:
        """Whether there was an honest try: something written that was checked."""
        return int(self.entries.get(task.id, {}).get("tries", 0)) > 0


def written(folder: Path, task: Task) -> str:
    """A digest of the learner's code for an exercise; of the whole file if it is not Python."""
    try:
        text = (folder / task.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    try:
        nodes = [n for n in ast.parse(text).body if getattr(n, "name", None) in task.names]
        # Without comments, layout and task texts: those do not change what the code does.
        text = "\n".join(ast.dump(_without_docstrings(n)) for n in nodes)
    except (SyntaxError, ValueError):
        pass
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, False):
            node.body = node.body[1:] or [ast.Pass()]
    return tree
