"""An interpreter of composite actions: the steps of an ``action.yml`` with real bash and real ``GITHUB_*`` files.

As GitHub's runner does it: expressions are evaluated before a step, ``run`` is a script file for
``bash --noprofile --norc -eo pipefail``, what the step writes is read for workflow commands, ``GITHUB_OUTPUT`` becomes
outputs, ``GITHUB_ENV`` and ``GITHUB_PATH`` reach later steps. ``actions/upload-artifact`` and ``download-artifact`` are
played with local folders. What this interpreter does not know is an error, never a guess.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

BASH = ("bash", "--noprofile", "--norc", "-e", "-o", "pipefail")
#: actions/upload-artifact refuses names with these.
NOT_IN_ARTIFACT_NAMES = set('":<>|*?\r\n\\/')

#: The commands that the runner has handlers for; anything else that looks like one is text.
REGISTERED = frozenset(
    [
        *("error", "warning", "notice", "debug", "group", "endgroup", "add-mask", "stop-commands", "echo"),
        *("set-output", "save-state", "set-env", "add-path", "add-matcher", "remove-matcher"),
        "internal-set-repo-path",
    ]
)


# -- expressions -------------------------------------------------------------------------------------------------------

_TOKENS = re.compile(
    r"\s*(?:(?P<string>'(?:[^']|'')*')|(?P<number>\d+(?:\.\d+)?)|(?P<operator>==|!=|&&|\|\||[!()\[\],])"
    r"|(?P<name>[A-Za-z_*][\w.*-]*))"
)


class ExpressionError(Exception):
    """The runner would refuse this expression, or this interpreter does not know it."""


@dataclass
class Expressions:
    """``contexts``: github, inputs, steps, env, runner and so on. ``status``: what success() and failure() look at."""

    contexts: Mapping[str, Any]
    failed: bool = False

    def text(self, template: str) -> str:
        """A template with its ``${{ … }}`` replaced."""
        return re.sub(r"\$\{\{(.*?)\}\}", lambda match: shown(self.value(match.group(1))), template, flags=re.DOTALL)

    def condition(self, source: str) -> bool:
        """An ``if:``. Where no status function is named, success() stands before it."""
        source = source.strip()
        if source.startswith("${{") and source.endswith("}}"):
            source = source[3:-2]
        if not re.search(r"\b(always|success|failure|cancelled)\(\)", source):
            source = f"success() && ({source})" if source else "success()"
        return bool(self.value(source))

    def value(self, source: str) -> Any:
        tokens = list(_tokens(source))
        value = self._or(tokens)
        if tokens:
            raise ExpressionError(f"what follows is not understood: {tokens} in {source!r}")
        return value

    def _or(self, tokens: list[tuple[str, str]]) -> Any:
        value = self._and(tokens)
        while _take(tokens, "||"):
            other = self._and(tokens)
            value = value or other
        return value

    def _and(self, tokens: list[tuple[str, str]]) -> Any:
        value = self._equal(tokens)
        while _take(tokens, "&&"):
            other = self._equal(tokens)
            value = other if value else value
        return value

    def _equal(self, tokens: list[tuple[str, str]]) -> Any:
        value = self._one(tokens)
        for sign in ("==", "!="):
            if _take(tokens, sign):
                other = self._one(tokens)
                same = _folded(value) == _folded(other)
                return same if sign == "==" else not same
        return value

    def _one(self, tokens: list[tuple[str, str]]) -> Any:
        if not tokens:
            raise ExpressionError("an expression ends early")
        kind, text = tokens.pop(0)
        if kind == "string":
            return text[1:-1].replace("''", "'")
        if kind == "number":
            return float(text)
        if text == "!":
            return not self._one(tokens)
        if text == "(":
            value = self._or(tokens)
            if not _take(tokens, ")"):
                raise ExpressionError("a bracket is not closed")
            return value
        if kind != "name":
            raise ExpressionError(f"{text!r} is not understood here")
        return self._named(text, tokens)

    def _named(self, text: str, tokens: list[tuple[str, str]]) -> Any:
        if text in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[text]
        if _take(tokens, "("):
            if not _take(tokens, ")"):
                raise ExpressionError(f"{text}() with arguments is not known here")
            status = {"always": True, "success": not self.failed, "failure": self.failed, "cancelled": False}
            if text not in status:
                raise ExpressionError(f"{text}() is not known here")
            return status[text]
        value: Any = self.contexts
        first, *rest = text.split(".")
        if first not in self.contexts:
            raise ExpressionError(f"there is no context {first!r}")
        for part in (first, *rest):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    at = 0
    while source[at:].strip():
        match = _TOKENS.match(source, at)
        if match is None or match.lastgroup is None:
            raise ExpressionError(f"not an expression: {source!r}")
        yield match.lastgroup, match.group(match.lastgroup)
        at = match.end()


def _take(tokens: list[tuple[str, str]], text: str) -> bool:
    if tokens and tokens[0] == ("operator", text):
        tokens.pop(0)
        return True
    return False


def _folded(value: Any) -> Any:
    """Texts are compared without case; null and "" are equal."""
    return "" if value is None else value.casefold() if isinstance(value, str) else value


def shown(value: Any) -> str:
    if value is None:
        return ""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


# -- workflow commands -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    name: str
    properties: Mapping[str, str]
    data: str


@dataclass
class Log:
    """What a step printed, read as the runner reads it (actions/runner, ``ActionCommand.cs``)."""

    lines: list[str] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    stopped_by: str = ""

    def read(self, text: str) -> None:
        for line in text.splitlines():
            self._line(line)

    def _line(self, line: str) -> None:
        command = _command(line)
        if self.stopped_by:
            if command is not None and command.name == self.stopped_by:
                self.stopped_by = ""
                return
            command = None
        if command is None or command.name not in REGISTERED:
            self.lines.append(line)
        elif command.name == "stop-commands":
            self.stopped_by = command.data
        elif command.name == "add-mask":
            self.masks.append(command.data)
        else:
            self.commands.append(command)

    @property
    def text(self) -> str:
        """The log as it is shown: with masks."""
        text = "\n".join([*self.lines, *(f"{one.name}: {one.data}" for one in self.commands)])
        for mask in self.masks:
            text = text.replace(mask, "***")
        return text


def _command(line: str) -> Command | None:
    """``::name key=value::data`` at a line's beginning, or ``##[name key=value]data`` anywhere in it."""
    line, mark, end, information, data = line.lstrip(), "##[", line.find("]", line.find("##[")), "", ""
    if line.startswith("::") and (closed := line.find("::", 2)) > 0:
        information, data = line[2:closed], _data(line[closed + 2 :])
    elif mark in line and end > 0:
        start = line.index(mark)
        information, data = line[start + 3 : line.index("]", start)], line[line.index("]", start) + 1 :]
    name, _, properties = information.partition(" ")
    if not name:
        return None
    pairs = (pair.partition("=") for pair in properties.split(",") if "=" in pair)
    return Command(name, {key.strip(): _unescaped(value) for key, _, value in pairs}, data)


def _data(text: str) -> str:
    return text.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def _unescaped(text: str) -> str:
    return _data(text.replace("%3A", ":").replace("%2C", ","))


def read_variables(path: Path) -> dict[str, str]:
    """A file such as ``GITHUB_OUTPUT``: ``name=value``, or ``name<<MARK``, lines, ``MARK``. Raises ValueError."""
    found: dict[str, str] = {}
    lines = iter(path.read_text("utf-8").split("\n"))
    for line in lines:
        if not line:
            continue
        equals, heredoc = line.find("="), line.find("<<")
        if heredoc >= 0 and (equals < 0 or heredoc < equals):
            name, mark = line[:heredoc], line[heredoc + 2 :]
            value: list[str] = []
            for inner in lines:
                if inner == mark:
                    break
                value.append(inner)
            else:
                raise ValueError(f"no {mark!r} ends the value of {name!r}")
            found[name] = "\n".join(value)
        elif equals > 0:
            found[line[:equals]] = line[equals + 1 :]
        else:
            raise ValueError(f"not a variable: {line!r}")
    return found


@functools.lru_cache
def loaded(text: str) -> Any:
    """YAML; an action is run many times, and its file does not change meanwhile."""
    return yaml.safe_load(text)


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A step after its turn. ``env``: all that its process was given. ``with_``: an action's evaluated inputs."""

    name: str
    outcome: str = "skipped"
    env: dict[str, str] = field(default_factory=dict)
    with_: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    log: Log = field(default_factory=Log)
    summary: str = ""


@dataclass
class Ran:
    """A composite action after its run."""

    ok: bool
    steps: dict[str, Step]
    outputs: dict[str, str]

    @property
    def log(self) -> str:
        return "\n".join(step.log.text for step in self.steps.values())

    @property
    def commands(self) -> list[Command]:
        return [command for step in self.steps.values() for command in step.log.commands]


@dataclass
class Composite:
    """One job's machine. ``action``: the folder of the action; ``workspace``: the checkout; ``temp``: RUNNER_TEMP.
    ``artifacts``: what the run's jobs hand on. ``github``: the context, event included; ``environ``: the job's ``env``.
    """

    action: Path
    workspace: Path
    temp: Path
    artifacts: Path
    github: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0

    def run(self, inputs: Mapping[str, str] | None = None) -> Ran:
        """The whole action. Raises ExpressionError, and KeyError for an input that it does not declare."""
        declared = loaded((self.action / "action.yml").read_text("utf-8"))
        self._environ = dict(self.environ)
        self._path: list[str] = []
        expressions = Expressions(
            {"github": self.github, "inputs": {}, "steps": {}, "runner": {"temp": str(self.temp)}}
        )
        given = self._inputs(declared["inputs"], inputs or {}, expressions)
        states: dict[str, Any] = {}
        contexts = {**expressions.contexts, "inputs": given, "steps": states}
        steps: dict[str, Step] = {}
        failed = False
        for raw in declared["runs"]["steps"]:
            step = self._step(raw, Expressions({**contexts, "env": self._environ}, failed))
            steps[raw.get("id", raw["name"])] = step
            if "id" in raw:
                states[raw["id"]] = {"outcome": step.outcome, "conclusion": step.outcome, "outputs": step.outputs}
            failed = failed or step.outcome == "failure"
        told = Expressions(contexts, failed)
        outputs = {name: told.text(spec["value"]) for name, spec in declared.get("outputs", {}).items()}
        return Ran(not failed, steps, outputs)

    def _inputs(self, specs: Mapping[str, Any], given: Mapping[str, str], expressions: Expressions) -> dict[str, str]:
        if unknown := set(given) - set(specs):
            raise KeyError(f"no such inputs: {sorted(unknown)}")
        # A value of the user's is a value: it is never evaluated again. A default of the action's own is.
        return {
            name: given[name] if name in given else expressions.text(str(spec.get("default", "")))
            for name, spec in specs.items()
        }

    def _step(self, raw: Mapping[str, Any], expressions: Expressions) -> Step:
        known = {"name", "id", "if", "shell", "env", "run", "uses", "with"}
        if set(raw) - known:
            raise ExpressionError(f"keys that this interpreter does not know: {set(raw) - known}")
        step = Step(raw["name"])
        if not expressions.condition(raw.get("if", "")):
            return step
        env = {name: expressions.text(str(text)) for name, text in raw.get("env", {}).items()}
        if "run" in raw:
            assert raw["shell"] == "bash"
            self._bash(step, expressions.text(raw["run"]), env)
        else:
            step.with_ = {name: expressions.text(shown(text)) for name, text in raw.get("with", {}).items()}
            step.log.read("")
            step.outcome = self._use(raw["uses"], step)
        return step

    def _bash(self, step: Step, script: str, env: Mapping[str, str]) -> None:
        folder = self.temp / "_steps" / uuid.uuid4().hex
        folder.mkdir(parents=True)
        names = ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_PATH", "GITHUB_STATE", "GITHUB_STEP_SUMMARY")
        files = {name: folder / name.lower() for name in names}
        for file in files.values():
            file.touch()
        (folder / "script.sh").write_text(script, "utf-8")
        step.env = {**self._environ, **env, **{name: str(file) for name, file in files.items()}}
        step.env |= {"GITHUB_ACTION_PATH": str(self.action), "GITHUB_WORKSPACE": str(self.workspace)}
        step.env |= {"RUNNER_TEMP": str(self.temp), "GITHUB_ACTIONS": "true"}
        step.env["PATH"] = os.pathsep.join([*reversed(self._path), step.env.get("PATH", os.environ["PATH"])])
        done = subprocess.run(
            [*BASH, str(folder / "script.sh")],
            cwd=self.workspace,
            env=step.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=self.timeout_s,
        )
        step.log.read(done.stdout.decode("utf-8", "replace"))
        step.outputs = read_variables(files["GITHUB_OUTPUT"])
        step.summary = files["GITHUB_STEP_SUMMARY"].read_text("utf-8")
        self._environ |= read_variables(files["GITHUB_ENV"])
        self._path += files["GITHUB_PATH"].read_text("utf-8").split()
        step.outcome = "success" if done.returncode == 0 else "failure"

    def _use(self, uses: str, step: Step) -> str:
        match = re.fullmatch(r"actions/(upload|download)-artifact@[0-9a-f]{40}", uses)
        if match is None:
            raise ExpressionError(f"{uses} is not pinned, or not known here")
        play: Callable[[Step], str] = self._upload if match.group(1) == "upload" else self._download
        return play(step)

    def _upload(self, step: Step) -> str:
        asked = dict(step.with_)
        name, path = asked.pop("name"), self.workspace / asked.pop("path")
        hidden, overwrite = asked.pop("include-hidden-files", "false"), asked.pop("overwrite", "false")
        if asked != {"if-no-files-found": "ignore"} or set(name) & NOT_IN_ARTIFACT_NAMES:
            raise ExpressionError(f"not known here: {step.with_}")
        files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else []
        if hidden != "true":
            files = [file for file in files if not any(part[0] == "." for part in file.relative_to(path).parts)]
        target = self.artifacts / name
        if target.exists() and overwrite != "true":
            return "failure"
        shutil.rmtree(target, ignore_errors=True)
        for file in files:
            place = target / file.relative_to(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        return "success"

    def _download(self, step: Step) -> str:
        asked = dict(step.with_)
        pattern, path = asked.pop("pattern"), self.workspace / asked.pop("path")
        if asked != {"merge-multiple": "true"}:
            raise ExpressionError(f"not known here: {step.with_}")
        for folder in sorted(self.artifacts.iterdir()) if self.artifacts.is_dir() else ():
            if fnmatch.fnmatchcase(folder.name, pattern):
                shutil.copytree(folder, path, dirs_exist_ok=True)
        return "success"
