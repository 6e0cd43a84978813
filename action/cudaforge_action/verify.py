"""``mode: verify``: whatever a forge job won is built from its source and judged again, by a job that holds no secret.

What this writes is what publish may publish; a kernel that is not right, not faster or cannot be judged here is in it
with the reason.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cudaforge_action.artifact import digest_of
from cudaforge_action.environment import key_names, token_names
from cudaforge_action.held import checked_out
from cudaforge_action.host import Host, log
from cudaforge_action.inputs import Inputs
from cudaforge_action.interpreter import interpreter
from cudaforge_action.process import Ended, run_quoted
from cudaforge_action.project import project_at
from cudaforge_action.records import VerifiedKernel, VerifiedShard
from cudaforge_action.scrubbing import scrubbed
from cudaforge_action.shards import (
    SHARD_FILE,
    ShardError,
    check_name,
    emptied,
    read_forged,
    read_verified,
    tidied,
    write_verified,
)
from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.report.markdown import escape

__all__ = ["run"]


def run(inputs: Inputs, host: Host) -> int:
    """Verify ``inputs.shard``, or every shard that lies there; writes ``verified/<shard>/``.

    0 where every kernel has its verdict, whatever that is; 1 where a process died before. Raises :class:`UsageError`
    for a key or token in the environment and where no shard lies, :class:`ShardError` for a folder that no forge job
    leaves.
    """
    project = project_at(inputs.working_directory, os.environ, inputs.paths)
    secrets = (*token_names(os.environ), *key_names(os.environ, project.settings))
    if secrets:
        raise UsageError(
            f"the environment of the verify job holds {', '.join(secrets)}",
            expected="a job without keys and tokens: it runs kernels that a model wrote",
            remedy="give keys to the forge job alone, and no `env:` to the whole workflow",
        )
    found = [_verified(folder, inputs, host) for folder in _folders(inputs)]
    kernels = [kernel for shard in found for kernel in shard.kernels]
    published = [kernel for kernel in kernels if kernel.entry is not None]
    best = max((_speedup(kernel) for kernel in published), default=None)
    host.output("verified", str(len(published)))
    host.output("best-speedup", f"{best:.3f}" if best is not None else "")
    left = {shard.shard: digest_of(inputs.output / "verified" / shard.shard) for shard in found}
    host.output("digests", json.dumps(left))
    host.summary(_summary(found))
    log(host, [_few(kernels), *(f"{one.target} ({one.language}): {_verdict(one)}" for one in kernels)])
    for shard in found:
        if shard.error:
            host.warning(f"{shard.shard}: {shard.error.splitlines()[0]}; what was verified before is kept")
    return 1 if any(shard.error for shard in found) else 0


def _folders(inputs: Inputs) -> Sequence[Path]:
    place = inputs.output / "forged"
    if inputs.shard is not None:
        folder = place / check_name(inputs.shard.name)
        if not folder.is_dir():
            raise UsageError(
                f"there is no shard {inputs.shard.name} in {place}",
                expected="what the forge job of the same name left",
                remedy="run mode forge on it first, or fetch its artifact, which the forge job uploads if: always()",
            )
        return [folder]
    folders = sorted(place.iterdir()) if place.is_dir() else []
    if not folders:
        raise UsageError(
            f"there is nothing to verify in {place}",
            expected="what forge jobs left, a folder for each shard",
            remedy="run mode forge first, or fetch its artifact",
        )
    return folders


def _verified(forged: Path, inputs: Inputs, host: Host) -> VerifiedShard:
    """One shard, by a process of its own. Raises :class:`ShardError`."""
    name = read_forged(forged).shard.shard
    if name != forged.name:
        raise ShardError(f"{forged} says that it is the shard {name}", expected="a folder of the shard's own name")
    folder = emptied(inputs.output, "verified", name)
    places = [str(path.resolve()) for path in (forged, folder, inputs.working_directory)]
    device = [f"--device={inputs.device}"] if inputs.device else []
    # Not from the checkout: `-m` looks for modules where it stands first.
    start = Path(sys.prefix)
    paths = [f"--path={path}" for path in inputs.paths]
    options = [*device, *paths, f"--quiet-minutes={inputs.quiet_minutes}"]
    argv = [interpreter(inputs), "-m", "cudaforge_action.verification", *places, *options]
    ended = run_quoted(argv, start, scrubbed(os.environ), host, f"verifying {name}")
    return _read(folder, name, ended)


def _read(folder: Path, name: str, ended: Ended) -> VerifiedShard:
    """What the process left, with the reason where it did not end as it should."""
    if not (folder / SHARD_FILE).is_file():
        write_verified(folder, VerifiedShard(name, checked_out(Path.cwd()), error=_error(ended)))
    if ended.status:
        tidied(folder)
    shard = read_verified(folder).shard
    if shard.error or ended.status:
        shard = replace(shard, error=_error(ended))
        write_verified(folder, shard)
    return shard


def _error(ended: Ended) -> str:
    if ended.cancelled:
        return "the job was cancelled"
    if ended.status < 0:
        return f"the process that verifies was killed by signal {-ended.status}"
    return f"the process that verifies ended with status {ended.status}: {ended.last_words[-1500:]}"


def _speedup(kernel: VerifiedKernel) -> float:
    timing = kernel.evaluation.timing if kernel.evaluation is not None else None
    return timing.speedup_eager if timing is not None else 0.0


def _few(kernels: Sequence[VerifiedKernel]) -> str:
    if not kernels:
        return "No kernel was forged: there is nothing to verify."
    good = sum(kernel.entry is not None for kernel in kernels)
    return f"{good} of {len(kernels)} {'kernel' if len(kernels) == 1 else 'kernels'} may be published."


def _verdict(kernel: VerifiedKernel) -> str:
    if kernel.entry is None:
        return kernel.reason
    return "right and faster" + (f" (in turn {kernel.turns}, the first undisturbed one)" if kernel.turns > 1 else "")


def _summary(found: Sequence[VerifiedShard]) -> str:
    kernels = [kernel for shard in found for kernel in shard.kernels]
    lines = ["## Verified from source", "", _few(kernels)]
    lines += [f"\n**{escape(shard.shard)}:** {escape(shard.error[:600])}" for shard in found if shard.error]
    if kernels:
        lines += ["", "| target | language | verdict | vs eager |", "|---|---|---|---|"]
    # What needs a look comes first.
    for kernel in sorted(kernels, key=lambda kernel: kernel.entry is not None)[:200]:
        verdict = escape(_verdict(kernel)[:300])
        gain = f"{_speedup(kernel):.2f}x" if kernel.evaluation is not None and kernel.evaluation.timing else "—"
        lines.append(f"| {escape(kernel.target)} | {escape(kernel.language)} | {verdict} | {gain} |")
    return "\n".join(lines) + "\n"
