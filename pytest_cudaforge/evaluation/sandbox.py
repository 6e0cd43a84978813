"""What a child process is denied: the settings, what a machine can enforce of them, and the grade that follows.

The steps themselves are in :mod:`.confinement` and :mod:`.view`; :mod:`.abilities` finds out what a machine allows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_cudaforge.errors import SandboxError
from pytest_cudaforge.evaluation import seccomp
from pytest_cudaforge.records import Isolation, from_json, to_json

__all__ = [
    "OWN_PACKAGE",
    "Abilities",
    "ChildSpec",
    "Defences",
    "Isolation",
    "Limits",
    "Namespaces",
    "SandboxSettings",
    "child_environment",
    "grade",
    "probe",
    "probe_abilities",
]

#: What a fresh interpreter does first, given the folder that this package lies in: the package of its parent, where
#: another copy is installed as well; else that folder comes last, as it may hold modules by the names of Python's own.
OWN_PACKAGE = """
import importlib.util, sys
sys.path.append(sys.argv[1])
_spec = importlib.util.spec_from_file_location("pytest_cudaforge", sys.argv[1] + "/pytest_cudaforge/__init__.py")
sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[_spec.name])
"""

#: How a child gets namespaces of its own: as root, through a user namespace, or not at all.
Namespaces = Literal["plain", "user", ""]


@dataclass(frozen=True)
class Limits:
    """Resource limits of one child. ``memory_bytes`` is address space and is not applied to CUDA children."""

    memory_bytes: int = 16 << 30
    processes: int = 1024
    files: int = 256
    file_bytes: int = 1 << 30
    cpu_s: int = 1800
    tmp_bytes: int = 1 << 30


@dataclass(frozen=True)
class Defences:
    """One switch per defence; only tests switch one off, to show that an attack then succeeds.

    files: own view of the file system, Landlock, own uid · network: own network, no sockets but AF_UNIX ·
    processes: own process ids, seccomp against ptrace and its kin, no new processes in a worker · limits: resource
    limits · environment: the allow-list · descriptors: none open but the named · group: nothing outlives the child.
    """

    files: bool = True
    network: bool = True
    processes: bool = True
    limits: bool = True
    environment: bool = True
    descriptors: bool = True
    group: bool = True


@dataclass(frozen=True)
class SandboxSettings:
    """``isolation`` "none" gives children limits and a scrubbed environment only (grade C).

    ``extra_readable``: paths beside toolchain and packages that children may read. ``terminate_grace_s``: time between
    SIGTERM and SIGKILL. ``environment``: variables that children get beside the allow-list.
    """

    isolation: Literal["auto", "none"] = "auto"
    limits: Limits = Limits()
    defences: Defences = Defences()
    extra_readable: tuple[str, ...] = ()
    terminate_grace_s: float = 0.5
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Abilities:
    """What this machine allows. ``namespaces``: "plain" (as root), "user" (through a user namespace) or "" (none).

    ``problems`` are (what, reason) of everything that failed.
    """

    namespaces: Namespaces
    view: bool
    fresh_proc: bool
    own_uid: bool
    landlock_abi: int
    seccomp: bool
    problems: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ChildSpec:
    """What one child gets; travels to the fork server as JSON. ``uid`` 0: keep the user id.

    ``hidden``: folders below ``readable`` ones that its view of the file system covers. ``compilers``: a worker that
    may start programs, because Triton compiles where it runs; they stay in its namespaces and end with it.
    """

    role: seccomp.Role
    cuda: bool
    isolation: Literal["auto", "none"]
    limits: Limits
    defences: Defences
    readable: tuple[str, ...] = ()
    uid: int = 0
    hidden: tuple[str, ...] = ()
    compilers: bool = False

    @property
    def confined(self) -> bool:
        return self.isolation == "auto"


# -- the environment -------------------------------------------------------------------------------------------

_PASSED_ON = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_WAIT_POLICY",
    "CXX",
)


def child_environment(environ: Mapping[str, str], defences: Defences) -> dict[str, str]:
    """The allow-listed part of ``environ``, with a home and a temporary directory of the child's own."""
    if not defences.environment:
        return dict(environ)
    kept = {name: environ[name] for name in _PASSED_ON if name in environ}
    # torch asks for the user's name; a child's user id has none in the password database.
    named = {"USER": "cudaforge", "LOGNAME": "cudaforge"}
    own = {"HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
    return {**kept, **named, **own}


# -- the grade -------------------------------------------------------------------------------------------------

_NAMESPACE_REMEDY = (
    "allow user namespaces: on Ubuntu 24.04 `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`, on Debian "
    "`sudo sysctl kernel.unprivileged_userns_clone=1`; in a container run it with `--security-opt seccomp=unconfined "
    "--cap-add SYS_ADMIN`, or as root"
)


def grade(abilities: Abilities, settings: SandboxSettings, *, host_code: bool) -> Isolation:
    """The isolation grade of a child; ``host_code``: it runs native code of the candidate (cpp, module tier)."""
    if settings.isolation == "none":
        return Isolation("C", ("isolation was switched off (none)",), "run without --isolation none")
    reasons = [f"no {what}: {reason}" for what, reason in abilities.problems if what != "fresh /proc"]
    separate = bool(abilities.namespaces) or abilities.own_uid
    files = abilities.view or abilities.landlock_abi > 0
    # Sockets are refused by seccomp alone where there is no network namespace.
    complete = separate and files and abilities.seccomp
    if not complete:
        return Isolation("C", tuple(reasons), _NAMESPACE_REMEDY)
    if host_code:
        return Isolation("B", ("the worker runs native code of the candidate", *reasons))
    return Isolation("A", tuple(reasons))


def probe() -> Isolation:
    """The grade of a CUDA worker on this machine, with reasons and remedy; cpp workers are one below A.

    Tried in a fresh process, so it may be called from any thread. Raises SandboxError where that process fails.
    """
    return grade(probe_abilities(), SandboxSettings(), host_code=False)


def probe_abilities() -> Abilities:
    """What this machine allows, tried in a fresh process. Raises SandboxError."""
    program = OWN_PACKAGE + "from pytest_cudaforge.evaluation import abilities; abilities.print_abilities()"
    root = str(Path(__file__).resolve().parents[2])
    ran = subprocess.run(
        [sys.executable, "-I", "-B", "-c", program, root],
        env=child_environment(os.environ, Defences()),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if ran.returncode != 0:
        raise SandboxError(
            "the sandbox probe failed: " + ran.stderr.strip()[-500:], expected="it to print its findings"
        )
    return abilities_from_json(json.loads(ran.stdout))


# -- between the processes -------------------------------------------------------------------------------------


def abilities_from_json(data: Any) -> Abilities:
    found = from_json(Abilities, data)
    assert isinstance(found, Abilities)
    return found


def spec_to_json(spec: ChildSpec) -> Any:
    return to_json(spec)


def spec_from_json(data: Any) -> ChildSpec:
    spec = from_json(ChildSpec, data)
    assert isinstance(spec, ChildSpec)
    return spec


def with_uid(spec: ChildSpec, abilities: Abilities, uid: int) -> ChildSpec:
    """``spec`` with a user id of the child's own, where the machine and the defences allow one."""
    wanted = spec.confined and spec.defences.files and spec.defences.processes and abilities.own_uid
    return dataclasses.replace(spec, uid=uid if wanted else 0)
