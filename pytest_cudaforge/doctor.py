"""What this machine can and cannot do for forging, and how to mend it. Nothing is changed; no key is shown."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaforge.config import ForgeConfig, load
from pytest_cudaforge.errors import ForgeError

__all__ = ["Finding", "examine", "findings_text"]

TIMEOUT_S = 60.0
#: Below this a build cache and a run directory soon fill the disk.
LEAST_FREE_BYTES = 2 << 30

OPENMP_PROGRAM = '#include <omp.h>\n#include <cstdio>\nint main() { std::printf("%d", omp_get_max_threads()); }\n'


#: What a profile shows on each rung of the ladder.
_RUNGS = {
    "ncu": "counters, rules and hot lines of each kernel",
    "cupti": "each kernel's time, without counters",
    "static": "what the binary, the plan and the roofline tell",
}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, does it work, what was seen, what to do. ``optional``: a run does without it."""

    name: str
    works: bool
    text: str
    remedy: str = ""
    optional: bool = False


def examine(root: Path, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Look at everything, in the order a run needs it."""
    config, configured = _configuration(root, environ)
    checks: Sequence[Callable[[], Finding | Sequence[Finding]]] = (
        _python,
        _torch,
        _compiler,
        _openmp,
        _gpu,
        _nvml,
        _nvrtc,
        _triton,
        lambda: _ncu(environ),
        _perf,
        lambda: _sanitizer(environ),
        _sandbox,
        lambda: _disk(config.run_dir if config is not None else root),
        lambda: _keys(config, environ),
        lambda: _git(root),
    )
    findings = [configured]
    for check in checks:
        found = check()
        findings += [found] if isinstance(found, Finding) else found
    return tuple(findings)


def findings_text(findings: Sequence[Finding]) -> str:
    """One line per finding, its remedy below it, and a verdict in plain words at the end."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        mark = "ok  " if finding.works else "note" if finding.optional else "MISS"
        lines.append(f"{mark}  {finding.name.ljust(width)}  {finding.text}")
        if finding.remedy and not finding.works:
            lines.append(f"{' ' * (width + 8)}to do: {finding.remedy}")
    return "\n".join([*lines, "", *_verdict({finding.name: finding.works for finding in findings})])


def _verdict(works: Mapping[str, bool]) -> list[str]:
    cpp = works.get("torch", False) and works.get("compiler", False) and works.get("OpenMP", False)
    cuda = works.get("torch", False) and works.get("GPU", False) and works.get("NVRTC", False)
    key = works.get("key", False)
    return [
        "C++ kernels for this CPU: " + ("yes" if cpp else "no"),
        "CUDA kernels on this machine: " + ("yes" if cuda else "no"),
        "CUDA kernels for another machine (build only): " + ("yes" if works.get("NVRTC", False) else "no"),
        "native code of candidates in a sandbox: " + ("yes" if works.get("sandbox", False) else "no"),
        "asking a model: "
        + ("yes" if key else "no; recordings, torch.compile's options and `cudaforge evaluate` need none"),
    ]


# -- checks ----------------------------------------------------------------------------------------------------


def _configuration(root: Path, environ: Mapping[str, str]) -> tuple[ForgeConfig | None, Finding]:
    try:
        config = load({}, root=root, start=Path.cwd(), environ=environ)
    except ForgeError as error:
        return None, Finding("configuration", False, error.what, error.remedy or error.expected)
    where = str(config.file) if config.file is not None else "no cudaforge.yaml; defaults"
    return config, Finding("configuration", True, where)


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    works = sys.version_info >= (3, 10) and sys.platform == "linux"
    return Finding("python", works, f"{version} on {sys.platform}", "use Python 3.10 or newer on Linux")


def _torch() -> Finding:
    # The installed version, not an import: that would cost seconds and 200 MB for one line.
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", False, "not installed", "pip install torch")
    return Finding("torch", True, version)


def _compiler() -> Finding:
    from pytest_cudaforge.languages import load as load_language

    reason = load_language("cpp").availability()
    if reason:
        what, _, rest = reason.partition("\n")
        return Finding("compiler", False, what, rest.strip() or "install g++, for example `apt install g++`")
    return Finding("compiler", True, _first_line(["g++", "--version"]) or "g++ works")


def _openmp() -> Finding:
    compiler = shutil.which("g++")
    if compiler is None:
        return Finding("OpenMP", False, "no compiler to try it with", "install g++")
    with tempfile.TemporaryDirectory(prefix="cudaforge-doctor-") as folder:
        source, program = Path(folder) / "try.cpp", Path(folder) / "try"
        source.write_text(OPENMP_PROGRAM)
        _first_line([compiler, "-fopenmp", str(source), "-o", str(program)])
        threads = _first_line([str(program)]) if program.exists() else ""
    if not threads:
        return Finding("OpenMP", False, "a program with -fopenmp does not build or run", "apt install libgomp1 g++")
    return Finding("OpenMP", True, f"{threads} threads")


def _gpu_files() -> bool:
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def _gpu() -> Finding:
    from pytest_cudaforge.hardware import describe, detect_in_child

    if not _gpu_files():
        text = "no NVIDIA GPU, or its driver is not loaded"
        return Finding("GPU", False, text, "nothing, if there is none; else install the driver", optional=True)
    try:
        return Finding("GPU", True, describe(detect_in_child("cuda:0")))
    except ForgeError as error:
        return Finding("GPU", False, error.what, error.remedy, optional=True)


def _nvml() -> list[Finding]:
    from pytest_cudaforge.hardware import detect_in_child
    from pytest_cudaforge.hardware.nvml import open_monitor

    if not _gpu_files():
        return []
    remedy = 'pip install "pytest-cudaforge[cuda]"; in a container allow the driver capability `utility`'
    try:
        monitor = open_monitor(detect_in_child("cuda:0").uuid)
    except ForgeError as error:
        monitor = error.what
    if isinstance(monitor, str):
        return [Finding("NVML", False, f"{monitor}; throttling and foreign load go unnoticed", remedy, optional=True)]
    running = monitor.running()
    who = (
        f"{len(running)} other processes use it now" if running else "shows no other process (containers may hide them)"
    )
    return [Finding("NVML", True, f"tells of throttling; {who}", optional=True)]


def _nvrtc() -> Finding:
    from pytest_cudaforge.languages import load as load_language

    reason = load_language("cuda").availability()
    if reason:
        return Finding("NVRTC", False, *_what_and_remedy(reason), optional=True)
    return Finding("NVRTC", True, "compiles CUDA sources, also without a GPU")


def _what_and_remedy(reason: str) -> tuple[str, str]:
    """The parts of an error's message, without their labels."""
    what, *rest = reason.splitlines()
    return what, "; ".join(line.strip().removeprefix("to do: ") for line in rest)


def _triton() -> Finding:
    from pytest_cudaforge.languages import load as load_language
    from pytest_cudaforge.languages.triton import triton_version

    reason = load_language("triton").availability()
    if reason:
        return Finding("Triton", False, *_what_and_remedy(reason), optional=True)
    return Finding("Triton", True, f"{triton_version()}; compiles kernel.py, also without a GPU")


def _ncu(environ: Mapping[str, str]) -> Finding:
    """Which rung of the ladder of profiles bears on the GPU."""
    from pytest_cudaforge.hardware import counter_probe, ncu

    if not _gpu_files():
        found = ncu.find_ncu(environ)
        text = f"{found}; there is no GPU to profile" if found else "not found; there is no GPU to profile either"
        return Finding("ncu", False, text, "nothing, without a GPU", optional=True)
    probed = counter_probe.probe("cuda:0", environ)
    if probed.rung == "ncu":
        return Finding("ncu", True, f"reads the GPU's counters: {_RUNGS['ncu']}")
    text = f"{probed.reason}; the Judge gets {_RUNGS[probed.rung]}"
    return Finding("ncu", False, text, probed.remedy, optional=True)


def _perf() -> Finding:
    """Which rung bears on this CPU."""
    from pytest_cudaforge.hardware import perf

    probed = perf.probe()
    seen = "times and remarks of g++" + (", samples by line" if probed.sampling else "")
    if probed.counters:
        return Finding("perf", True, f"reads the CPU's counters ({len(probed.counters)} of {len(perf.EVENTS)}); {seen}")
    return Finding("perf", False, f"{probed.reason}; the Judge gets {seen}", probed.remedy, optional=True)


def _sanitizer(environ: Mapping[str, str]) -> Finding:
    from pytest_cudaforge.evaluation.sanitizer import find_sanitizer

    found = find_sanitizer(environ)
    if found is None:
        text = "not found; CUDA winners are published without memcheck, racecheck and initcheck"
        remedy = "pip install nvidia-cuda-sanitizer-api, or put a CUDA toolkit's compute-sanitizer on the PATH"
        return Finding("sanitizer", False, text, remedy, optional=True)
    version = next((line for line in _lines([str(found), "--version"]) if line.startswith("Version")), "")
    return Finding("sanitizer", bool(version), f"{found} {version or 'does not run'}", "install it anew", optional=True)


def _sandbox() -> list[Finding]:
    from pytest_cudaforge.evaluation import sandbox

    try:
        abilities = sandbox.probe_abilities()
        isolation = sandbox.probe()
    except (ForgeError, OSError, subprocess.TimeoutExpired) as error:
        return [Finding("sandbox", False, str(error), "report this with the output of `cudaforge doctor`")]
    reasons = dict(abilities.problems)
    kind = {"plain": "as root", "user": "through user namespaces", "": reasons.get("namespaces", "not allowed")}
    landlock = f"ABI {abilities.landlock_abi}" if abilities.landlock_abi else reasons.get("Landlock", "no")
    seccomp = "works" if abilities.seccomp else reasons.get("seccomp", "not allowed")
    works = isolation.grade in ("A", "B")
    grade = f"grade {isolation.grade} for CUDA plans, {'B' if works else isolation.grade} for C++"
    return [
        Finding("namespaces", bool(abilities.namespaces), kind[abilities.namespaces], isolation.remedy, optional=True),
        Finding("seccomp", abilities.seccomp, seccomp, "allow seccomp filters in the container", optional=True),
        Finding("Landlock", abilities.landlock_abi > 0, landlock, "a kernel of 5.13 or newer with it", optional=True),
        Finding("sandbox", works, grade, isolation.remedy),
    ]


def _disk(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    text = f"{free / 2**30:.1f} GiB free for {folder}" + ("" if writable else ", which cannot be written")
    return Finding("disk", writable and free >= LEAST_FREE_BYTES, text, "free some space, or set run_dir elsewhere")


def _keys(config: ForgeConfig | None, environ: Mapping[str, str]) -> Finding:
    """Present or not; the value is neither shown nor measured."""
    if config is None:
        return Finding("key", False, "unknown until the configuration is right", optional=True)
    roles = [role for role in (config.chat.coder, config.chat.judge) if role.provider == "openai"]
    names = list(dict.fromkeys(role.api_key_env for role in roles))
    if config.chat.coder.provider == "compiler":
        text, remedy = "not needed: provider compiler searches torch.compile's options", "for kernels name a model"
        return Finding("key", False, text, remedy, optional=True)
    if not names:
        return Finding("key", True, f"not needed: provider {config.chat.coder.provider}")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        remedy = f"export {missing[0]}=..., or set chat.coder.provider to replay or command"
        instead = "" if config.names_models else "; without a model `pytest --forge` searches torch.compile's options"
        return Finding("key", False, f"{', '.join(missing)} is not set{instead}", remedy, optional=True)
    return Finding("key", True, f"{', '.join(names)} is set")


def _git(root: Path) -> Finding:
    remedy = "install git and `git init`, if you want --forge-branch"
    if shutil.which("git") is None:
        return Finding("git", False, "not installed; only --forge-branch needs it", remedy, optional=True)
    inside = _first_line(["git", "-C", str(root), "rev-parse", "--is-inside-work-tree"]) == "true"
    text = f"{root} is a repository" if inside else f"{root} is no repository; only --forge-branch needs one"
    return Finding("git", inside, text, remedy, optional=True)


def _first_line(argv: Sequence[str]) -> str:
    """The first line that a program printed; "" where it failed."""
    return next(iter(_lines(argv)), "")


def _lines(argv: Sequence[str]) -> list[str]:
    """What a program printed; nothing where it failed."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
