"""Importing minidist is quick, needs torch and numpy only, and every public name is there."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import minidist as md

# Everything that may be missing where only the core is installed.
NOT_CORE = ["rich", "typer", "matplotlib", "IPython", "ipykernel", "cloudpickle", "psutil", "tqdm"]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_alone_loads_nothing_heavy():
    loaded = json.loads(
        run_python(
            "import sys, json, time; t = time.process_time(); import minidist;"
            "print(json.dumps([time.process_time() - t, sorted(sys.modules)]))"
        )
    )
    seconds, modules = loaded
    assert seconds < 0.5
    assert "torch" not in modules
    assert not set(NOT_CORE) & set(modules)


def test_every_public_name_needs_only_torch_and_numpy():
    """With all other packages made unimportable, every name still resolves."""
    run_python(
        "import sys\n"
        f"for name in {NOT_CORE!r}: sys.modules[name] = None\n"
        "import minidist as md\n"
        "for name in md.__all__: getattr(md, name)\n"
    )


@pytest.mark.parametrize("name", sorted(md._PUBLIC))
def test_public_name_comes_from_its_module(name):
    module = importlib.import_module(f"minidist.{md._PUBLIC[name]}")
    assert hasattr(module, name)
    assert callable(getattr(md, name)) or name == "tp_rng"
    assert name in dir(md)


def test_measure_and_plan_are_callable_whatever_was_imported_first():
    for name in ("measure", "plan"):
        run_python(f"import minidist.{name}; import minidist as md; assert callable(md.{name})")
        run_python(f"import minidist as md; assert callable(md.{name}); import minidist.{name}")


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'DPP'"):
        md.DPP  # noqa: B018


def test_version_is_the_installed_one():
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert 'attr = "minidist.__version__"' in pyproject.read_text(encoding="utf-8")
    assert md.__version__.count(".") == 2
