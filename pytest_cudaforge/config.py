"""One frozen :class:`ForgeConfig` from cudaforge.yaml < CUDAFORGE_* environment < command line.

Standard library only until a file is read (``yaml`` is imported then). Every error is a ``ConfigError`` that says
where the value came from (``cudaforge.yaml:7``, an environment variable, an option) and what was expected there.

A file looks like this; every key is optional::

    rounds: 10
    max_usd_per_target: 0.50
    chat:
      coder: {provider: openai, model: gpt-5, base_url: https://api.openai.com/v1, api_key_env: OPENAI_API_KEY}
      judge: {model: gpt-5-mini}        # what the judge leaves out is taken from the coder
      command: {argv: [my-agent, --print], env: [MY_AGENT_TOKEN]}
      replay: {paths: [conversations]}
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_cudaforge.errors import ConfigError

if TYPE_CHECKING:
    import yaml

__all__ = [
    "ChatConfig",
    "CommandConfig",
    "ForgeConfig",
    "GuardConfig",
    "ReplayConfig",
    "RoleConfig",
    "find_config",
    "load",
    "or_compiler",
]

FILE_NAMES = ("cudaforge.yaml", "cudaforge.yml")
ENVIRONMENT_PREFIX = "CUDAFORGE_"
#: Not settings, and no typing errors either: set by us for the programs we start (chat/command.py), or read in
#: production (runtime/kernels.py).
FOREIGN_VARIABLES = frozenset(
    {"CUDAFORGE_ROLE", "CUDAFORGE_TARGET", "CUDAFORGE_ROUND", "CUDAFORGE_LANGUAGE", "CUDAFORGE_CACHE_DIR"}
)
Keys = tuple[str, ...]


# -- the settings ------------------------------------------------------------------------------------------------


def _checked(default: Any, rule: str, holds: Callable[[Any], bool]) -> Any:
    """A field whose value must satisfy ``holds``; ``rule`` is how the error message puts it."""
    return field(default=default, metadata={"rule": rule, "holds": holds})


def _at_least(minimum: float, default: Any) -> Any:
    return _checked(default, f"a number >= {minimum:g}", lambda value: value >= minimum)


def _above_zero(default: Any) -> Any:
    return _checked(default, "a number > 0", lambda value: value > 0)


def _matching(default: Any, pattern: str, rule: str) -> Any:
    return _checked(default, rule, lambda value: re.fullmatch(pattern, value) is not None)


_DOTTED = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"


@dataclass(frozen=True)
class RoleConfig:
    """Who plays one role. ``provider``: openai, command, replay, ``package.module:factory`` (chat.load says how), or
    compiler: no model, torch.compile's options are searched (for the Coder; no Judge is asked then).

    ``api_key_env`` is the *name* of the environment variable that holds the key; keys are read from nowhere else.
    ``extra`` goes into the request's body as it stands, for what one server has and others do not.
    """

    provider: str = _matching(
        "openai",
        f"openai|command|replay|compiler|{_DOTTED}",
        "openai, command, replay, compiler or package.module:factory",
    )
    model: str = ""
    base_url: str | None = _matching(
        None,
        r"https?://[^@\s]+",
        "an http(s) URL without user name, password or key in it (the key belongs into an environment variable)",
    )
    api_key_env: str = _matching(
        "OPENAI_API_KEY",
        _VARIABLE,
        "the name of an environment variable, never the key itself (the value given is not shown here)",
    )
    temperature: float | None = _at_least(0, None)
    max_output_tokens: int | None = _at_least(1, None)
    timeout_s: float = _above_zero(600.0)
    max_retries: int = _at_least(0, 3)
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandConfig:
    """The program behind ``provider: command``; ``env`` names the variables it gets besides PATH, HOME and LANG."""

    argv: tuple[str, ...] = ()
    env: tuple[str, ...] = _checked(
        (),
        "names of environment variables (values are never written into a config)",
        lambda names: all(re.fullmatch(_VARIABLE, name) for name in names),
    )
    timeout_s: float = _above_zero(1800.0)


@dataclass(frozen=True)
class ReplayConfig:
    """Recorded conversations: .jsonl files, or folders of them (searched in depth)."""

    paths: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ChatConfig:
    """Both roles; a field that ``judge`` leaves out is taken from ``coder``."""

    coder: RoleConfig = RoleConfig()
    judge: RoleConfig = RoleConfig()
    command: CommandConfig = CommandConfig()
    replay: ReplayConfig = ReplayConfig()


_WORK = ("kernel", "mixed", "library", "rewrite")


@dataclass(frozen=True)
class GuardConfig:
    """When ``pytest --forge-guard`` calls a kernel slower: by more than this share of its time *and* this much per
    call. ``promise_margin``: how far its speedup may fall below what the manifest promised."""

    relative: float = _at_least(0, 0.03)
    absolute_us: float = _at_least(0, 1.0)
    promise_margin: float = _checked(0.10, "a number from 0 to below 1", lambda value: 0 <= value < 1)
    inconclusive: Literal["neutral", "fail"] = "neutral"


@dataclass(frozen=True)
class ForgeConfig:
    """All settings of a run; None leaves a choice to whoever needs it. ``names_models``: something is said of models.

    Paths are absolute: given in a file, they are relative to that file; in the environment or on the command line, to
    the working directory; defaults, to ``root`` (pytest's rootdir).
    """

    root: Path = Path()
    file: Path | None = None
    names_models: bool = False
    notes: tuple[str, ...] = ()
    forge_paths: tuple[Path, ...] = ()
    forge_dir: Path = Path("forged")
    forge_cases: bool = False
    run_dir: Path = Path(".cudaforge")
    #: Where each run of the guard appends what it measured, and how large that file may grow: then its oldest lines go.
    history: Path = Path(".cudaforge/history.jsonl")
    history_mb: float = _above_zero(20.0)
    device: str = _matching("auto", r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:<index>")
    arch: str | None = _matching(None, r"cpu|sm_\d{2,3}[af]?", "cpu or sm_<number>, such as sm_90")
    languages: tuple[str, ...] | None = None
    #: Forge for these workloads alone (names or patterns): a kernel of their own, beside the target's others.
    workloads: tuple[str, ...] | None = None
    rounds: int = _at_least(1, 10)
    patience: int = _at_least(1, 4)
    roofline_stop: float = _above_zero(0.9)
    min_headroom: float = _at_least(0, 1.1)
    isolation: Literal["auto", "none"] = "auto"
    #: Whether candidates are profiled for the Judge: auto does where a live model is asked, not for a recording.
    profile: Literal["auto", "always", "never"] = "auto"
    trials: int = _at_least(1, 5)
    timing_budget_s: float | None = _above_zero(None)
    max_minutes_per_target: float | None = _above_zero(None)
    max_minutes: float | None = _above_zero(None)
    max_usd_per_target: float | None = _at_least(0, None)
    max_usd: float | None = _at_least(0, None)
    concurrency: int = _at_least(1, 4)
    strategy: str = "refine"
    allow: tuple[str, ...] | None = _checked(
        None, "some of " + ", ".join(_WORK), lambda given: set(given) <= set(_WORK)
    )
    prices: Path | None = None
    guard: GuardConfig = GuardConfig()
    chat: ChatConfig = ChatConfig()


#: Filled in by :func:`load`, never by a user.
_COMPUTED = frozenset({("root",), ("file",), ("names_models",), ("notes",)})


@dataclass(frozen=True)
class _Setting:
    keys: Keys
    hint: Any
    field: dataclasses.Field[Any]

    @property
    def dotted(self) -> str:
        return ".".join(self.keys)

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + "_".join(self.keys).upper()


def _walk(record: type, prefix: Keys = ()) -> Iterator[_Setting]:
    hints = typing.get_type_hints(record)
    for item in dataclasses.fields(record):
        keys = (*prefix, item.name)
        if dataclasses.is_dataclass(hints[item.name]):
            yield from _walk(hints[item.name], keys)
        elif keys not in _COMPUTED:
            yield _Setting(keys, hints[item.name], item)


@functools.lru_cache(maxsize=1)
def _settings() -> dict[Keys, _Setting]:
    return {setting.keys: setting for setting in _walk(ForgeConfig)}


# -- where values come from --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given:
    """A value as somebody wrote it: ``where`` names the place, ``base`` is what relative paths start from."""

    value: object
    where: str
    base: Path
    textual: bool


Layer = dict[Keys, _Given]


def find_config(start: Path, root: Path) -> Path | None:
    """The nearest cudaforge.yaml from ``start`` up to ``root``, both included; only ``root`` if start is elsewhere."""
    start, root = _absolute(start), _absolute(root)
    inside = start == root or root in start.parents
    folders = [start, *start.parents] if inside else [root]
    for folder in folders:
        found = [folder / name for name in FILE_NAMES if (folder / name).is_file()]
        if len(found) > 1:
            raise ConfigError(
                f"{folder} holds both {FILE_NAMES[0]} and {FILE_NAMES[1]}",
                expected="one configuration file in a folder",
                remedy=f"keep {FILE_NAMES[0]}, delete the other",
            )
        if found:
            return found[0]
        if folder == root:
            return None
    return None


def load(
    options: Mapping[str, object], *, root: Path, start: Path | None = None, environ: Mapping[str, str] | None = None
) -> ForgeConfig:
    """Merge file, environment and command line.

    ``options`` maps a setting's dotted name ("rounds", "chat.coder.model") to a value, None meaning "not given"; its
    key ``config`` names a file to read instead of the one :func:`find_config` finds. ``start`` (the working directory;
    default ``root``) is where that search begins. Raises ``ConfigError``.
    """
    root = _absolute(root)
    start = _absolute(start or root)
    given = {name: value for name, value in options.items() if value is not None}
    path = _file_to_read(given.pop("config", None), start, root)
    layers = _file_layer(path) if path is not None else {}
    layers |= _environment_layer(environ or {}, start)
    layers |= _option_layer(given, start)
    _fill_judge(layers)
    named = any(keys[0] == "chat" for keys in layers)
    config: ForgeConfig = _build(ForgeConfig, (), layers, root)
    return dataclasses.replace(config, root=root, file=path, names_models=named)


def _absolute(path: Path) -> Path:
    # Links are kept: paths are compared with pytest's rootdir, which keeps them, too.
    return Path(os.path.abspath(path))


def _file_to_read(option: object, start: Path, root: Path) -> Path | None:
    if option is None:
        return find_config(start, root)
    path = start / str(option)
    if not path.is_file():
        raise ConfigError(
            f"the configuration file {path} does not exist",
            expected="a YAML file",
            remedy="mend the option --forge-config",
        )
    return _absolute(path)


_NOBODY = (
    "no model is configured and OPENAI_API_KEY is not set: torch.compile's options were searched, no kernel was "
    "written. For kernels, say in cudaforge.yaml who writes them: chat: {coder: {provider: openai, model: ...}}"
)


def or_compiler(config: ForgeConfig, environ: Mapping[str, str]) -> ForgeConfig:
    """``config``, with the compiler as its Coder where nothing is said of models and there is no key; a note says so.

    Whoever named a provider, or has a key, wants a model: what is missing then is an error, which says what.
    """
    if config.names_models or environ.get(RoleConfig().api_key_env):
        return config
    nobody = RoleConfig(provider="compiler")
    return dataclasses.replace(
        config, chat=dataclasses.replace(config.chat, coder=nobody, judge=nobody), notes=(*config.notes, _NOBODY)
    )


def _fill_judge(layers: Layer) -> None:
    for keys in list(layers):
        if keys[:2] == ("chat", "coder"):
            layers.setdefault(("chat", "judge", *keys[2:]), layers[keys])


def _environment_layer(environ: Mapping[str, str], base: Path) -> Layer:
    by_variable = {setting.variable: setting for setting in _settings().values()}
    layer: Layer = {}
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in FOREIGN_VARIABLES:
            continue
        if name not in by_variable:
            raise ConfigError(
                f"the environment variable {name} is no setting" + _did_you_mean(name, by_variable),
                expected=f"{ENVIRONMENT_PREFIX}<SETTING>, for example CUDAFORGE_ROUNDS or CUDAFORGE_CHAT_CODER_MODEL",
                remedy=f"rename it or `unset {name}`",
            )
        layer[by_variable[name].keys] = _Given(environ[name], f"environment variable {name}", base, True)
    return layer


def _option_layer(options: Mapping[str, object], base: Path) -> Layer:
    by_name = {setting.dotted: setting for setting in _settings().values()}
    layer: Layer = {}
    for name, value in options.items():
        if name not in by_name:
            raise ConfigError(
                f"unknown option {name!r}" + _did_you_mean(name, by_name), expected="a setting's dotted name"
            )
        layer[by_name[name].keys] = _Given(value, f"option {name}", base, isinstance(value, str))
    return layer


def _did_you_mean(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


# -- the file ----------------------------------------------------------------------------------------------------


def _file_layer(path: Path) -> Layer:
    import yaml

    # The C loader's errors lack the text around the place; files this small do not need its speed.
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", expected="a readable UTF-8 file") from error
    try:
        node = loader.get_single_node()
        layer: Layer = {}
        if node is not None and not _is_null(node):
            _read_mapping(path, loader, node, (), layer)
        return layer
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{path}{at}: not valid YAML: {error.problem or error.context}", expected="a mapping of settings"
        ) from error
    except (ValueError, RecursionError) as error:
        # What looks like a date, and is none, fails in the constructor without a mark.
        raise ConfigError(f"{path}: a value cannot be read: {error}", expected="a mapping of settings") from None
    finally:
        loader.dispose()


def _is_null(node: yaml.Node) -> bool:
    return str(node.tag) == "tag:yaml.org,2002:null"


def _read_mapping(path: Path, loader: yaml.SafeLoader, node: yaml.Node, prefix: Keys, layer: Layer) -> None:
    import yaml

    section = ".".join(prefix) or "the file"
    where = f"{path}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: {section} is not a mapping", expected="`setting: value` lines")
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        name, line = str(loader.construct_object(key_node, deep=True)), key_node.start_mark.line + 1
        _check_key(path, line, (*prefix, name), seen)
        keys = (*prefix, name)
        if keys in _settings():
            value = loader.construct_object(value_node, deep=True)
            layer[keys] = _Given(value, f"{path}:{line}", path.parent, False)
        elif not _is_null(value_node):
            _read_mapping(path, loader, value_node, keys, layer)


def _check_key(path: Path, line: int, keys: Keys, seen: dict[str, int]) -> None:
    name = keys[-1]
    known = sorted(
        {
            known[len(keys) - 1]
            for known in _settings()
            if known[: len(keys) - 1] == keys[:-1] and len(known) >= len(keys)
        }
    )
    if name in seen:
        raise ConfigError(
            f"{path}:{line}: {'.'.join(keys)} is given twice (first in line {seen[name]})", expected="each key once"
        )
    if name not in known and "key" in name.lower() and name != "api_key_env":
        raise ConfigError(
            f"{path}:{line}: {'.'.join(keys)}: a key has no place in a file",
            expected="api_key_env: the name of the environment variable that holds it",
            remedy="remove the line, and revoke the key if the file was ever shared",
        )
    if name not in known:
        raise ConfigError(
            f"{path}:{line}: unknown key {'.'.join(keys)}{_did_you_mean(name, known)}",
            expected="one of " + ", ".join(known),
        )
    seen[name] = line


# -- building the records ----------------------------------------------------------------------------------------


def _build(record: type, prefix: Keys, layers: Layer, root: Path) -> Any:
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(record)
    for item in dataclasses.fields(record):
        keys, hint = (*prefix, item.name), hints[item.name]
        if keys in _COMPUTED:
            continue
        if dataclasses.is_dataclass(hint):
            values[item.name] = _build(typing.cast(type, hint), keys, layers, root)
        elif keys in layers:
            values[item.name] = _accept(_settings()[keys], layers[keys])
        elif isinstance(item.default, Path):
            values[item.name] = root / item.default
    return record(**values)


def _accept(setting: _Setting, given: _Given) -> Any:
    """The given value in the setting's type, checked against its rule. Values are not echoed where a key might hide."""
    secretive = setting.keys[-1] in ("api_key_env", "base_url", "env")
    shown = "" if secretive else f" {given.value!r}"
    rule = str(setting.field.metadata.get("rule", ""))
    try:
        value = _convert(setting.hint, given)
    except ValueError as error:
        raise ConfigError(
            f"{given.where}: {setting.dotted}{shown} is of the wrong type", expected=rule or str(error)
        ) from None
    holds = setting.field.metadata.get("holds")
    if holds is not None and value is not None and not holds(value):
        raise ConfigError(f"{given.where}: {setting.dotted}{shown} is not allowed", expected=rule)
    return value


def _convert(hint: Any, given: _Given) -> Any:
    """Raises ``ValueError`` whose text says what was expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        if given.value is None or (given.textual and str(given.value).lower() in ("", "none")):
            return None
        return _convert(next(arg for arg in args if arg is not type(None)), given)
    if origin is Literal:
        if given.value not in args:
            raise ValueError("one of " + ", ".join(args))
        return given.value
    if origin is tuple:
        return tuple(_convert(args[0], dataclasses.replace(given, value=part)) for part in _parts(given))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(given)
    return _scalar(hint, given)


def _parts(given: _Given) -> Sequence[object]:
    value = given.value
    if isinstance(value, str):
        try:
            # One string is a command line ("agent --print") or names parted by commas.
            return [part.strip() for part in value.split(",") if part.strip()] if "," in value else shlex.split(value)
        except ValueError:
            raise ValueError("a list, or text with balanced quotes") from None
    if not isinstance(value, (list, tuple)):
        raise ValueError("a list")
    return value


def _mapping(given: _Given) -> Mapping[str, object]:
    value = given.value
    if given.textual:
        try:
            value = json.loads(str(value))
        except ValueError:
            raise ValueError("a JSON object") from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("a mapping with text keys")
    return types.MappingProxyType(dict(value))


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _scalar(hint: Any, given: _Given) -> Any:
    value = given.value
    if hint is Path:
        if not isinstance(value, (str, Path)) or not str(value):
            raise ValueError("a path")
        return _absolute(given.base / Path(value).expanduser())
    if hint is str:
        if not isinstance(value, str):
            raise ValueError("text")
        return value
    if hint is bool:
        if given.textual and str(value).lower() in _BOOLEANS:
            return _BOOLEANS[str(value).lower()]
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return value
    return _number(hint, given)


def _number(hint: type, given: _Given) -> Any:
    value = given.value
    expected = "a whole number" if hint is int else "a number"
    if given.textual:
        try:
            value = hint(str(value))
        except ValueError:
            raise ValueError(expected) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (hint is int and not isinstance(value, int)):
        raise ValueError(expected)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("a finite number")
    return hint(value)
