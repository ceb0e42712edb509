"""Whether the lower tiers of a plan's KV stores can be opened, as far as can be told without opening them.

Nothing is created, and no foreign code is run: modules are looked for, not imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from services.cli.topology import ProcessSpec
from shared.config.services import StoreConfig


def problems(specs: Sequence[ProcessSpec]) -> Iterator[str]:
    """What is wrong with ``disk.path`` and ``tiers`` of all stores, in words."""
    stores = [(spec.name, spec.config) for spec in specs if isinstance(spec.config, StoreConfig)]
    users: defaultdict[str, list[str]] = defaultdict(list)
    for name, config in stores:
        if config.disk.path:
            users[os.path.realpath(config.disk.path)].append(name)
            yield from (f"{name}: disk.path: {problem}" for problem in _disk(Path(config.disk.path)))
        for tier in config.tiers:
            yield from (f"{name}: tiers: {problem}" for problem in _tier(tier))
    for path, names in users.items():
        if len(names) > 1:
            yield f"disk.path {path} is given to {' and '.join(names)}; each needs its own"


def _disk(path: Path) -> Iterator[str]:
    """The directory, or the one in which it would be made."""
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    except OSError as error:
        yield f"{path}: {error.strerror}"
        return
    if not there.is_dir():
        yield f"{there} is not a directory"
    elif not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        yield f"{there} is not writable"


def _tier(text: str) -> Iterator[str]:
    module, _, name = text.partition("?")[0].partition(":")
    parts = module.split(".")
    if not all(part.isidentifier() for part in (*parts, name)):
        yield f"{text!r}: expected package.module:Class"
    elif not _is_there(parts):
        yield f"there is no module {module}"


def _is_there(parts: Sequence[str]) -> bool:
    """Whether a store would find this module. It runs in the present folder, which its search begins with.

    Each part is looked for in the folders of the one before: looking for the whole name would import those.
    """
    spec = PathFinder.find_spec(parts[0], [os.getcwd()]) or importlib.util.find_spec(parts[0])
    for part in parts[1:]:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec is not None
