"""Sources, their order, and the one error that lists every problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from shared.config.convert import ranged
from shared.config.load import config_from_args, dump, load, write
from shared.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    count: int = ranged(3, 1, 10)
    ratio: float = 0.5
    enabled: bool = True
    names: tuple[str, ...] = ("a",)
    window: int | None = None


@dataclass(frozen=True)
class Outer:
    path: str
    kind: Literal["x", "y"] = "x"
    inner: Inner = field(default_factory=Inner)


def problems(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return [line.strip() for line in str(error.value).splitlines()[1:]]


def test_each_source_overrides_those_before_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("path: file\ninner: {count: 4, ratio: 0.25, names: [f]}\n")
    environ = {"TRIPTYCH_INNER__COUNT": "5", "TRIPTYCH_INNER__RATIO": "0.125", "HOME": "/"}
    config = load(Outer, file=file, environ=environ, overrides=["inner.count=6"])
    assert config == Outer("file", "x", Inner(6, 0.125, True, ("f",)))


def test_toml_and_yaml_read_the_same(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "path: p\nkind: y\ninner:\n  enabled: false\n  window: 3\n  names: [a, b]\n"
    )
    (tmp_path / "c.toml").write_text(
        'path = "p"\nkind = "y"\n[inner]\nenabled = false\nwindow = 3\nnames = ["a", "b"]\n'
    )
    expected = Outer("p", "y", Inner(enabled=False, window=3, names=("a", "b")))
    assert load(Outer, file=tmp_path / "c.yaml") == load(Outer, file=tmp_path / "c.toml") == expected


def test_every_problem_of_every_source_is_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kind: z\ninner: {count: 11, ration: 1, enabled: maybe}\nextra: {a: 1}\n")
    with pytest.raises(ConfigError) as error:
        load(
            Outer,
            file=file,
            environ={"TRIPTYCH_INNER__WINDOW": "wide", "TRIPTYCH_NO__SUCH": "1"},
            overrides=["inner.ratio=nan", "nonsense", "kind.deep=1", "a..b=1"],
        )
    assert sorted(problems(error)) == [
        "--set a..b=1: expected section.key=value",
        "--set nonsense: expected section.key=value",
        "extra: unknown key (known here: path, kind, inner)",
        "inner.count: must be at most 10",
        "inner.enabled: expected true or false",
        "inner.ratio: expected a finite number",
        "inner.ration: unknown key (known here: count, ratio, enabled, names, window)",
        "inner.window: expected a whole number",
        "kind.deep: not a section",
        "kind: expected one of x, y",
        "no: unknown key (known here: path, kind, inner)",
        "path: missing and has no default",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("inner.enabled=off", Inner(enabled=False)),
        ("inner.enabled=1", Inner(enabled=True)),
        ("inner.ratio=1e3", Inner(ratio=1000.0)),
        ("inner.names=a, b,c", Inner(names=("a", "b", "c"))),
        ("inner.names=[]", Inner(names=())),
        ("inner.window=none", Inner(window=None)),
        ("inner.window=", Inner(window=None)),
        ("inner.window= 12 ", Inner(window=12)),
    ],
)
def test_texts_become_values_of_the_field_s_type(text: str, value: Inner) -> None:
    assert load(Outer, overrides=["path=p", text]).inner == value


def test_an_equals_sign_may_be_part_of_a_value() -> None:
    assert load(Outer, overrides=["path=a=b"]).path == "a=b"


@pytest.mark.parametrize(
    ("yaml_text", "problem"),
    [
        ("path: p\ninner: 3", "inner: expected a section"),
        ("path: [1]", "path: expected text"),
        ("path: true", "path: expected text"),
        ("path: p\ninner: {count: true}", "inner.count: expected a whole number"),
        ("path: p\ninner: {count: 2.0}", "inner.count: expected a whole number"),
        ("path: p\ninner: {ratio: .inf}", "inner.ratio: expected a finite number"),
        ("path: p\ninner: {names: {a: 1}}", "inner.names: expected a list"),
        ("path: p\ninner: {names: [[1]]}", "inner.names: expected text"),
        ("path: p\n7: 3", "7: unknown key (known here: path, kind, inner)"),
    ],
)
def test_values_of_the_wrong_type_are_problems(tmp_path: Path, yaml_text: str, problem: str) -> None:
    (tmp_path / "c.yaml").write_text(yaml_text)
    with pytest.raises(ConfigError) as error:
        load(Outer, file=tmp_path / "c.yaml")
    assert problems(error) == [problem]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.yaml", b"path: [unclosed"),
        ("c.yaml", b"- a\n- list"),
        ("c.yaml", b"path: a\npath: b"),
        ("c.yaml", b"!!python/object/apply:os.getcwd []"),
        ("c.yaml", b"\xff\xfe\x00"),
        ("c.yaml", b"path: " + b"x" * (1 << 20)),
        ("c.toml", b"path = "),
        ("c.toml", b'path = "a"\npath = "b"'),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError):
        load(Outer, file=tmp_path / name)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(Outer, file=tmp_path / "none.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing yet\n")
    assert load(Outer, file=tmp_path / "c.yaml", overrides=["path=p"]) == Outer("p")


def test_environment_sets_top_keys_but_leaves_foreign_names_alone() -> None:
    environ = {"TRIPTYCH_PATH": "env", "TRIPTYCH_CACHE_OF_SOMETHING": "1"}
    assert load(Outer, environ=environ) == Outer("env")


def test_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("path: p\n")
    argv = ["--config", str(file), "--set", "kind=y", "--set", "inner.count=9"]
    assert config_from_args(Outer, argv, {}) == Outer("p", "y", Inner(9))


@pytest.mark.parametrize("argv", [["--unknown"], ["--config"], ["stray"], ["--conf", "x"]])
def test_a_bad_command_line_is_a_config_error(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="bad command line"):
        config_from_args(Outer, argv, {})


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    config = Outer("p: #", "y", Inner(2, 0.1, False, ("x", "1"), 7))
    write(config, tmp_path / "c.yaml")
    assert load(Outer, file=tmp_path / "c.yaml") == config
    assert yaml.safe_load((tmp_path / "c.yaml").read_text()) == dump(config)
