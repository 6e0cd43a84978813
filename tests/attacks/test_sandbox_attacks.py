"""Each row: a native candidate that attacks, the defence against it, and an honest twin.

Three tests per row: the attack gets nothing with every defence on; it succeeds with its defence alone switched off; the
twin, which does the honest form of the same thing, passes with every defence on. An attack reports success in out[0].
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from native_children import compile_act, started

from pytest_cudaforge.errors import WorkerCrash
from pytest_cudaforge.evaluation.sandbox import Defences, Limits
from pytest_cudaforge.evaluation.zygote import ForkServers

_LIMITS = Limits()


@dataclass(frozen=True)
class Scene:
    """What the attacks aim at: a secret file, a folder, a listening port and a victim process with a secret."""

    secret_file: Path
    folder: Path
    port: int
    victim: int


@dataclass(frozen=True)
class Attack:
    name: str
    off: tuple[str, ...]
    attack: str
    twin: str
    before: str = ""
    limits: Limits = _LIMITS


_READ = """
static int reads(const char* path) {
    int fd = open(path, O_RDONLY);
    char byte;
    return fd >= 0 && read(fd, &byte, 1) == 1;
}
"""
_THREADS = """
static void* idle(void*) { sleep(20); return nullptr; }
static int threads(int wanted) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 65536);
    int made = 0;
    pthread_t thread;
    while (made < wanted && pthread_create(&thread, &attributes, idle, nullptr) == 0) made++;
    return made;
}
"""
_CALLS = """
static int open_calls() {
    // io_uring_setup, bpf, perf_event_open, userfaultfd, keyctl, kcmp, unshare(NEWUSER): allowed by most kernels
    int open = 0;
    char parameters[256] = {};
    open += syscall(SYS_io_uring_setup, 4, parameters) >= 0;
    open += syscall(SYS_kcmp, getpid(), getpid(), 0, 0, 0) >= 0;
    open += syscall(SYS_unshare, 0x10000000) == 0;
    open += syscall(SYS_keyctl, 0, -3, 1, 0, 0) >= 0;
    return open;
}
"""
_DESCRIPTORS = """
static int strangers() {
    // Honest: /dev/null three times, the channel, the arena.
    int found = 0, sockets = 0;
    for (int fd = 0; fd < 256; fd++) {
        char path[64], name[256] = {};
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (readlink(path, name, sizeof name - 1) < 0) continue;
        if (strncmp(name, "socket:", 7) == 0) sockets++;
        else if (strncmp(name, "/memfd:cudaforge-arena", 22) && strcmp(name, "/dev/null")) found++;
    }
    return found + sockets - 1;
}
"""

ATTACKS = (
    Attack(
        "read a file of the repository",
        ("files",),
        'out[0] = reads("{secret_file}");',
        'out[0] = reads("/usr/include/stdio.h") || reads("/proc/self/maps");',
        _READ,
    ),
    Attack(
        "list the home directory",
        ("files",),
        'out[0] = access("{folder}", R_OK) == 0;',
        'out[0] = access("/usr", R_OK) == 0;',
    ),
    Attack(
        "write into the repository",
        ("files",),
        'out[0] = open("{folder}/planted", O_CREAT | O_WRONLY, 0600) >= 0;',
        'out[0] = open("own", O_CREAT | O_WRONLY, 0600) >= 0;',
    ),
    Attack(
        "open a connection",
        ("network",),
        """sockaddr_in address = {{}};
        address.sin_family = AF_INET;
        address.sin_port = htons({port});
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        out[0] = fd >= 0 && connect(fd, (sockaddr*)&address, sizeof address) == 0;""",
        "int fds[2]; out[0] = socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0;",
    ),
    Attack(
        "kill the supervisor",
        ("processes",),
        "out[0] = kill({victim}, 0) == 0;",
        "signal(SIGUSR1, SIG_IGN); out[0] = raise(SIGUSR1) == 0 || kill(getpid(), 0) == 0;",
    ),
    Attack(
        "trace another process",
        ("files", "processes", "network"),  # Landlock and any user namespace alone forbid it too
        "out[0] = ptrace(PTRACE_SEIZE, {victim}, 0, 0) == 0;",
        "out[0] = prctl(PR_GET_DUMPABLE) >= 0;",
    ),
    Attack(
        "read another process's memory",
        ("files", "processes", "network"),
        """char byte;
        iovec mine = {{&byte, 1}}, theirs = {{(void*)1, 1}};
        process_vm_readv({victim}, &mine, 1, &theirs, 1, 0);
        out[0] = errno == EFAULT;  // past the check of rights, stopped by the address alone""",
        "char bytes[2] = {{1, 0}}; memcpy(bytes + 1, bytes, 1); out[0] = bytes[1];",
    ),
    Attack(
        "read another process's environment",
        ("files", "processes", "network"),  # each of them alone already hides it
        'out[0] = reads("/proc/{victim}/environ");',
        'out[0] = reads("/proc/self/status");',
        _READ,
    ),
    Attack(
        "use kernel interfaces a kernel never needs", ("processes",), "out[0] = open_calls();", "out[0] = 1;", _CALLS
    ),
    Attack(
        "ask whether it is being watched",
        ("processes",),
        "out[0] = prctl(PR_GET_SECCOMP) != 0;",
        'out[0] = prctl(PR_SET_NAME, "mine") == 0;',
    ),
    Attack(
        "fork",
        ("processes",),
        "int made = 0; for (int pid = 1; made < 100 && pid > 0; made += pid > 0) {{"
        " pid = fork(); if (pid == 0) {{ pause(); _exit(0); }} }}"
        "out[0] = made == 100;",
        "out[0] = threads(8) == 8;",
        _THREADS,
    ),
    Attack(
        "start a program",
        ("processes",),
        'char* arguments[] = {{(char*)"true", nullptr}}; int pid = fork();'
        'if (pid == 0) {{ execv("/bin/true", arguments); _exit(9); }}'
        "int status = -1; waitpid(pid, &status, 0); out[0] = pid > 0 && status == 0;",
        "out[0] = getpid() > 0;",
    ),
    Attack(
        "start threads without end",
        ("limits",),
        "out[0] = threads(400) == 400;",
        "out[0] = threads(16) == 16;",
        _THREADS,
        Limits(processes=64),
    ),
    Attack(
        "take a terabyte",
        ("limits",),
        "out[0] = mmap(nullptr, 1ull << 40, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)"
        " != MAP_FAILED;",
        "char* block = (char*)malloc(64 << 20); memset(block, 1, 64 << 20); out[0] = block[1 << 20]; free(block);",
    ),
    Attack(
        "fill the disk",
        ("limits",),
        'int fd = open("big", O_CREAT | O_WRONLY, 0600); signal(SIGXFSZ, SIG_IGN);'
        "static char block[1 << 20]; long long done = 0;"
        "for (int i = 0; i < 32; i++) {{ long n = write(fd, block, sizeof block); if (n <= 0) break; done += n; }}"
        'out[0] = done == 32 << 20; unlink("big");',
        'int fd = open("small", O_CREAT | O_WRONLY, 0600); out[0] = write(fd, "x", 1) == 1;',
        "",
        Limits(file_bytes=4 << 20),
    ),
    Attack(
        "read a key from the environment",
        ("environment",),
        'out[0] = getenv("FORGE_TEST_API_KEY") != nullptr;',
        'out[0] = getenv("TMPDIR") != nullptr;',
    ),
    Attack(
        "find open descriptors",
        ("descriptors",),
        "out[0] = strangers() > 0;",
        "out[0] = fcntl(0, F_GETFD) >= 0;",
        _DESCRIPTORS,
    ),
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("repository")
    secret = folder / "secret.txt"
    secret.write_text("expected output")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        victim = subprocess.Popen(["sleep", "600"], env={"FORGE_TEST_VICTIM": "1"})
        yield Scene(secret, folder, listener.getsockname()[1], victim.pid)
        victim.kill()
        victim.wait()
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def _outcome(servers: ForkServers, compiler: ForkServers, attack: Attack, body: str, scene: Scene) -> int:
    """What the candidate put into out[0]; 0 where it crashed before it could."""
    code = body.format(**{field.name: getattr(scene, field.name) for field in dataclasses.fields(scene)})
    binaries = compile_act(compiler, code, attack.before)
    with started(servers, binaries, attack.limits) as act:
        try:
            return act.run()[0]
        except WorkerCrash:
            return act.outputs()[0]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_the_attack_gets_nothing(attack: Attack, guarded: ForkServers, scene: Scene) -> None:
    assert _outcome(guarded, guarded, attack, attack.attack, scene) == 0


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_it_succeeds_once_its_defence_is_off(
    attack: Attack, guarded: ForkServers, scene: Scene, servers_with: Callable[[Defences], ForkServers]
) -> None:
    off = dataclasses.replace(Defences(), **dict.fromkeys(attack.off, False))
    assert _outcome(servers_with(off), guarded, attack, attack.attack, scene) >= 1


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_the_honest_twin_passes(attack: Attack, guarded: ForkServers, scene: Scene) -> None:
    assert _outcome(guarded, guarded, attack, attack.twin, scene) >= 1


_ORPHAN = "int pid = fork(); if (pid == 0) { setsid(); pause(); _exit(0); } out[0] = pid;"


def _orphan(servers: ForkServers, compiler: ForkServers) -> int:
    with started(servers, compile_act(compiler, _ORPHAN)) as act:
        return act.run()[0]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_nothing_outlives_the_worker(guarded: ForkServers, servers_with: Callable[[Defences], ForkServers]) -> None:
    """With processes allowed and visible, so that there is something to clean up."""
    pid = _orphan(servers_with(Defences(processes=False)), guarded)
    assert pid > 0 and not _alive(pid)


def test_an_orphan_survives_once_the_group_defence_is_off(
    guarded: ForkServers, servers_with: Callable[[Defences], ForkServers]
) -> None:
    pid = _orphan(servers_with(Defences(processes=False, group=False)), guarded)
    assert pid > 0 and _alive(pid)
    os.kill(pid, signal.SIGKILL)
