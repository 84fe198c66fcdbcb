"""The repository's shape: folders, links, and the installed names agree."""

import ast
import configparser
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("actors", "storage", "supervisor")
PRODUCT = ("callboard", *PARTS)

BANNED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
BANNED_NAMES = {"eval", "exec"}
BANNED_ATTRIBUTES = {"recv_pyobj", "send_pyobj"}
PICKLING_QUEUES = {"Queue", "SimpleQueue", "JoinableQueue", "Manager"}
THREAD_QUEUES = {"queue", "asyncio"}  # their queues hand over objects inside one process


@pytest.mark.parametrize("part", PARTS)
def test_the_link_points_at_the_folder(part: str) -> None:
    assert (ROOT / "callboard" / part).resolve() == ROOT / part


@pytest.mark.parametrize("part", PARTS)
def test_the_generic_name_cannot_be_imported(part: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", f"import {part}"], cwd=ROOT, capture_output=True, text=True
    )
    assert child.returncode == 1
    assert "ImportError" in child.stderr


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    found = {
        ".".join(("callboard", *folder.relative_to(ROOT).parts))
        for part in PARTS
        for folder in {p.parent for p in (ROOT / part).rglob("*.py")}
    } | {
        ".".join(folder.relative_to(ROOT).parts)
        for folder in {p.parent for p in (ROOT / "callboard").rglob("*.py")}
        if not any((ROOT / "callboard" / name) in (folder, *folder.parents) for name in PARTS)
    }
    assert listed == found


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_process_can_import(method: str) -> None:
    with multiprocessing.get_context(method).Pool(1) as pool:
        for part in PARTS:
            name = f"callboard.{part}"
            code = f"__import__('importlib').import_module({name!r}).__name__"
            assert pool.apply(eval, (code,)) == name


def banned_in(source: str) -> Iterator[str]:
    """Yield what FLT-58 bans, as `line: name`, from one module's source."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = {name.name.partition(".")[0] for name in names} & BANNED_MODULES
            case ast.ImportFrom(module=str(module), names=names):
                found = {module.partition(".")[0]} & BANNED_MODULES
                if module.startswith("multiprocessing"):
                    found |= {name.name for name in names} & PICKLING_QUEUES
            case ast.Name(id=name):
                found = {name} & BANNED_NAMES
            case ast.Attribute(value=ast.Name(id="yaml"), attr="load"):
                found = {"yaml.load"}
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in THREAD_QUEUES:
                found = {name} & BANNED_ATTRIBUTES
            case ast.Attribute(attr=name):
                found = {name} & (BANNED_ATTRIBUTES | PICKLING_QUEUES)
            case _:
                continue
        yield from (f"{node.lineno}: {name}" for name in sorted(found))


@pytest.mark.rule("FLT-58")
def test_the_product_never_runs_code_out_of_data() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{banned}"
        for folder in PRODUCT
        for file in (ROOT / folder).rglob("*.py")
        for banned in banned_in(file.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.rule("FLT-58")
@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from shelve import open",
        "x = eval",
        "exec('')",
        "import yaml; yaml.load",
        "socket.recv_pyobj()",
        "from multiprocessing import Queue",
        "multiprocessing.get_context('spawn').SimpleQueue()",
        "multiprocessing.Manager()",
    ],
)
def test_each_banned_name_is_noticed(source: str) -> None:
    assert list(banned_in(source))


@pytest.mark.rule("FLT-58")
def test_a_call_from_the_product_raises_in_every_test_run() -> None:
    product = {"__name__": "callboard.example"}
    with pytest.raises(AssertionError, match="FLT-58"):
        eval("__import__('pickle').dumps(1)", product)
    assert eval("__import__('pickle').dumps(1)", {"__name__": "elsewhere"})


@pytest.mark.parametrize("source", ["queue.SimpleQueue()", "asyncio.Queue()", "self.evaluate()"])
def test_what_stays_inside_one_process_is_allowed(source: str) -> None:
    assert not list(banned_in(source))
