"""Files under 400 lines, functions under 60, thin services: a number holds where prose does not."""

from __future__ import annotations

import ast

import pytest

from tests.arch._tree import PACKAGES, ROOT, parsed, project_files, python_files, where

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
#: Lines of Python a service folder may have: it wires and translates, it never computes.
SERVICE_BUDGETS = {
    "services/router": 1500,
    "services/encoder": 500,
    "services/prefill": 500,
    "services/decode": 500,
    "services/kv_store": 500,
}


def test_no_file_reaches_400_lines() -> None:
    sources = [
        path
        for path in project_files()
        if path.suffix in {".py", ".c", ".h", ".proto"} and not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]
    counts = {where(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: lines for name, lines in counts.items() if lines >= MAX_FILE_LINES} == {}


def test_no_function_reaches_60_lines() -> None:
    long = {}
    for path in python_files(*PACKAGES, "tests"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    long[f"{where(path, node)} {node.name}"] = lines
    assert long == {}


@pytest.mark.parametrize(("folder", "budget"), SERVICE_BUDGETS.items())
def test_services_are_thin(folder: str, budget: int) -> None:
    gateway = ROOT / "services/router/gateway"
    sources = [
        path
        for path in python_files("services")
        if path.is_relative_to(ROOT / folder) and not path.is_relative_to(gateway)
    ]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources) < budget


def test_service_packages_have_empty_init_files() -> None:
    full = [
        where(path)
        for path in python_files("services")
        if path.name == "__init__.py" and [n for n in parsed(path).body if not isinstance(n, ast.Expr)]
    ]
    assert full == []
