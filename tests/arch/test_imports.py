"""The direction of imports: the contracts in pyproject.toml, and the few that they cannot express."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

from tests.arch._tree import PACKAGES, ROOT, module_name, parsed, project_files, python_files, where

TORCH = {"torch", "triton", "transformers"}


def test_import_contracts_are_kept() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("services", "shared", include_external_packages=True, cache_dir=None)


def _reaching_torch(graph: grimp.ImportGraph, modules: list[str]) -> list[str]:
    present = TORCH & graph.modules
    return [
        " > ".join(chain)
        for module in modules
        for target in sorted(present)
        if (chain := graph.find_shortest_chain(importer=module, imported=target))
    ]


def test_only_the_batched_sampler_may_use_torch_in_sampling(graph: grimp.ImportGraph) -> None:
    device = "shared.sampling.device"
    modules = [
        name
        for name in graph.find_descendants("shared.sampling")
        if name != device and not name.startswith(device)
    ]
    assert _reaching_torch(graph, ["shared.sampling", *modules]) == []


def test_the_witness_runner_is_torch_free(graph: grimp.ImportGraph) -> None:
    modules = [name for name in graph.modules if name.startswith("shared.runner.witness")]
    assert modules
    assert _reaching_torch(graph, modules) == []


def test_the_oracle_shares_no_code_with_what_it_judges(graph: grimp.ImportGraph) -> None:
    oracle = "shared.runner.witness_oracle"
    judged = [
        name
        for name in graph.modules
        if name.startswith(("shared.kv_cache", "shared.runner.witness")) and name != oracle
    ]
    allowed = {"shared.runner.witness_config"}
    direct = graph.find_modules_directly_imported_by(oracle)
    assert direct & (set(judged) - allowed) == set()


def test_wire_code_imports_nothing_of_ours() -> None:
    generated = [path for path in project_files() if "_pb2" in path.stem and path.suffix == ".py"]
    assert generated
    for path in generated:
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for name in _imported(node)
        }
        assert names & set(PACKAGES) == set(), where(path)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def test_nothing_shipped_imports_the_tests() -> None:
    guilty = [
        where(path, node)
        for path in python_files(*PACKAGES)
        for node in ast.walk(parsed(path))
        for name in _imported(node)
        if name.split(".")[0] in {"tests", "pytest", "hypothesis"}
    ]
    assert guilty == []


def test_every_module_says_what_it_owns() -> None:
    silent = [
        module_name(path)
        for path in python_files(*PACKAGES)
        if path.name != "__init__.py" and not ast.get_docstring(parsed(path))
    ]
    assert silent == []


def test_torch_is_a_dependency_of_workers_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    roles = {"core": project["dependencies"], **project["optional-dependencies"]}
    with_torch = {
        role for role, needs in roles.items() if any(n.startswith(("torch", "triton")) for n in needs)
    }
    assert with_torch == {"worker", "triton"}
