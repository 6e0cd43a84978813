"""What a process gives up on its way to becoming a confined child, in the order it does so.

The guardian enters new namespaces (:func:`enter_namespaces`), the first process inside them builds its own view of the
file system (:func:`.view.build_view`), and the child gives up its user id, capabilities, paths and system calls
(:func:`confine`); see :mod:`.fork_server` for the processes. Each step uses what the machine allows.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
from collections.abc import Iterable
from pathlib import Path

from pytest_cudaforge.evaluation import kernel_calls, landlock, seccomp
from pytest_cudaforge.evaluation.sandbox import Abilities, ChildSpec, Namespaces
from pytest_cudaforge.evaluation.view import CUDA_PATHS, PROC_FILES, devices

__all__ = ["confine", "enter_namespaces", "has_view", "leave_low_numbers"]

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
#: Below the least limit that Linux has by itself, with room for the processes of a group.
_LAST_PIDS = (1000, 30000)
_NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000


def enter_namespaces(spec: ChildSpec, kind: Namespaces, *, fresh_proc: bool = True) -> None:
    """Leave this process's namespaces; its next child is process 1 of its own. Raises OSError."""
    if not kind or not spec.confined:
        return
    # The CUDA driver looks itself up in /proc by the process id it sees: own ids need an own /proc.
    own_pids = fresh_proc or not spec.cuda
    defences = spec.defences
    flags = _NEW_MOUNTS if defences.files else 0
    flags |= (_NEW_PIDS if own_pids else 0) | _NEW_IPC | _NEW_UTS if defences.processes else 0
    flags |= _NEW_NETWORK if defences.network else 0
    if not flags:
        return
    uid, gid = os.getuid(), os.getgid()
    kernel_calls.unshare(flags | (_NEW_USER if kind == "user" else 0))
    if kind == "user":
        # "deny" is what lets an unprivileged process write its group map.
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)


def leave_low_numbers() -> None:
    """In process 1 of a new process namespace: the next process gets a number as any machine's may have, not 2. Who
    goes by its number cannot tell a verdict by it. To be called while the machine's /proc is there still; where that is
    read-only the number stays as it is."""
    if os.getpid() == 1:
        with contextlib.suppress(OSError):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(secrets.SystemRandom().randrange(*_LAST_PIDS)))


def confine(spec: ChildSpec, abilities: Abilities, keep: Iterable[int], tmp: str) -> None:
    """Give up everything the spec denies; the last step of a child before it serves. Raises OSError.

    ``keep``: descriptors that stay open; 0, 1 and 2 become /dev/null. ``tmp``: the child's temporary directory.
    """
    os.umask(0o077)
    if spec.defences.descriptors:
        _close_descriptors(set(keep))
    if spec.defences.limits:
        _limit_resources(spec)
    if not spec.confined:
        return
    fresh_proc = has_view(spec, abilities) and abilities.fresh_proc
    if spec.uid:
        os.setgroups([])
        os.setresgid(spec.uid, spec.uid, spec.uid)
        os.setresuid(spec.uid, spec.uid, spec.uid)
    if spec.defences.processes or spec.defences.files:
        kernel_calls.drop_capabilities()
    if spec.defences.files and abilities.landlock_abi:
        _restrict_paths(spec, fresh_proc, tmp)
    if abilities.seccomp and (spec.defences.processes or spec.defences.network):
        starts_programs = spec.role == "builder" or spec.compilers
        seccomp.install(
            "builder" if starts_programs else spec.role,
            own_pid=os.getpid() if not starts_programs or not abilities.namespaces else None,
            refuse_sockets=spec.defences.network,
            refuse_processes=spec.defences.processes,
            # The CUDA driver may want some; a compiler's are gone with it.
            refuse_memory_files=spec.defences.limits and spec.role != "builder" and not spec.cuda,
        )


def has_view(spec: ChildSpec, abilities: Abilities) -> bool:
    """Whether the child gets a file system view of its own."""
    return abilities.view and spec.confined and spec.defences.files


def _close_descriptors(keep: set[int]) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    last = 2
    for fd in sorted(keep | {1 << 20}):
        os.closerange(last + 1, fd)
        last = fd


def _limit_resources(spec: ChildSpec) -> None:
    limits = spec.limits
    wanted = [
        (resource.RLIMIT_NPROC, limits.processes + _counted_against_user(spec)),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_s),
    ]
    if not spec.cuda:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        wanted.append((resource.RLIMIT_AS, min(limits.memory_bytes, physical)))
    for kind, most in wanted:
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))


def _counted_against_user(spec: ChildSpec) -> int:
    """Threads this user has already, where the kernel counts them in; own uid and user namespaces start at zero."""
    if spec.uid or not os.path.isdir("/proc"):
        return 0
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.getuid():
                    total += len(os.listdir(f"/proc/{entry.name}/task"))
            except OSError:
                continue
    return total


def _restrict_paths(spec: ChildSpec, fresh_proc: bool, tmp: str) -> None:
    proc = ["/proc"] if fresh_proc else list(PROC_FILES)
    readable = [*spec.readable, *proc, *(CUDA_PATHS if spec.cuda else ())]
    landlock.restrict(
        readable,
        [tmp],
        devices(spec),
        # Rules hold on inodes, and those of single threads come and go.
        changeable=[] if not spec.cuda else ["/proc"] if fresh_proc else ["/proc/self"],
        network=spec.defences.network,
        processes=spec.defences.processes,
    )
