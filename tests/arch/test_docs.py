"""Documents keep their word: commands they name exist, links resolve, decisions have their three parts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.__main__ import COMMANDS
from tests.arch._tree import ROOT, project_files

DOCUMENTS = [path for path in project_files() if path.suffix == ".md"]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
REQUIRED = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/architecture.md",
    "docs/glossary.md",
    "docs/operations.md",
    "docs/api.md",
]


def _targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))


def _code(path: Path) -> str:
    """Fenced blocks and inline code of a document: where commands stand."""
    text = path.read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return "\n".join(fenced + inline)


def _anchor(heading: str) -> str:
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return words.replace(" ", "-")


def test_the_documents_exist() -> None:
    assert [name for name in REQUIRED if name not in NAMES] == []
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_make_verbs_exist(path: Path) -> None:
    named = set(re.findall(r"^\s*(?:\$ )?make ([a-z][a-z-]*)", _code(path), re.MULTILINE))
    assert named - _targets() == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_triptych_commands_exist(path: Path) -> None:
    named = set(re.findall(r"^\s*(?:\$ )?triptych ([a-z]+)", _code(path), re.MULTILINE))
    assert named - set(COMMANDS) == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(_anchor, headings):
                broken.append(target)
    assert broken == []


def test_decisions_are_numbered_and_complete() -> None:
    decisions = sorted((ROOT / "docs/adr").glob("*.md"))
    assert decisions
    assert [int(path.name[:4]) for path in decisions] == list(range(1, len(decisions) + 1))
    for path in decisions:
        headings = re.findall(r"^## (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"], path.name


def test_make_alone_lists_every_verb() -> None:
    listing = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    helped = set(re.findall(r"^\s+make ([a-z-]+) ", listing, re.MULTILINE))
    parts_of_check = {"format-check", "lint", "types", "arch"}
    assert _targets() - helped == parts_of_check


def test_modules_behind_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    modules = set(re.findall(r"\$\(PY\) -m ((?:services|tests|models)[\w.]*)", makefile))
    missing = []
    for module in sorted(modules):
        stem = ROOT.joinpath(*module.split("."))
        if not (stem.with_suffix(".py").exists() or (stem / "__main__.py").exists()):
            missing.append(module)
    assert missing == []


def test_constraints_name_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.!]+", line)] == []
    installed = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert installed in {"3.11", "3.12", "3.13"}
