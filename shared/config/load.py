"""Reads a component's configuration: defaults < file < environment < ``--set``.

Owns the sources and their order; the shapes live in ``services``. Every problem of every source is
reported in one ConfigError, each with its key path.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import yaml

from shared.config.convert import build
from shared.config.services import SERVICES
from shared.errors import ConfigError

T = TypeVar("T")
ENV_PREFIX = "TRIPTYCH_"
MAX_FILE_BYTES = 1 << 20


def config_from_args(cls: type[T], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> T:
    """The configuration that a service was started with: ``[--config FILE] [--set a.b=value ...]``.

    Raises ConfigError that lists all problems.
    """
    parser = _Parser(prog=cls.__name__, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[])
    args = parser.parse_args(list(argv))
    return load(
        cls,
        file=Path(args.config) if args.config else None,
        environ=os.environ if environ is None else environ,
        overrides=args.set,
    )


def load(
    cls: type[T],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
) -> T:
    """An instance of the frozen dataclass ``cls`` from all sources.

    ``overrides`` are "section.key=value" texts. Raises ConfigError that lists all problems.
    """
    problems: list[str] = []
    data = _read(file) if file is not None else {}
    _merge(data, _from_environ(cls, environ or {}))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(f"--set {text}: expected section.key=value")
        elif not _put(data, key.split("."), value):
            problems.append(f"{key}: not a section")
    return _built(cls, data, problems)


def with_environment(config: T, environ: Mapping[str, str]) -> T:
    """``config`` as a process with this environment would have it. Raises ConfigError like ``load``."""
    data = dump(config)
    _merge(data, _from_environ(type(config), environ))
    return _built(type(config), data, [])


def _built(cls: type[T], data: Mapping[str, Any], problems: list[str]) -> T:
    config = build(cls, data, lambda key, problem: problems.append(f"{key}: {problem}"))
    if config is None or problems:
        raise ConfigError("configuration has problems:\n" + "\n".join(f"  {line}" for line in problems))
    return config


def dump(config: object) -> dict[str, Any]:
    """A configuration as plain data that ``load`` reads back: what a launcher writes to a file."""
    data: dict[str, Any] = {}
    for spec in fields(config):  # type: ignore[arg-type]
        value = getattr(config, spec.name)
        if is_dataclass(value):
            data[spec.name] = dump(value)
        else:
            data[spec.name] = list(value) if isinstance(value, tuple) else value
    return data


def write(config: object, path: Path) -> None:
    """Write ``dump(config)`` as YAML, unless exactly that is there. Raises OSError."""
    text = yaml.safe_dump(dump(config), sort_keys=False)
    with contextlib.suppress(OSError, ValueError):
        if path.read_text(encoding="utf-8") == text:
            return
    path.write_text(text, encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"the configuration file {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else _parse_yaml(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot parse the configuration file {path}: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration file {path} must hold sections and keys")
    return data


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe subset, in which a repeated key is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key appears twice", node.start_mark)
        return mapping


def _parse_yaml(text: str) -> Any:
    loader = _StrictLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _from_environ(cls: type[Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """``TRIPTYCH_SECTION__KEY`` and, for keys outside any section, ``TRIPTYCH_KEY``.

    Names with a double underscore are ours and must be known, to this service or another: services of
    one deployment share an environment. Of the others only known keys count, since the environment holds
    variables that are no configuration.
    """
    hints = get_type_hints(cls)
    top = {name for name, hint in hints.items() if not is_dataclass(hint)}
    foreign = {f.name for service in SERVICES for f in fields(service)} - hints.keys()
    data: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        keys = name[len(ENV_PREFIX) :].lower().split("__")
        if (len(keys) > 1 and keys[0] not in foreign) or keys[0] in top:
            _put(data, keys, value)
    return data


def _put(data: dict[str, Any], keys: Sequence[str], value: Any) -> bool:
    """Set a nested key; False when a part of the path is no section."""
    *sections, last = keys
    for section in sections:
        below = data.setdefault(section, {})
        if not isinstance(below, dict):
            return False
        data = below
    data[last] = value
    return True


def _merge(data: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        below = data.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            _merge(below, value)
        else:
            data[key] = value


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line as a ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"bad command line: {message} (expected [--config FILE] [--set key=value ...])")
