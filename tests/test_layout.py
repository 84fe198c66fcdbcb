"""The repository's shape: folders, links, and the installed names agree."""

import ast
import configparser
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("actors", "storage", "supervisor")
PRODUCT = ("callboard", *PARTS)
LINKS = {("callboard", part) for part in PARTS}

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


def units() -> set[str]:
    """Name what the code map must name: each module of the product, or its sub-folder."""
    wholes = {f"{part}/" for part in PRODUCT} | {"actors/session/", "actors/gateway/"}
    modules = [
        file.relative_to(ROOT)
        for folder in PRODUCT
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "__init__.py" and file.relative_to(ROOT).parts[:2] not in LINKS
    ]
    return {
        str(module) if f"{module.parent}/" in wholes else f"{module.parent}/" for module in modules
    }


def test_the_code_map_names_each_module_and_no_other() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:callboard|actors|storage|supervisor)/[\w/]*(?:\.py|/))`", page))
    assert units() - named == set()
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_the_index_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    pages = sorted(page.name for page in folder.glob("[0-9]*.md"))
    assert re.findall(r"\((\d{4}-[^)]*\.md)\)", index) == pages


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
