"""What the user asked for: one field per input, typed and checked, from a workflow's ``with:`` or a command line.

On GitHub ``action.yml`` hands each input over as ``INPUT_<NAME>`` (upper case, ``-`` as ``_``), never inside a script's
text; elsewhere it is ``--name value``, which wins. Empty means not given. Nothing here touches disk or network.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, cast

import yaml

from cudaforge_action.descriptions import DESCRIPTIONS, MODE_DESCRIPTIONS
from cudaforge_action.records import Shard
from pytest_cudaforge.errors import UsageError

__all__ = ["MODES", "Inputs", "Needs", "Runner", "as_environ", "read"]

MODES: Final = ("guard", "report", "plan", "forge", "verify", "publish", "all")
MATRIX_JOBS_LIMIT: Final = 256
"""GitHub's own: "A matrix will generate a maximum of 256 jobs per workflow run"."""

# A shard's name becomes a folder and part of an artifact's name.
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ABOUT = """\
What the GitHub Action runs; the same on GitLab CI and on a plain machine. Results, summary.md and outputs.json lie in
.cudaforge/action (--output-dir).

modes:
"""
_TRUTH = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}


@dataclass(frozen=True)
class Runner:
    """One kind of machine to forge on. ``labels``: what ``runs-on`` takes. ``arch``: of its device ("sm_90"), where one
    entry a kind of GPU is wanted. ``shards``: how many jobs at most may ask for such a machine at a time."""

    labels: tuple[str, ...]
    device: str = ""
    arch: str = ""
    shards: int = 1


@dataclass(frozen=True)
class Needs:
    """What a job that went before says of itself, which no other job can say for it. ``result``: ``success``,
    ``failure``, ``cancelled`` or ``skipped``. ``digests``: of what it left, by name, from all its outputs; "" where two
    of a matrix say different things of the same."""

    result: str
    digests: Mapping[str, str]


@dataclass(frozen=True)
class Inputs:
    """All inputs of all modes. Paths are as given: ``output`` is where results lie, seen from where this process
    stands, which is the checkout's top; nothing changes the directory."""

    mode: str
    token: str = field(default="", repr=False)
    working_directory: Path = Path(".")
    output_dir: Path = Path(".cudaforge/action")
    artifacts: Literal["auto", "off"] = "auto"
    python: str = ""
    paths: tuple[str, ...] = ()
    pytest_args: tuple[str, ...] = ()
    device: Literal["", "cpu", "cuda"] = ""
    comment: Literal["auto", "changes", "failures", "off"] = "auto"
    base: str = ""
    inconclusive: Literal["neutral", "fail"] = "neutral"
    strict: bool = False
    history: Path | None = None
    fork_heads: Literal["refuse", "skip", "run"] = "refuse"
    allow_pull_request_target: bool = False
    status_context: str = "cudaforge/guard"
    runners: tuple[Runner, ...] = (Runner(labels=("self-hosted", "gpu")),)
    targets: tuple[str, ...] = ()
    max_shards: int = 16
    min_headroom: float = 1.10
    rounds: int | None = None
    max_usd: float | None = None
    shard: Shard | None = None
    quiet_minutes: float = 10.0
    needs: Needs | None = None
    branch: str = "cudaforge/forge"
    branch_suffix: str = ""
    title: str = ""
    commit_message: str = ""
    committer: str = "pytest-cudaforge[bot] <pytest-cudaforge[bot]@users.noreply.github.com>"
    labels: tuple[str, ...] = ()
    reviewers: tuple[str, ...] = ()
    team_reviewers: tuple[str, ...] = ()
    assignees: tuple[str, ...] = ()
    draft: bool = False
    delete_branch: bool = True

    @property
    def output(self) -> Path:
        """The folder that holds ``guard/``, ``plan/``, ``forged/``, ``verified/`` and ``published/``."""
        return self.working_directory / self.output_dir

    @property
    def history_file(self) -> Path | None:
        """``history`` as seen from where this process stands; None where the project's own settings say where."""
        return self.working_directory / self.history if self.history is not None else None

    @property
    def head_branch(self) -> str:
        """``branch`` and ``branch_suffix`` as one name."""
        between = "" if not self.branch_suffix or self.branch_suffix[0] in "-/._" else "-"
        return f"{self.branch}{between}{self.branch_suffix}"


def read(environ: Mapping[str, str], argv: Sequence[str]) -> Inputs:
    """The inputs of this process. ``argv`` is the command line without the program's name: ``MODE --name value …``.

    The token comes from ``INPUT_TOKEN`` or ``CUDAFORGE_TOKEN`` only: a command line is readable by every process of the
    machine. Raises :class:`~pytest_cudaforge.errors.UsageError`, which names the input, on anything that is not right.
    """
    given = _from_environment(environ) | _from_command_line(argv)
    values = {name: _READERS.get(name, _text)(name, text) for name, text in given.items()}
    if "mode" not in values:
        raise _wrong("mode", "", f"one of {', '.join(MODES)}")
    return Inputs(**values)


def as_environ(inputs: Inputs) -> dict[str, str]:
    """The environment that :func:`read` makes these very inputs of; for a process of another mode."""
    given = {item.name: _written(item.name, getattr(inputs, item.name)) for item in fields(Inputs)}
    return {f"INPUT_{name.upper()}": text for name, text in given.items() if text}


def _written(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if name == "runners":
        return json.dumps([asdict(runner) for runner in cast("tuple[Runner, ...]", value)])
    if isinstance(value, Needs):
        return json.dumps({"result": value.result, "outputs": {"digests": json.dumps(dict(value.digests))}})
    if isinstance(value, Shard):
        return json.dumps(asdict(value))
    if isinstance(value, tuple):
        return shlex.join(value) if _READERS[name] is _words else "\n".join(value)
    return str(value)


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    found = {item.name: environ.get(f"INPUT_{item.name.upper()}", "") for item in fields(Inputs)}
    found["token"] = found["token"] or environ.get("CUDAFORGE_TOKEN", "")
    # What a YAML block scalar leaves at the end of a value is not part of it.
    return {name: text.strip() for name, text in found.items() if text.strip()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"the command line is wrong: {message}", remedy="cudaforge-ci --help lists what may be said")


def _from_command_line(argv: Sequence[str]) -> dict[str, str]:
    parser = _Parser(
        prog="cudaforge-ci",
        allow_abbrev=False,
        usage="%(prog)s MODE [--input VALUE ...]",
        description=_ABOUT + "\n".join(f"  {mode:9}{said}" for mode, said in MODE_DESCRIPTIONS.items()),
        epilog="A token is read from the variable CUDAFORGE_TOKEN. Exit status 2: a wrong input or situation.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", nargs="?", metavar="MODE", help=" | ".join(MODES))
    defaults = as_environ(Inputs(mode=""))
    for item in fields(Inputs):
        if item.name not in ("mode", "token"):
            once = "true" if item.name in _SWITCHES else None
            default = defaults.get(f"INPUT_{item.name.upper()}", "")
            said = (DESCRIPTIONS[item.name] + (f" (default: {default})" if default else "")).replace("%", "%%")
            parser.add_argument(_flag(item.name), nargs="?" if once else None, const=once, metavar="VALUE", help=said)
    return {name: value for name, value in vars(parser.parse_args(argv)).items() if value}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _wrong(name: str, text: str, expected: str) -> UsageError:
    shown = f"is {text[:200]!r}" if text else "is missing"
    return UsageError(
        f"input {name.replace('_', '-')} {shown}",
        expected=expected,
        remedy="correct it under `with:` in the workflow, or on the command line",
    )


def _text(name: str, text: str) -> str:
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in text):
        raise _wrong(name, text, "text without control characters")
    return text


def _one_line(name: str, text: str) -> str:
    if "\n" in text:
        raise _wrong(name, text, "one line")
    return _text(name, text)


def _path(name: str, text: str) -> Path:
    return Path(_one_line(name, text))


def _inner_path(name: str, text: str) -> Path:
    path = _path(name, text)
    # Artifacts are collected from here, and what lies here is replaced: never a folder above the checkout.
    if path.is_absolute() or ".." in path.parts:
        raise _wrong(name, text, "a path below the checkout: relative, without '..'")
    return path


def _switch(name: str, text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise _wrong(name, text, "true or false")
    return _TRUTH[text.lower()]


def _choice(*allowed: str) -> Callable[[str, str], str]:
    def reader(name: str, text: str) -> str:
        if text not in allowed:
            raise _wrong(name, text, "one of " + ", ".join(item or '""' for item in allowed))
        return text

    return reader


def _whole(least: int, most: int) -> Callable[[str, str], int]:
    def reader(name: str, text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise _wrong(name, text, f"a whole number from {least} to {most}")
        return int(text)

    return reader


def _number(least: float, most: float) -> Callable[[str, str], float]:
    def reader(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise _wrong(name, text, f"a number from {least:g} to {most:g}")
        return value

    return reader


def _items(name: str, text: str) -> tuple[str, ...]:
    """One a line or separated by commas, as create-pull-request takes its lists."""
    return tuple(item.strip() for item in re.split(r"[,\n]", _text(name, text)) if item.strip())


def _lines_of_ids(name: str, text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_items(name, text)))


def _words(name: str, text: str) -> tuple[str, ...]:
    """As a shell would split them; nothing is expanded."""
    try:
        return tuple(shlex.split(_text(name, text)))
    except ValueError as error:
        raise _wrong(name, text, f"words as a shell splits them ({error})") from None


def _branch(name: str, text: str) -> str:
    """What git-check-ref-format allows, and no leading dash."""
    bad = re.search(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)", text)
    if bad or text[0] in "-./" or text[-1] in "./" or text == "@" or len(text) > 200:
        raise _wrong(name, text, "the name of a branch, as git check-ref-format allows it")
    return text


def _identity(name: str, text: str) -> str:
    """As git writes one; what would end the header of a commit is no part of it."""
    if not re.fullmatch(r"[^<>\n]{1,100} <[^<>\s]{1,200}>", _one_line(name, text)):
        raise _wrong(name, text, "Name <address>")
    return text


def _suffix(name: str, text: str) -> str:
    _branch(name, "x" + text)
    return text


def _runners(name: str, text: str) -> tuple[Runner, ...]:
    expected = "a YAML list such as `[{labels: [self-hosted, h200], device: cuda, arch: sm_90, shards: 4}]`"
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _wrong(name, text, f"{expected} ({str(error).splitlines()[0]})") from None
    if not isinstance(data, list) or not data or not all(isinstance(item, dict) for item in data):
        raise _wrong(name, text, expected)
    return tuple(_runner(name, cast("dict[object, object]", item), expected) for item in data)


def _runner(name: str, item: Mapping[object, object], expected: str) -> Runner:
    labels = item.get("labels")
    labels = [labels] if isinstance(labels, str) else labels
    device, arch, shards = item.get("device", ""), item.get("arch", ""), item.get("shards", 1)
    if set(item) - {"labels", "device", "arch", "shards"}:
        raise _wrong(name, str(item), f"{expected}; no other keys")
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) and label for label in labels):
        raise _wrong(name, str(item), f"{expected}; labels are one word or more")
    if device not in ("", "cpu", "cuda") or not isinstance(arch, str):
        raise _wrong(name, str(item), f"{expected}; device is cpu or cuda, arch a word")
    if not isinstance(shards, int) or isinstance(shards, bool) or not 1 <= shards <= MATRIX_JOBS_LIMIT:
        raise _wrong(name, str(item), f"{expected}; shards from 1 to {MATRIX_JOBS_LIMIT}")
    return Runner(tuple(labels), device, arch, shards)


def _shard(name: str, text: str) -> Shard:
    """A job's own line of the matrix, as ``plan`` wrote it."""
    expected = "JSON of one shard, as mode plan writes it: name, runs_on, device, targets, weight"
    if text == "null":  # what jq says of an entry that is not there
        raise _wrong(name, text, f"{expected}; where plan found nothing to forge there is none")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(name, text, expected) from None
    keys = {item.name for item in fields(Shard)}
    if not isinstance(data, dict) or set(data) - keys or not {"name", "runs_on", "device", "targets"} <= set(data):
        raise _wrong(name, text, expected)
    weight = data.get("weight", 1.0)
    if not isinstance(data["name"], str) or not _SHARD_NAME.fullmatch(data["name"]) or ".." in data["name"]:
        raise _wrong(name, text, f"{expected}; a name of letters, digits, '.', '_' and '-'")
    if data["device"] not in ("", "cpu", "cuda") or isinstance(weight, bool) or not isinstance(weight, int | float):
        raise _wrong(name, text, expected)
    return Shard(
        data["name"],
        _strings(name, data["runs_on"], expected),
        data["device"],
        _strings(name, data["targets"], expected),
        float(weight),
    )


def _needs(name: str, text: str) -> Needs:
    """One job of the context ``needs``: https://docs.github.com/actions/reference/workflows-and-actions/contexts."""
    expected = "one job of the context needs, as JSON: ${{ toJSON(needs.verify) }}"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(name, text, expected) from None
    outputs = data.get("outputs") if isinstance(data, dict) else None
    if not isinstance(outputs, dict) or not isinstance(data.get("result"), str):
        raise _wrong(name, text, expected)
    digests: dict[str, str] = {}
    for output in outputs.values():
        for left, digest in _digests(output).items():
            digests[left] = digest if digests.get(left, digest) == digest else ""
    return Needs(data["result"], digests)


def _digests(output: object) -> Mapping[str, str]:
    """What an output says of digests; nothing where it is about something else."""
    try:
        data = json.loads(output) if isinstance(output, str) else None
    except (ValueError, RecursionError):
        return {}
    pairs = data.items() if isinstance(data, dict) else ()
    return {left: digest for left, digest in pairs if isinstance(digest, str) and _DIGEST.fullmatch(digest)}


def _strings(name: str, value: object, expected: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise _wrong(name, str(value), expected)
    return tuple(value)


_SWITCHES: Final = ("strict", "allow_pull_request_target", "draft", "delete_branch")

_READERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "mode": _choice(*MODES),
    "token": _one_line,
    "working_directory": _inner_path,
    "output_dir": _inner_path,
    "artifacts": _choice("auto", "off"),
    "python": _one_line,
    "paths": _words,
    "pytest_args": _words,
    "device": _choice("", "cpu", "cuda"),
    "comment": _choice("auto", "changes", "failures", "off"),
    "base": _branch,
    "inconclusive": _choice("neutral", "fail"),
    "history": _path,
    "fork_heads": _choice("refuse", "skip", "run"),
    "status_context": _one_line,
    "runners": _runners,
    "targets": _lines_of_ids,
    "max_shards": _whole(1, MATRIX_JOBS_LIMIT),
    "min_headroom": _number(1.0, 100.0),
    "rounds": _whole(1, 1000),
    "max_usd": _number(0.0, 1e6),
    "shard": _shard,
    "quiet_minutes": _number(0.0, 1440.0),
    "needs": _needs,
    "branch": _branch,
    "branch_suffix": _suffix,
    "title": _one_line,
    "committer": _identity,
    "labels": _items,
    "reviewers": _items,
    "team_reviewers": _items,
    "assignees": _items,
    **{name: _switch for name in _SWITCHES},
}
