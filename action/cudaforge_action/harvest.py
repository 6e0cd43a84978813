"""Everything that the jobs of a workflow left, read once: which kernels may be published, and what is missing.

A folder that is not what a job of ours leaves counts as a lost shard: it is named, and the others go on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudaforge_action.artifact import digest_of
from cudaforge_action.branch import Kernel, Refused
from cudaforge_action.shards import Forged, ShardError, Verified, read_forged, read_verified
from cudaforge_action.story import Origin, kernel_of

__all__ = ["Harvest", "harvest"]

_MOST_SHARDS = 1_000


@dataclass(frozen=True)
class Harvest:
    """``kernels``: verified, with their whole folders. ``refused``: what verifying did not pass. ``lost``: shards (by
    name) without a whole result, and why. ``usd``: what forging cost by its own account; None where some job does not
    know."""

    kernels: tuple[Kernel, ...]
    refused: tuple[Refused, ...]
    lost: Mapping[str, str]
    forged: Mapping[str, Forged]
    verified: Mapping[str, Verified]

    @property
    def usd(self) -> float | None:
        known = [one.shard.usd for one in self.forged.values()]
        prices = [price for price in known if price is not None and 0 <= price < 1e9]
        return sum(prices) if prices and len(prices) == len(known) else None

    @property
    def machines(self) -> tuple[str, ...]:
        """That verified, each once."""
        return tuple(dict.fromkeys(filter(None, (one.shard.machine for one in self.verified.values()))))

    @property
    def models(self) -> tuple[str, ...]:
        found = (model for one in self.forged.values() for kernel, _ in one.kernels for model in kernel.models)
        return tuple(dict.fromkeys(found))


def harvest(folder: Path, expected: Collection[str] | None = None, vouched: Mapping[str, str] | None = None) -> Harvest:
    """What lies in ``folder/forged/*`` and ``folder/verified/*``. ``expected``: the shards that were planned, where
    that is known; no others are used then. ``vouched``: by shard, the digest of what its verify job left, by that
    job's own outputs, where those are known: an artifact belongs to a whole run, whose other jobs can replace it."""
    lost: dict[str, str] = {}
    forged: dict[str, Forged] = {}
    verified: dict[str, Verified] = {}
    for place in _folders(folder / "forged"):
        try:
            forged[place.name] = read_forged(place)
        except ShardError as error:
            lost[place.name] = f"what its forge job left is not used: {error.what}"
    for place in _folders(folder / "verified"):
        try:
            if vouched is not None:
                _check_origin(place, vouched.get(place.name, ""))
            verified[place.name] = read_verified(place)
        except ShardError as error:
            lost[place.name] = f"what its verify job left is not used: {error.what}"
    for name in sorted({*forged, *verified} - {*expected} if expected is not None else ()):
        lost[name] = "it was not planned: no job of this run was to leave it"
        forged.pop(name, None)
        verified.pop(name, None)
    for name in sorted({*(expected or ()), *forged, *verified} - lost.keys()):
        if why := _missing(forged.get(name), verified.get(name)):
            lost[name] = why
    kernels, refused = _kernels(forged, verified)
    return Harvest(tuple(kernels), tuple(refused), dict(sorted(lost.items())), forged, verified)


def _check_origin(place: Path, vouched: str) -> None:
    """Raises :class:`ShardError` for what its verify job did not leave."""
    if not vouched:
        raise ShardError(f"{place.name}: no verify job says that it left this")
    if digest_of(place) != vouched:
        raise ShardError(f"{place.name}: it is not what its verify job says that it left")


def _folders(folder: Path) -> Sequence[Path]:
    try:
        with os.scandir(folder) as listed:
            found = [Path(entry.path) for entry in listed if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return ()
    return sorted(found)[:_MOST_SHARDS]


def _missing(forged: Forged | None, verified: Verified | None) -> str:
    if verified is None:
        return "its forge job left nothing" if forged is None else "its verify job left nothing"
    if verified.shard.error:
        return f"its verify job ended early: {verified.shard.error}"
    if forged is not None and forged.shard.error:
        return f"its forge job ended early: {forged.shard.error}"
    return ""


def _kernels(
    forged: Mapping[str, Forged], verified: Mapping[str, Verified]
) -> tuple[Sequence[Kernel], Sequence[Refused]]:
    kernels, refused = [], []
    for name, shard in verified.items():
        origins = _origins(forged.get(name))
        for kernel in shard.shard.kernels:
            if kernel.entry is None:
                verdict = kernel.evaluation
                why = kernel.reason or (f"{verdict.status.value}: {verdict.reason}" if verdict is not None else "")
                refused.append(Refused(kernel.target, kernel.language, why or "it was not verified"))
            else:
                origin = origins.get((kernel.target, kernel.language, kernel.digest))
                kernels.append(kernel_of(shard, kernel, origin))
    return kernels, refused


def _origins(forged: Forged | None) -> dict[tuple[str, str, str], Origin]:
    """By target, language and digest: which workloads a kernel is for is known to who verified it alone."""
    if forged is None:
        return {}
    return {
        (kernel.target, kernel.language, kernel.digest): Origin(kernel, trace, forged.shard.machine)
        for kernel, trace in forged.kernels
    }
