"""What of the notebook travels to the ranks with a ``%%ranks`` cell.

The rule a learner can rely on: a name means what was assigned to it last, in the notebook or on the
ranks. So a cell's functions, classes, modules and plain values are sent when the cell uses them and
they changed since they were last sent; what a cell assigned on the ranks stays there until the
notebook assigns that name again.

Functions are sent without the values of their globals, because on a rank their globals *are* the
names of the cells there: a helper that calls ``dist.get_rank()`` or reads ``model`` finds the
rank's own. The names such helpers need are found and sent by the same rule.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import io
import pickle
import re
import symtable
import types

from minidist.comm import worker

_NAMESPACE = "namespace"  # persistent id: "the names of the cells on the receiving rank"
_HISTORY = re.compile(r"_+(i*|\d+|i\d+|ih|oh|dh)$")  # _, __, _i3, _12 ...: IPython's history


def names_read(source: str) -> set[str]:
    """Global names that running `source` may read, also inside its functions and classes."""
    found = {
        node.target.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    for table in _tables(source):
        # In a class body a name that is read may be a global even if it is assigned there too.
        everything = isinstance(table, symtable.Class) or _is_module(table)
        found |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (everything or symbol.is_global())
        }
    return found


def names_assigned(source: str) -> set[str]:
    """Global names that running `source` may assign, also by import, def and class."""
    return {
        symbol.get_name()
        for table in _tables(source)
        for symbol in table.get_symbols()
        if (symbol.is_assigned() or symbol.is_imported())
        and (_is_module(table) or symbol.is_declared_global())
    }


def _tables(source: str) -> list[symtable.SymbolTable]:
    tables = [symtable.symtable(source, "<cell>", "exec")]
    for table in tables:  # grows on the way: the scopes inside
        tables += table.get_children()
    return tables


def _is_module(table: symtable.SymbolTable) -> bool:
    return "module" in str(table.get_type()).lower()  # a string, from Python 3.13 on an enum


def _globals_of(code: types.CodeType) -> set[str]:
    names = {
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return names


class _Pickler(worker._pickler()):
    """Sends notebook functions bound to the rank's namespace, and notes which globals they read."""

    def __init__(self, file, notebook: dict):
        super().__init__(file)
        self.notebook = notebook
        self.stand_in = {"__name__": "__main__"}  # becomes the rank's namespace when unpickled
        self.globals_ref[id(self.stand_in)] = self.stand_in
        self.needs: set[str] = set()

    def persistent_id(self, obj):
        return _NAMESPACE if obj is self.stand_in else None

    def reducer_override(self, obj):
        if type(obj) is types.FunctionType and obj.__globals__ is self.notebook:
            self.needs |= _globals_of(obj.__code__)
            twin = types.FunctionType(
                obj.__code__, self.stand_in, obj.__name__, obj.__defaults__, obj.__closure__
            )
            for attribute in ("__kwdefaults__", "__annotations__", "__doc__", "__qualname__"):
                setattr(twin, attribute, getattr(obj, attribute))
            twin.__module__ = obj.__module__
            twin.__dict__.update(obj.__dict__)
            obj = twin
        return super().reducer_override(obj)


class Shipment:
    """The notebook side: remembers what the ranks already have."""

    def __init__(self, notebook: dict, hidden: set[str]):
        self.notebook, self.hidden = notebook, hidden
        self._known: dict[str, str] = {}  # name -> digest of the notebook's value when last in step

    def forget(self) -> None:
        """The ranks are new: they have nothing."""
        self._known.clear()

    def pack(self, source: str) -> tuple[dict[str, bytes], dict[str, str]]:
        """``(values, refused)`` for a cell: name -> pickle, and name -> why it cannot be sent."""
        values, refused, todo, seen = {}, {}, names_read(source), set()
        while todo:
            name = todo.pop()
            if name in seen or not self._is_users(name):
                continue
            seen.add(name)
            try:
                data, needs = self._pickle(name)
            except Exception as error:
                refused[name] = f"{type(error).__name__}: {error}"
                continue
            todo |= needs
            digest = hashlib.sha256(data).hexdigest()
            if self._known.get(name) != digest:
                values[name], self._known[name] = data, digest
        return values, refused

    def assigned_on_ranks(self, names: set[str]) -> None:
        """The ranks now have their own value for these: the notebook's present one is older."""
        for name in names:
            if self._is_users(name):
                try:
                    self._known[name] = hashlib.sha256(self._pickle(name)[0]).hexdigest()
                except Exception:
                    self._known.pop(name, None)  # it cannot be sent anyway

    def _is_users(self, name: str) -> bool:
        return name in self.notebook and name not in self.hidden and not _HISTORY.match(name)

    def _pickle(self, name: str) -> tuple[bytes, set[str]]:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self.notebook)
        pickler.dump(self.notebook[name])
        return buffer.getvalue(), pickler.needs


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, namespace: dict):
        super().__init__(io.BytesIO(data))
        self.namespace = namespace

    def persistent_load(self, persistent_id):
        if persistent_id != _NAMESPACE:
            raise pickle.UnpicklingError(f"unknown reference {persistent_id!r}")
        return self.namespace


def unpack(values: dict[str, bytes], namespace: dict) -> None:
    """The rank side: put the sent values into the namespace of the cells."""
    for name, data in values.items():
        namespace[name] = _Unpickler(data, namespace).load()
