"""What the jobs of one workflow run call the artifacts they hand on, and which of them a job fetches and keeps.

``cudaforge-forged-01-cuda``: what, and of which shard. A branch's suffix (``cudaforge_nightly-forged-…``) and a status
context (``cudaforge-guard-h200``) tell several sets of targets, or several kinds of GPU, in one run apart. Run by
``action.yml`` as a step of its own, so that nothing unchecked becomes part of a name or a pattern.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from cudaforge_action.__main__ import show
from cudaforge_action.artifact import cleared
from cudaforge_action.host import host_of
from cudaforge_action.inputs import Inputs, read
from pytest_cudaforge.errors import ForgeError, UsageError

__all__ = ["handover", "main"]


def handover(inputs: Inputs) -> Mapping[str, str]:
    """The step's outputs. ``folder``: where results lie. ``fetch-forged`` (``-plan`` and so on): the pattern
    of artifacts to download into ``folder/forged`` and so on. ``keep``: the name to upload ``folder/<keep-folder>`` as;
    ``keep-published`` likewise. Whatever is not to be done is left out.

    Raises :class:`~pytest_cudaforge.errors.UsageError` where forge or verify has no shard.
    """
    folder = {"folder": inputs.output.as_posix()}
    return folder if inputs.artifacts == "off" else folder | _kept(inputs) | _fetched(inputs)


def _kept(inputs: Inputs) -> dict[str, str]:
    prefix = _prefix(inputs)
    if inputs.mode == "guard":
        return {"keep": _slug(inputs.status_context), "keep-folder": "guard"}
    if inputs.mode == "plan":
        return {"keep": f"{prefix}-plan", "keep-folder": "plan"}
    if inputs.mode in ("forge", "verify"):
        folder = "forged" if inputs.mode == "forge" else "verified"
        return {"keep": f"{prefix}-{folder}-{_shard(inputs)}", "keep-folder": folder}
    if inputs.mode in ("publish", "all"):
        return {"keep-published": f"{prefix}-published"}
    return {}


def _fetched(inputs: Inputs) -> dict[str, str]:
    prefix = _prefix(inputs)
    if inputs.mode == "report":
        return {"fetch-guard": _slug(inputs.status_context)}
    if inputs.mode == "verify":
        return {"fetch-forged": f"{prefix}-forged-{_shard(inputs)}"}
    if inputs.mode == "publish":
        names = {"plan": "plan", "forged": "forged-*", "verified": "verified-*"}
        return {f"fetch-{what}": f"{prefix}-{name}" for what, name in names.items()}
    return {}


def _prefix(inputs: Inputs) -> str:
    # Another separator than the one that follows: no pattern of one set of targets matches a name of another.
    suffix = _slug(inputs.branch_suffix).replace("-", ".")
    return f"cudaforge_{suffix}" if suffix else "cudaforge"


def _slug(text: str) -> str:
    """Letters, digits and dashes: an artifact's name may not hold ``/``, and a pattern's ``*`` and ``[`` mean much."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:80]


def _shard(inputs: Inputs) -> str:
    if inputs.shard is None:
        raise UsageError(
            f"mode {inputs.mode} has no shard",
            expected="the input shard: the job's own entry of the matrix that mode plan gave",
            remedy="shard: ${{ matrix.shard }}",
        )
    return inputs.shard.name


def _folders(told: Mapping[str, str]) -> Iterator[str]:
    """What is about to be filled, by name below ``folder``."""
    for name, value in told.items():
        if name.startswith("fetch-"):
            yield name.removeprefix("fetch-")
        elif name == "keep-folder":
            yield value
        elif name == "keep-published":
            yield "published"


def main(environ: Mapping[str, str] = os.environ) -> int:
    """The exit status of the step that names them, and that empties what artifacts are made of or put into: a commit
    can bring files of that name, which nobody verified."""
    host = host_of(environ)
    try:
        inputs = read(environ, ())
        told = handover(inputs)
        for name in _folders(told):
            cleared(inputs.output / name)
        for name, value in told.items():
            host.output(name, value)
    except ForgeError as error:
        show(host, str(error))
        return 2
    return 0
