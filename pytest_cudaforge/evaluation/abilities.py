"""What this machine allows of the sandbox, found by trying it in throw-away children."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pytest_cudaforge.evaluation import landlock, seccomp
from pytest_cudaforge.evaluation.confinement import enter_namespaces
from pytest_cudaforge.evaluation.sandbox import Abilities, ChildSpec, Defences, Limits, Namespaces
from pytest_cudaforge.evaluation.view import build_view, readable_paths
from pytest_cudaforge.records import to_json

__all__ = ["find_abilities", "print_abilities"]

#: (what, the reason it does not work here)
Problem = tuple[str, str]


def find_abilities() -> Abilities:
    """Try each mechanism in a throw-away child. Single-threaded callers only: it forks."""
    spec = ChildSpec("worker", False, "auto", Limits(), Defences(), readable_paths())
    namespaces, problems = _find_namespaces(spec)
    view, fresh_proc = False, False
    if namespaces:
        view, fresh_proc, against_view = _find_view(spec, namespaces)
        problems += against_view
    version = landlock.abi()
    if not version:
        problems.append(("Landlock", "the kernel has none, or it is switched off"))
    against_seccomp = _reason_against(partial(seccomp.install, "worker", own_pid=None))
    if against_seccomp:
        problems.append(("seccomp", against_seccomp))
    own_uid = namespaces != "user" and os.geteuid() == 0 and (view or _world_readable())
    own_uid = own_uid and not _reason_against(_try_own_uid)
    return Abilities(namespaces, view, fresh_proc, own_uid, version, not against_seccomp, tuple(problems))


def _find_namespaces(spec: ChildSpec) -> tuple[Namespaces, list[Problem]]:
    reason = ""
    kinds: tuple[Namespaces, ...] = ("plain", "user") if os.geteuid() == 0 else ("user",)
    for kind in kinds:
        reason = _reason_against(partial(enter_namespaces, spec, kind))
        if not reason and kind == "user" and os.geteuid() == 0:
            return kind, [("limit on threads", "the kernel exempts user 0 from it; run as an ordinary user")]
        if not reason:
            return kind, []
    return "", [("namespaces", reason)]


def _find_view(spec: ChildSpec, namespaces: Namespaces) -> tuple[bool, bool, list[Problem]]:
    """Whether a view can be built, whether with a fresh /proc, and what failed on the way."""
    problems: list[Problem] = []
    for what, fresh_proc in (("fresh /proc", True), ("view of the file system", False)):
        reason = _reason_against(partial(_try_view, spec, namespaces, fresh_proc))
        if not reason:
            return True, fresh_proc, problems
        problems.append((what, reason))
    return False, False, problems


def _try_view(spec: ChildSpec, namespaces: Namespaces, fresh_proc: bool) -> None:
    enter_namespaces(spec, namespaces)
    # Built by the first process inside, as in earnest: mounting /proc needs the new process namespace.
    reason = _reason_against(partial(build_view, spec, fresh_proc))
    if reason:
        raise OSError(0, reason)


def _try_own_uid() -> None:
    os.setgroups([])
    os.setresgid(65519, 65519, 65519)
    os.setresuid(65519, 65519, 65519)


def _world_readable() -> bool:
    """Whether another user could load modules from where Python is installed."""
    paths = [Path(sys.base_prefix), Path(__file__).resolve().parent]
    return all(part.stat().st_mode & stat.S_IXOTH for path in paths for part in [path, *path.parents] if part.is_dir())


def _reason_against(attempt: Callable[[], None]) -> str:
    """Run ``attempt`` in a forked child; "" or why it failed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = b""
        try:
            attempt()
        except BaseException as error:  # noqa: BLE001 - outermost frame of the throw-away child
            text = (str(error) or type(error).__name__).encode()
        os.write(writer, text)
        os._exit(0 if not text else 1)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text.decode("utf-8", "replace") or ("" if status == 0 else f"the trial ended with status {status}")


def print_abilities() -> None:
    """Entry point of the probe's process."""
    print(json.dumps(to_json(find_abilities())))
