"""Lower tiers from outside of this package, named in the operator's configuration.

Owns the loading. A name never comes from a request: whoever can write the configuration can run
code in this process anyway.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping

from shared.errors import ConfigError
from shared.tiering.offload import OffloadTier

_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)


def load_tier(module_path: str, options: Mapping[str, object]) -> OffloadTier:
    """The tier that ``module_path`` ("package.module:Class") names, made with ``options`` as keyword
    arguments. Raises ConfigError, whatever is wrong with it."""
    matched = _PATH.fullmatch(module_path)
    if matched is None:
        raise ConfigError(f"tier {module_path!r}: expected package.module:Class")
    try:
        found = getattr(importlib.import_module(matched[1]), matched[2], None)
    except Exception as error:  # importing runs foreign code: anything may come
        raise ConfigError(f"tier {module_path!r} cannot be imported: {error!r}") from error
    if not isinstance(found, type) or not issubclass(found, OffloadTier) or inspect.isabstract(found):
        raise ConfigError(f"tier {module_path!r} is not a complete subclass of OffloadTier")
    try:
        return found(**options)
    except Exception as error:  # as above
        raise ConfigError(f"tier {module_path!r} cannot be made: {error!r}") from error
