"""The rank side of ``%%ranks``: run a cell in names that live as long as the rank does."""

from __future__ import annotations

import ast
import io
import linecache
import os
import sys
import types

from minidist.comm import worker
from minidist.learn import ship


def run_cell(name: str, source: str, values: dict[str, bytes], want: list[str]) -> dict:
    """Run `source` on this rank; its last expression is printed as a notebook would show it.

    `name` stands for the file in tracebacks. `values`: what the notebook sent. Returns
    ``{"values": {name: pickle}, "figures": [png bytes]}`` with those of the names in `want` that
    exist here.
    """
    namespace = _namespace()
    # Tracebacks and "who waits where" read the cell's lines from here.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    ship.unpack(values, namespace)
    tree = ast.parse(source, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if last is not None:
        value = eval(compile(last, name, "eval", dont_inherit=True), namespace)
        if value is not None:
            print(repr(value))
    return {"values": _wanted(want, namespace), "figures": _figures()}


def in_step() -> None:
    """Returns on every rank only if all of them agree on which collective comes next."""
    import torch.distributed as dist

    dist.barrier()


def _namespace() -> dict:
    """The names of the cells on this rank; made on first use."""
    if "cells" not in worker.state:
        # The kernel's backend would draw into a notebook that a rank does not have.
        os.environ["MPLBACKEND"] = "agg"
        import torch
        import torch.distributed as dist

        # A real module, and the main one: classes of cells are then pickled by value, and tools
        # that look a class's module up (dataclasses, typing) find it.
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        worker.state["cells"] = module
        vars(module).update(
            torch=torch, dist=dist, rank=dist.get_rank(), world_size=dist.get_world_size()
        )
    return vars(worker.state["cells"])


def _wanted(want: list[str], namespace: dict) -> dict[str, bytes]:
    values = {}
    for name in want:
        if name in namespace:
            try:
                values[name] = worker.dumps(namespace[name])
            except Exception as error:
                raise TypeError(
                    f"--out {name}: a {type(namespace[name]).__name__} cannot be sent to the "
                    f"notebook ({error}); send numbers, strings, tensors, or lists of these"
                ) from None
    return values


def _figures() -> list[bytes]:
    """What this rank drew with pyplot, as PNG; closed afterwards."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    pictures = []
    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        # Without the version of matplotlib in it, the same picture is the same bytes.
        pyplot.figure(number).savefig(
            buffer, format="png", bbox_inches="tight", metadata={"Software": None}
        )
        pictures.append(buffer.getvalue())
    pyplot.close("all")
    return pictures
