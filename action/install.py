"""Make ``cudaforge_action`` importable for one job. Standard library only; run by ``action.yml`` before all else.

Prints nothing secret, reads ``INPUT_MODE``, ``INPUT_PYTHON``, ``INPUT_DEVICE`` and ``RUNNER_TEMP``, and hands the path
of a Python on as the output ``python``. Rules:

- The runner's torch is never installed, replaced or changed: it is no part of what is asked of pip, what it brought
  along is held at its version, and it is looked at before and after.
- plan, report and publish need no torch: they get a virtual environment with what is light.
- An environment that is managed by the system (PEP 668) or cannot be written is left alone: what is missing goes into a
  virtual environment that sees it.
- What is there already, byte for byte, is not installed again: on a prepared runner this takes a fraction of a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent
#: The modes that run no code of the repository and need no torch.
LIGHT_MODES = frozenset({"plan", "report", "publish"})
#: What those modes do without; the names of distributions.
HEAVY = frozenset({"torch", "openai", "pytest", "ninja"})
#: Where the packages lie in SOURCE.
PACKAGES = {"pytest_cudaforge": SOURCE / "pytest_cudaforge", "cudaforge_action": SOURCE / "action" / "cudaforge_action"}

#: Where every Python is started: `-c` and `-m` look for modules in the current folder first, and that is the checkout.
ELSEWHERE = "/"

# Asked of a Python by running it: what it is, and which distributions it sees. No third-party code is imported.
_PROBE = """
import importlib.metadata, importlib.util, json, os, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def torch():
    try:
        found = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    names = [line.split(";")[0].strip() for line in found.requires or ()]
    place, record = str(found.locate_file("torch")), found.read_text("RECORD") or ""
    return {"version": found.version, "place": place, "record": record, "requires": names}
def place(name):
    spec = importlib.util.find_spec(name)
    return os.path.dirname(spec.origin) if spec and spec.origin else ""
def requires():
    try:
        return importlib.metadata.requires("pytest-cudaforge") or []
    except importlib.metadata.PackageNotFoundError:
        return []
purelib = sysconfig.get_path("purelib")
print(json.dumps({
    "executable": sys.executable, "version": list(sys.version_info[:3]), "prefix": sys.prefix,
    "virtual": sys.prefix != sys.base_prefix, "purelib": purelib, "platlib": sysconfig.get_path("platlib"),
    "writable": os.access(purelib, os.W_OK), "pip": version("pip"), "torch": torch(), "requires": requires(),
    "managed": os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")),
    "places": {name: place(name) for name in ("pytest_cudaforge", "cudaforge_action")},
    "versions": {name.lower(): version(name) for name in sys.argv[1:]},
}))
"""


class InstallError(Exception):
    """``InstallError(what, expected, to do)``: what a person reads in the log."""


def main() -> int:
    started = time.monotonic()
    try:
        python = installed(
            mode=os.environ.get("INPUT_MODE", "").strip(),
            python=os.environ.get("INPUT_PYTHON", "").strip() or sys.executable,
            device=os.environ.get("INPUT_DEVICE", "").strip(),
            folder=Path(os.environ.get("RUNNER_TEMP") or tempfile.gettempdir()).absolute(),
        )
        hand_on("python", python)
    except InstallError as error:
        what, *rest = (str(part) for part in error.args)
        text = "\n".join(
            [what, *(f"  {word}: {part}" for word, part in zip(("expected", "to do"), rest, strict=False))]
        )
        print(f"::error title=pytest-cudaforge::{escaped(text)}")
        return 2
    print(f"pytest-cudaforge: {python}, ready after {time.monotonic() - started:.1f} s")
    return 0


def escaped(text: str) -> str:
    """As the data of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def hand_on(name: str, value: str) -> None:
    """An output of this step; between random delimiters, so that no path can add a line of its own."""
    if path := os.environ.get("GITHUB_OUTPUT"):
        mark = f"cudaforge_{secrets.token_hex(16)}"
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{name}<<{mark}\n{value}\n{mark}\n")


def installed(*, mode: str, python: str, device: str, folder: Path) -> str:
    """The path of a Python that has what ``mode`` needs. Raises :class:`InstallError`."""
    light = mode in LIGHT_MODES
    found = probe(python)
    if not light:
        require_torch(found, mode)
    extras = [] if light else extras_for(device, found)
    if not missing(found, light, extras):
        return str(found["executable"])
    target = found
    if light or (found["managed"] and not found["virtual"]) or not found["writable"]:
        target = probe(virtual_environment(found, folder / f"cudaforge-{'light' if light else 'python'}", light))
        if not missing(target, light, extras):
            return str(target["executable"])
    target = install(found, target, light, extras)
    if not light and (target["torch"] or {}) != found["torch"]:
        raise InstallError(
            f"the installation changed torch: {describe(found['torch'])} became {describe(target['torch'])}",
            "torch as it was",
            "please report this with the log; install pytest-cudaforge into the runner's environment by hand",
        )
    return str(target["executable"])


def probe(python: str) -> dict[str, Any]:
    """What a Python says of itself. Raises :class:`InstallError` where it cannot be run or is too old."""
    try:
        command = [os.path.abspath(shutil.which(python) or python), "-c", _PROBE, *names()]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ELSEWHERE)
        found: dict[str, Any] = json.loads(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip()[-600:]
        raise InstallError(
            f"{python} does not run: {why}", "Python 3.10 or newer", "set the input python to the environment's Python"
        ) from None
    if found["version"] < [3, 10]:
        shown = ".".join(map(str, found["version"]))
        raise InstallError(
            f"{python} is Python {shown}",
            "Python 3.10 or newer",
            "set the input python, or run actions/setup-python before this action",
        )
    return found


def names() -> list[str]:
    """Of all distributions that this package may need, from its own pyproject.toml."""
    return [name_of(line) for line in declared("dependencies") + declared("cuda")]


def declared(key: str) -> list[str]:
    """A list of requirements in pyproject.toml (``tomllib`` came with Python 3.11 only)."""
    text = (SOURCE / "pyproject.toml").read_text("utf-8")
    found = re.search(rf"^{key} = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    return re.findall(r'"([^"]+)"', found.group(1)) if found else []


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    return found.group(0).lower().replace("_", "-") if found else requirement


def wanted(light: bool, extras: list[str]) -> list[str]:
    """Requirements to ask pip for. Never torch: whoever needs it has it."""
    asked = [line for line in declared("dependencies") if name_of(line) not in (HEAVY if light else {"torch"})]
    return asked + [line for extra in extras for line in declared(extra)]


def require_torch(found: dict[str, Any], mode: str) -> None:
    if found["torch"] is None:
        raise InstallError(
            f"mode {mode} runs the repository's modules, and {found['executable']} has no torch",
            "a runner whose Python has the torch that the repository uses (a build for CPUs will do for device: cpu)",
            "install torch on the runner or in a step before this one, and name that environment's Python in the "
            "input python",
        )
    least = next(
        (match.group(1) for line in declared("dependencies") if (match := re.match(r"torch>=(.+)", line))), "0"
    )
    if numbers(found["torch"]["version"]) < numbers(least):
        raise InstallError(
            f"{found['executable']} has {describe(found['torch'])}",
            f"torch {least} or newer",
            "update the runner's torch; this action never does",
        )


def numbers(version: str) -> list[int]:
    return [int(part) for part in (*re.findall(r"\d+", version.split("+")[0]), "0", "0")[:3]]


def describe(torch: dict[str, Any] | None) -> str:
    return f"torch {torch['version']} in {torch['place']}" if torch else "no torch"


def extras_for(device: str, found: dict[str, Any]) -> list[str]:
    """Where the job has an NVIDIA GPU to use, what compiles and launches for it."""
    gpu = device == "cuda" or (device == "" and Path("/proc/driver/nvidia/version").exists())
    return ["cuda"] if gpu else []


def missing(found: dict[str, Any], light: bool, extras: list[str]) -> bool:
    """Is there anything to install: is a distribution not there, or is the package another than this one?"""
    if not all(satisfied(found, line) for line in wanted(light, extras)):
        return True
    places = found["places"]
    return any(not places[name] or digest(Path(places[name])) != digest(ours) for name, ours in PACKAGES.items())


def digest(folder: Path) -> str:
    """Of a package's files. Where two commits have one version number this tells them apart."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            whole.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def virtual_environment(found: dict[str, Any], folder: Path, light: bool) -> str:
    """A virtual environment in ``folder``; unless it is light it sees all that ``found`` sees."""
    folder = folder.absolute()
    python = folder / "bin" / "python"
    if not python.exists():
        shutil.rmtree(folder, ignore_errors=True)
        options = [] if light else ["--system-site-packages"]
        pip = [] if installer(found, str(python)) is None else ["--without-pip"]
        run([found["executable"], "-m", "venv", *options, *pip, str(folder)], "a virtual environment", _VENV_REMEDY)
    if not light and found["virtual"]:
        # --system-site-packages means those of the base Python: a virtual environment's own are named here.
        inner = probe(str(python))
        lines = [f"import site; site.addsitedir({place!r})" for place in {found["purelib"], found["platlib"]}]
        Path(inner["purelib"], "cudaforge-parent.pth").write_text("\n".join(sorted(lines)) + "\n", "utf-8")
    return str(python)


_VENV_REMEDY = "install python3-venv on the runner, or run actions/setup-python before this action"


def installer(found: dict[str, Any], python: str) -> list[str] | None:
    """The command that installs into ``python``: its own pip, another's, or uv. None where there is none."""
    # What it says of conflicts would be about torch and pytest, which the light modes do without.
    quiet = ["--disable-pip-version-check", "--quiet", "--no-warn-conflicts"]
    if found["pip"] and found["executable"] == python:
        return [python, "-m", "pip", "install", *quiet]
    if found["pip"] and numbers(found["pip"]) >= [22, 3, 0]:
        return [found["executable"], "-m", "pip", "--python", python, "install", *quiet]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", python, "--quiet"]
    return None


def install(found: dict[str, Any], target: dict[str, Any], light: bool, extras: list[str]) -> dict[str, Any]:
    """The package itself, without what it requires; then what it requires, torch excepted."""
    python = target["executable"]
    command = installer(target if target["pip"] else found, python)
    if command is None:
        raise InstallError(f"{python} has neither pip nor uv", "one of them", "install pip or uv on the runner")
    with tempfile.TemporaryDirectory(prefix="cudaforge-install-") as folder:
        source = copy_of_source(Path(folder, "source"))
        run([*command, "--no-deps", *reinstall(command), str(source)], "pytest-cudaforge", _INDEX_REMEDY)
        held = Path(folder, "held.txt")
        held.write_text("\n".join(constraints(found)) + "\n", "utf-8")
        lacking = [line for line in wanted(light, extras) if not satisfied(target, line)]
        if lacking:
            run([*command, "--constraint", str(held), *lacking], "what pytest-cudaforge requires", _INDEX_REMEDY)
    return probe(python)


_INDEX_REMEDY = "see pip's own words above; PIP_INDEX_URL and PIP_FIND_LINKS are obeyed on runners without a network"


def satisfied(target: dict[str, Any], requirement: str) -> bool:
    """Is it there, within its bounds? pyproject.toml writes only ``>=`` and ``<``; for these this is enough."""
    version = target["versions"].get(name_of(requirement))
    bounds = re.findall(r"(>=|<)([0-9.]+)", requirement)
    return version is not None and all(
        numbers(version) >= numbers(bound) if sign == ">=" else numbers(version) < numbers(bound)
        for sign, bound in bounds
    )


def reinstall(command: list[str]) -> list[str]:
    return ["--reinstall-package", "pytest-cudaforge"] if "uv" in Path(command[0]).name else ["--force-reinstall"]


def constraints(found: dict[str, Any]) -> list[str]:
    """torch and the parts of CUDA and Triton that it brought, at the versions that are there."""
    torch = found["torch"]
    if torch is None:
        return []
    brought = [name_of(line) for line in torch["requires"]]
    parts = [name for name in brought if re.match(r"nvidia-|cuda-|triton|pytorch-triton", name)]
    said = run_quietly([found["executable"], "-c", _VERSIONS, *parts])
    versions = json.loads(said) if said else {}
    return [f"torch=={torch['version']}", *(f"{name}=={version}" for name, version in versions.items() if version)]


_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def copy_of_source(folder: Path) -> Path:
    """A build writes beside its sources, and the action's folder is shared by a runner's jobs or not ours to write."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SOURCE / name, folder / name)
    for place in PACKAGES.values():
        shutil.copytree(place, folder / place.relative_to(SOURCE), ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(command: list[str], what: str, remedy: str) -> None:
    """Run it, its output in the log as text. Raises :class:`InstallError`."""
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        status = subprocess.run(command, stderr=subprocess.STDOUT, timeout=1800, check=False, cwd=ELSEWHERE).returncode
    except (OSError, subprocess.SubprocessError) as error:
        print(error)
        status = -1
    print(f"\n::{token}::", flush=True)
    if status:
        raise InstallError(
            f"{what} could not be installed: {Path(command[0]).name} ended with {status}", "status 0", remedy
        )


def run_quietly(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ELSEWHERE)
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
