"""A seccomp filter written by hand: a list of refused system calls, some by argument. Needs no privilege.

It is a deny list because the CUDA driver, libgomp and the compilers use most of the rest; what is refused is what
reaches other processes, the network, the kernel's configuration or a new namespace. Refused calls fail with EPERM.
Who asks prctl for a filter is told that there is none: a kernel that is right in a sandbox only should show.
Only x86-64 and aarch64 are known; elsewhere :func:`install` raises OSError(ENOSYS).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Literal

from pytest_cudaforge.evaluation.kernel_calls import prctl

__all__ = ["Role", "end_calls_from", "install", "program", "program_against"]

Role = Literal["worker", "module_service", "builder"]

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: name -> (x86-64 number, aarch64 number); None: the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mknodat": (259, 33),
    "mknod": (133, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "mq_open": (240, 180),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
}
#: A worker never starts a process or a program: what it leaves behind ends with it.
_REFUSED_WORKER: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
}
#: Files in memory: no limit of memory counts them, no file system bounds them, and they outlive the mapping.
_MEMORY_FILES: dict[str, tuple[int, int]] = {"memfd_create": (319, 279), "memfd_secret": (447, 447)}
_SOCKET, _SOCKETPAIR, _CLONE, _CLONE3 = (41, 198), (53, 199), (56, 220), (435, 435)
_PRLIMIT, _PRCTL = (302, 261), (157, 167)
#: Questions of prctl that tell a filtered process from any other, where the answer is 0.
_PR_GET_SECCOMP, _PR_GET_NO_NEW_PRIVS = 21, 39
#: Calls that signal a process named by their first argument.
_SIGNALS = {"kill": (62, 129), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)}
_TKILL = (200, 130)
_CLONE_THREAD = 0x00010000
#: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_CLONE_NAMESPACES = 0x7E020000
_X32 = 0x40000000

_LOAD, _EQUAL, _BEYOND, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AT_NUMBER, _AT_ARCHITECTURE, _AT_INSTRUCTION, _AT_ARGUMENTS = 0, 4, 8, 16
_LOW_BITS = 0xFFFFFFFF
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2

_Instruction = tuple[int, int, int, int]


def _refuse(number: int, code: int = errno.EPERM) -> list[_Instruction]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | code)]


def _refuse_unless(number: int, argument: int, test: int, value: int) -> list[_Instruction]:
    """Refuse call ``number`` unless its ``argument`` (low 32 bits) passes ``test`` against ``value``."""
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _AT_ARGUMENTS + 8 * argument),
        (test, 1, 0, value),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]


def _zero_if(number: int, argument: int, value: int) -> list[_Instruction]:
    """Call ``number`` does nothing and returns 0 where its ``argument`` is ``value``."""
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _AT_ARGUMENTS + 8 * argument),
        (_EQUAL, 0, 1, value),
        (_RETURN, 0, 0, _ERRNO),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]


def _refuse_if_bits(number: int, argument: int, mask: int) -> list[_Instruction]:
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _AT_ARGUMENTS + 8 * argument),
        (_ANY_BIT, 0, 1, mask),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]


def program(
    role: Role,
    machine: str,
    *,
    own_pid: int | None,
    refuse_sockets: bool = True,
    refuse_processes: bool = True,
    refuse_memory_files: bool = False,
) -> list[_Instruction]:
    """The filter's instructions (code, jump if true, jump if false, constant).

    ``own_pid``: signals may go to this process only (None: to any it can see). ``refuse_sockets`` and
    ``refuse_processes`` are off only in tests of what the filter is for.
    """
    which = 0 if machine == "x86_64" else 1
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if which == 0:
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    if refuse_processes:
        code += _process_rules(role, which, own_pid)
    if refuse_memory_files:
        for numbers in _MEMORY_FILES.values():
            code += _refuse(numbers[which])
    if refuse_sockets:
        for numbers in (_SOCKET, _SOCKETPAIR):
            code += _refuse_unless(numbers[which], 0, _EQUAL, 1)  # AF_UNIX
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _process_rules(role: Role, which: int, own_pid: int | None) -> list[_Instruction]:
    code: list[_Instruction] = []
    refused = {**_REFUSED, **_REFUSED_WORKER} if role != "builder" else _REFUSED
    for numbers in refused.values():
        number = numbers[which]
        if number is not None:
            code += _refuse(number)
    # clone3's flags lie in memory, out of a filter's reach; libc falls back to clone when it is missing.
    code += _refuse(_CLONE3[which], errno.ENOSYS)
    code += _refuse_if_bits(_CLONE[which], 0, _CLONE_NAMESPACES)
    if role != "builder":
        code += _refuse_unless(_CLONE[which], 0, _ANY_BIT, _CLONE_THREAD)
    code += _refuse_unless(_PRLIMIT[which], 0, _EQUAL, 0)
    for question in (_PR_GET_SECCOMP, _PR_GET_NO_NEW_PRIVS):
        code += _zero_if(_PRCTL[which], 0, question)
    if own_pid is not None:
        code += _refuse(_TKILL[which])
        for numbers_pair in _SIGNALS.values():
            code += _refuse_unless(numbers_pair[which], 0, _EQUAL, own_pid)
    return code


def install(
    role: Role,
    *,
    own_pid: int | None,
    refuse_sockets: bool = True,
    refuse_processes: bool = True,
    refuse_memory_files: bool = False,
) -> None:
    """Apply the filter to this thread and all it starts, for good. Raises OSError."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers for {machine}; {os.strerror(errno.ENOSYS)}")
    code = program(
        role,
        machine,
        own_pid=own_pid,
        refuse_sockets=refuse_sockets,
        refuse_processes=refuse_processes,
        refuse_memory_files=refuse_memory_files,
    )
    _apply(code)


def end_calls_from(start: int, end: int) -> None:
    """Whoever calls the kernel by an instruction between these addresses ends the process (SIGSYS): this thread, and
    all that it starts. Raises OSError."""
    _apply(program_against(start, end))


def program_against(start: int, end: int) -> list[_Instruction]:
    """The filter of :func:`end_calls_from`. It is told the instruction behind the call, and compares 32 bits."""
    code: list[_Instruction] = []
    for high in range(start >> 32, (end >> 32) + 1):
        first, last = max(start, high << 32), min(end, (high << 32) + _LOW_BITS)
        code += [
            (_LOAD, 0, 0, _AT_INSTRUCTION + 4),
            (_EQUAL, 0, 4, high),
            (_LOAD, 0, 0, _AT_INSTRUCTION),
            (_AT_LEAST, 0, 2, first & _LOW_BITS),
            (_BEYOND, 1, 0, last & _LOW_BITS),
            (_RETURN, 0, 0, _KILL),
        ]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _apply(code: list[_Instruction]) -> None:
    packed = b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(Program(len(code), ctypes.addressof(buffer))))
