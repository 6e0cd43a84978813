"""Grades, environment, filters: the parts that can be told without a candidate."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudaforge.evaluation import landlock, sandbox, seccomp, view
from pytest_cudaforge.evaluation.sandbox import Abilities, ChildSpec, Defences, Limits, SandboxSettings, grade

FULL = Abilities("user", True, True, False, 6, True)


@pytest.mark.parametrize(
    ("change", "native", "cuda"),
    [
        ({}, "B", "A"),
        ({"namespaces": "", "view": False, "own_uid": True}, "B", "A"),
        ({"namespaces": "", "view": False}, "C", "C"),
        ({"seccomp": False}, "C", "C"),
        ({"view": False, "landlock_abi": 0}, "C", "C"),
        ({"view": False}, "B", "A"),
        ({"landlock_abi": 0}, "B", "A"),
    ],
)
def test_the_grade_follows_from_what_is_there(change: dict[str, object], native: str, cuda: str) -> None:
    abilities = dataclasses.replace(FULL, **change)
    assert grade(abilities, SandboxSettings(), host_code=True).grade == native
    assert grade(abilities, SandboxSettings(), host_code=False).grade == cuda


def test_a_lower_grade_says_why_and_what_to_do() -> None:
    abilities = Abilities("", False, False, False, 6, True, (("namespaces", "Operation not permitted"),))
    found = grade(abilities, SandboxSettings(), host_code=False)
    assert found.grade == "C" and found.reasons == ("no namespaces: Operation not permitted",)
    assert "apparmor_restrict_unprivileged_userns" in found.remedy


def test_isolation_none_is_grade_c() -> None:
    found = grade(FULL, SandboxSettings(isolation="none"), host_code=False)
    assert found.grade == "C" and "switched off" in found.reasons[0]


def test_the_environment_is_an_allow_list() -> None:
    environ = {
        "PATH": "/usr/bin",
        "OPENAI_API_KEY": "k",
        "LD_PRELOAD": "x.so",
        "PYTHONPATH": "/repo",
        "HOME": "/somewhere/else",
    }
    kept = sandbox.child_environment(environ, Defences())
    assert kept["PATH"] == "/usr/bin" and kept["HOME"] == "/tmp"
    assert not {"OPENAI_API_KEY", "LD_PRELOAD", "PYTHONPATH"} & set(kept)
    assert sandbox.child_environment(environ, Defences(environment=False)) == environ


def test_readable_paths_hold_packages_but_no_home_or_working_directory() -> None:
    paths = view.readable_paths()
    package = os.path.dirname(os.path.abspath(sandbox.__file__))
    assert any(package.startswith(path + "/") for path in paths)
    assert os.path.expanduser("~") not in paths and os.getcwd() not in paths and "/" not in paths


def test_packages_have_each_name_that_what_is_readable_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "venv")
    (tmp_path / "lib").symlink_to(tmp_path / "venv/lib")
    named = tmp_path / "link/lib/python3.11/site-packages"
    monkeypatch.setattr(sys, "path", [str(named)])
    readable = [str(tmp_path / "lib"), *view.readable_paths()]
    found = view.package_paths(readable)
    assert {str(packages), str(named), str(tmp_path / "lib/python3.11/site-packages")} <= set(found)


def test_a_child_runs_its_parents_package_where_another_copy_is_installed(tmp_path: Path) -> None:
    other = tmp_path / "pytest_cudaforge"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('the other copy')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{sandbox.OWN_PACKAGE}"
    program += "from pytest_cudaforge.evaluation import seccomp; print(seccomp.__file__)"
    root = Path(sandbox.__file__).parents[2]
    ran = subprocess.run([sys.executable, "-I", "-B", "-c", program, root], capture_output=True, text=True)
    assert ran.stdout.strip() == str(Path(seccomp.__file__)), ran.stderr


def test_a_spec_survives_its_json() -> None:
    spec = ChildSpec("builder", True, "auto", Limits(files=7), Defences(network=False), ("/usr",), 12)
    assert sandbox.spec_from_json(sandbox.spec_to_json(spec)) == spec


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("role", ["worker", "builder"])
def test_every_jump_of_the_filter_stays_inside_it(machine: str, role: seccomp.Role) -> None:
    code = seccomp.program(role, machine, own_pid=2)
    assert len(code) < 4096
    for index, (_, if_true, if_false, _) in enumerate(code[:-1]):
        assert index + 1 + max(if_true, if_false) < len(code)
    assert code[-1][3] == 0x7FFF0000


def _verdict(
    code: list[tuple[int, int, int, int]],
    number: int,
    arguments: tuple[int, ...] = (),
    arch: int = 0xC000003E,
    behind: int = 0,
) -> int:
    """What the kernel's interpreter would return for one call, from the instruction ``behind`` it."""
    data = {0: number, 4: arch, 8: behind & 0xFFFFFFFF, 12: behind >> 32} | {
        16 + 8 * i: a & 0xFFFFFFFF for i, a in enumerate(arguments)
    }
    register, index = 0, 0
    while True:
        operation, if_true, if_false, constant = code[index]
        index += 1
        if operation == 0x20:
            register = data.get(constant, 0)
        elif operation == 0x06:
            return constant
        else:
            passed = {
                0x15: register == constant,
                0x25: register > constant,
                0x35: register >= constant,
                0x45: bool(register & constant),
            }[operation]
            index += if_true if passed else if_false


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


@pytest.mark.parametrize(
    ("number", "arguments", "worker", "builder"),
    [
        (0, (), ALLOW, ALLOW),  # read
        (101, (), EPERM, EPERM),  # ptrace
        (41, (1,), ALLOW, ALLOW),  # socket AF_UNIX
        (41, (2,), EPERM, EPERM),  # socket AF_INET
        (41, (16,), EPERM, EPERM),  # socket AF_NETLINK
        (56, (0x10F00,), ALLOW, ALLOW),  # clone of a thread
        (56, (17,), EPERM, ALLOW),  # clone as fork
        (56, (0x10000000 | 17,), EPERM, EPERM),  # clone with a user namespace
        (435, (), ENOSYS, ENOSYS),  # clone3
        (59, (), EPERM, ALLOW),  # execve
        (62, (2,), ALLOW, ALLOW),  # kill itself
        (62, (3,), EPERM, EPERM),
        (62, (-1,), EPERM, EPERM),
        (302, (0,), ALLOW, ALLOW),  # prlimit of itself
        (302, (7,), EPERM, EPERM),
        (0x40000000, (), ENOSYS, ENOSYS),  # x32
    ],
)
def test_verdicts_of_the_filter(number: int, arguments: tuple[int, ...], worker: int, builder: int) -> None:
    assert _verdict(seccomp.program("worker", "x86_64", own_pid=2), number, arguments) == worker
    assert _verdict(seccomp.program("builder", "x86_64", own_pid=2), number, arguments) == builder


def test_files_in_memory_are_refused_where_asked() -> None:
    for number in (319, 447):  # memfd_create, memfd_secret
        code = seccomp.program("worker", "x86_64", own_pid=2, refuse_memory_files=True)
        assert _verdict(code, number) == EPERM
        assert _verdict(seccomp.program("builder", "x86_64", own_pid=2), number) == ALLOW


def test_a_foreign_architecture_is_killed() -> None:
    assert _verdict(seccomp.program("worker", "x86_64", own_pid=2), 0, (), arch=0x40000003) == KILL


def test_the_probe_tells_the_same_from_any_process() -> None:
    found = sandbox.probe()
    assert found.grade in ("A", "B", "C")
    assert found.reasons or found.grade == "A"


def test_landlock_reports_a_version() -> None:
    assert landlock.abi() >= 0


_CONTAINED = """
import sys
sys.path.insert(0, sys.argv[1])
from pytest_cudaforge.errors import SandboxError
from pytest_cudaforge.evaluation import sandbox, seccomp
from pytest_cudaforge.evaluation.zygote import ForkServers
seccomp.install("builder", own_pid=None)  # what a container's filter does: no new namespaces, no mounts, no pidfd
print(sandbox.probe_abilities().namespaces or "none")
with ForkServers() as servers:
    print(servers.isolation("cpp").grade)
    print(servers.isolation("cpp").reasons)
    try:
        servers.worker("cpp").close()
        print("started")
    except SandboxError as error:
        print(error)
with ForkServers(sandbox.SandboxSettings(isolation="none")) as servers:
    servers.worker("cpp").close()
"""


def test_a_machine_that_forbids_namespaces_degrades_in_words() -> None:
    """As root an own user id takes their place; without one native code is refused, with the remedy."""
    root = str(Path(sandbox.__file__).resolve().parents[2])
    ran = subprocess.run(
        [sys.executable, "-B", "-c", _CONTAINED, root], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    namespaces, found, reasons, outcome = ran.stdout.split("\n", 3)
    assert namespaces == "none" and "no namespaces" in reasons
    if found == "B":
        assert outcome.strip() == "started"
    else:
        assert "needs isolation of grade B" in outcome and "--isolation none" in outcome


@pytest.mark.parametrize(("start", "end"), [(0x7F1234561000, 0x7F1234563F40), (0x7F12FFFFF000, 0x7F1300002000)])
def test_calls_from_some_code_end_the_process(start: int, end: int) -> None:
    code = seccomp.program_against(start, end)
    inside, outside = (start + 2, (start + end) // 2, 0x7F12FFFFFFFF, 0x7F1300000000, end), (0, start - 1, end + 1)
    told = {place: _verdict(code, 201, behind=place) for place in (*inside, *outside)}
    assert {place for place, verdict in told.items() if verdict == KILL} == {p for p in inside if start <= p <= end}
    assert set(told.values()) == {ALLOW, KILL}
    # As many places away by 4 GiB are somebody else's.
    assert _verdict(code, 201, behind=start + 2 + (1 << 33)) == ALLOW
