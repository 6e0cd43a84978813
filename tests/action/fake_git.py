"""A bare repository over HTTP: git's own `git http-backend`, behind whatever server passes requests on."""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cgi:
    """What came out of a CGI program."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def git(folder: Path, *arguments: str, given: str | bytes = b"", check: bool = True) -> str:
    """git's output in ``folder``, whoever the developer is and whatever their settings say. ``given``: its input."""
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        **{f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in _SOMEBODY.items()},
    }
    command = ["git", "-C", str(folder), *arguments]
    data = given.encode() if isinstance(given, str) else given
    return subprocess.run(command, check=check, capture_output=True, input=data, env=environ).stdout.decode().strip()


_SOMEBODY = {"NAME": "Ada", "EMAIL": "ada@example.org"}


def bare_repository(path: Path, default_branch: str) -> Path:
    path.mkdir(parents=True)
    git(path, "init", "-q", "--bare", f"--initial-branch={default_branch}")
    return path


def refs(bare: Path) -> dict[str, str]:
    """As `git for-each-ref`, which would be a process for every request."""
    packed = bare / "packed-refs"
    lines = packed.read_text().splitlines() if packed.exists() else []
    found = {name: sha for sha, name in (line.split(" ") for line in lines if line[0] not in "#^")}
    loose = (path for path in (bare / "refs").rglob("*") if path.is_file() and path.suffix != ".lock")
    return dict(sorted((found | {str(path.relative_to(bare)): path.read_text().strip() for path in loose}).items()))


def has_commit(bare: Path, sha: str) -> bool:
    return bool(git(bare, "rev-parse", "-q", "--verify", f"{sha}^{{commit}}", check=False)) and len(sha) == 40


def basic_password(header: str) -> str:
    """The password of a Basic Authorization header, "" where it is none. GitHub takes any user's name with it."""
    kind, _, value = header.partition(" ")
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def http_backend(
    root: Path, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes, user: str
) -> Cgi:
    """``path`` is below ``root``; with a ``user`` pushes are taken. ``headers``' names are lower case."""
    environ = {
        "PATH": os.environ["PATH"],
        "GIT_PROJECT_ROOT": str(root),
        "GIT_HTTP_EXPORT_ALL": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "CONTENT_TYPE": headers.get("content-type", ""),
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_CONTENT_ENCODING": headers.get("content-encoding", ""),
        "GIT_PROTOCOL": headers.get("git-protocol", ""),
        "REMOTE_ADDR": "127.0.0.1",
        **({"REMOTE_USER": user} if user else {}),
    }
    done = subprocess.run(["git", "http-backend"], input=body, capture_output=True, env=environ, check=False)
    head, _, content = done.stdout.partition(b"\r\n\r\n")
    pairs = [line.split(": ", 1) for line in head.decode().splitlines() if ": " in line]
    status = next((int(value.split()[0]) for name, value in pairs if name.lower() == "status"), 200)
    return Cgi(status, tuple((name, value) for name, value in pairs if name.lower() != "status"), content)
