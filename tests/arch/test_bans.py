"""What may not be written anywhere: unsafe loaders, shells, silent failure, public binds by default."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.arch._tree import PACKAGES, parsed, project_files, python_files, where

#: Code that runs what it reads, or starts processes by copying interpreter state.
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
BANNED_BUILTINS = {"eval", "exec", "__import__"}
BANNED_ATTRIBUTES = {"torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}
BANNED_KEYWORDS = {("shell", True), ("allow_pickle", True), ("trust_remote_code", True)}


def _banned(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name.split(".")[0] in BANNED_MODULES)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_MODULES:
        yield node.module or ""
    elif isinstance(node, ast.ExceptHandler) and node.type is None:
        yield "bare except"
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in BANNED_BUILTINS:
            yield node.func.id
        for keyword in node.keywords:
            value = keyword.value
            if isinstance(value, ast.Constant) and (keyword.arg, value.value) in BANNED_KEYWORDS:
                yield f"{keyword.arg}={value.value}"
    elif isinstance(node, ast.Attribute) and ast.unparse(node) in BANNED_ATTRIBUTES:
        yield ast.unparse(node)


def test_banned_code_is_nowhere() -> None:
    found = [
        f"{where(path, node)} {what}"
        for path in python_files(*PACKAGES, "tests")
        for node in ast.walk(parsed(path))
        for what in _banned(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "torch.load(path)",
        "yaml.load(text)",
        "run(argv, shell=True)",
        "numpy.load(path, allow_pickle=True)",
        "try:\n    pass\nexcept:\n    pass",
    ],
)
def test_the_ban_sees_what_it_bans(source: str) -> None:
    assert [what for node in ast.walk(ast.parse(source)) for what in _banned(node)]


def test_no_assert_outside_tests() -> None:
    found = [
        where(path, node)
        for path in python_files(*PACKAGES)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_nothing_binds_to_every_interface_by_default() -> None:
    everywhere = re.compile(r"^(0\.0\.0\.0|\[::\]|::$)")
    found = [
        where(path, node)
        for path in python_files(*PACKAGES)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and everywhere.match(node.value)
    ]
    assert found == []


def test_no_unfinished_work_is_left() -> None:
    marks = re.compile(r"#.*\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
    found = [
        f"{where(path)}:{number}"
        for path in python_files(*PACKAGES, "tests")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_no_path_of_one_machine_is_written_down() -> None:
    """Absolute paths of a developer's machine and package index hosts do not belong in a project."""
    roots = "|".join(("work", "home", "root", "mnt", "Users", "opt/wheels", "opt/pypi"))
    paths = re.compile(rf"(?<![\w.:/\-\]\)}}])/(?:{roots})/\w")
    hosts = re.compile("|".join((r"pypi\." + "org", "files.python" + "hosted")))
    found = []
    for path in project_files():
        if path.suffix in {".png", ".safetensors", ".binpb", ".json"} or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if paths.search(line) or hosts.search(line):
                found.append(f"{where(path)}:{number} {line.strip()[:80]}")
    assert found == []
