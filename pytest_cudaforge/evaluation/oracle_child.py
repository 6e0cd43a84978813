"""The oracle's own process: imports targets, draws inputs, runs references, judges outputs, times baselines.

Trusted against candidates, not against the repo's own code, which it runs; it has a scrubbed environment and no
secrets. Requests and replies are JSON behind a length; a reply may carry one descriptor. The supervisor holds the
other end and the clock.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pytest_cudaforge.errors import DeviceError, ForgeError, OracleError, TargetError
from pytest_cudaforge.evaluation.bench import Bench
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.exchanges import Moved
from pytest_cudaforge.evaluation.faults import is_fatal
from pytest_cudaforge.evaluation.first_calls import settle_vector_math
from pytest_cudaforge.evaluation.frames import Case
from pytest_cudaforge.evaluation.gradients import GradientSubject
from pytest_cudaforge.evaluation.importing import options_asked
from pytest_cudaforge.evaluation.initial import encode_init
from pytest_cudaforge.evaluation.linter import lint
from pytest_cudaforge.evaluation.oracle import FATAL_FAMILY, FATAL_VARIANT, FOLLOWS_STATE, NO_ROOM, STRIDED
from pytest_cudaforge.evaluation.rare import named_integers
from pytest_cudaforge.evaluation.relocation import installed_copies, relocate
from pytest_cudaforge.evaluation.room import share_bytes, within
from pytest_cudaforge.evaluation.rotation import Rotation
from pytest_cudaforge.evaluation.subject import INIT_SEED, Subject
from pytest_cudaforge.evaluation.undisabled import undisabled
from pytest_cudaforge.evaluation.variants import (
    MOST_TALL,
    apart_names,
    apply_variant,
    fixed_names,
    front_names,
    further_names,
    grown_size,
    grows_far,
    kind_of,
    landmark_names,
    left_names,
    long_names,
    mixed_names,
    multiple_names,
    neighbour_names,
    order_names,
    outer_names,
    parted_names,
    plane_names,
    rounder_names,
    side_of,
    single_names,
    smaller_tall,
    strided_names,
    tall_names,
    tiny_names,
    twins_of,
    usual_names,
    vast_names,
    vaster_names,
    wide_names,
)
from pytest_cudaforge.evaluation.version import Version, VersionRotation
from pytest_cudaforge.hardware import roofline
from pytest_cudaforge.records import Target, TargetFacts, WorkloadFacts, from_json, to_json
from pytest_cudaforge.runtime.circumstances import same
from pytest_cudaforge.runtime.fingerprints import Fingerprint, fingerprint_of
from pytest_cudaforge.runtime.gradients import backward_workload, is_backward
from pytest_cudaforge.runtime.signature import attribute_in, describe_module, flatten_call, flatten_output, spec_of
from pytest_cudaforge.target import terms_of

__all__ = ["main", "serve"]

_LENGTH = struct.Struct("<Q")
#: So many layers with weights make a network.
_NETWORK_PRODUCTS = 4
#: How long the reference may take at sizes that grew far: a candidate has about ten times as long.
_MOST_VARIANT_S = 1.0
#: How many calls are looked for in which what has one size has two, for each size, and for how long.
_MOST_APART, _APART_S = 2, 1.0
#: Elements of a call's tensors next to a number that a candidate names, at most, and how long such calls are tried.
_LANDMARKS_S = 5.0
#: How long calls of all remainders are looked for.
_LEFT_S = 1.0
_MOST_BY_LANDMARKS = {"cpu": 3 << 24, "cuda": 1 << 27}
_LANGUAGES = ("cuda", "triton", "cpp")


@dataclasses.dataclass(frozen=True)
class _Called:
    """A variant's call of the reference: its arguments, what it returned, and how long it took."""

    call: tuple[tuple[Any, ...], dict[str, Any]]
    output: Any
    seconds: float


class _Lost(DeviceError):
    """The process's CUDA context is of no use any more."""

    def __init__(self) -> None:
        super().__init__("CUDA_ERROR_LAUNCH_FAILED")


class _Oracle:
    """State of the process: loaded subjects, open benches and rotations by number."""

    def __init__(self, device: str, python_paths: tuple[str, ...]) -> None:
        self.device, self.python_paths = device, python_paths
        self.subjects: dict[str, Subject] = {}
        self.versions: dict[str, Version] = {}
        self.benches: dict[int, Bench] = {}
        self.rotations: dict[int, Rotation] = {}
        # Unlike any number of an earlier process, which a client may still hold.
        self.next_number = os.getpid() << 20

    def serve(self, request: dict[str, Any]) -> tuple[Any, int | None]:
        """Answer one request: (data, descriptor to send or None)."""
        CHANCE.follow(request["chance"])
        operation = getattr(self, "do_" + request["op"])
        result = operation(**request.get("args", {}))
        return result if isinstance(result, tuple) else (result, None)

    def subject(self, target: Any) -> Subject:
        record: Target = from_json(Target, target)
        key = record.key
        if key not in self.subjects:
            self.subjects[key] = Subject(record, self.device, self.python_paths)
        return self.subjects[key]

    def of_workload(self, target: Any, workload: str) -> Subject:
        """The subject, or that of its backward, where the workload's name says so."""
        if not is_backward(workload):
            return self.subject(target)
        record: Target = from_json(Target, target)
        key = f"{record.key}\0backward"
        if key not in self.subjects:
            self.subjects[key] = GradientSubject(record, self.device, self.python_paths)
        return self.subjects[key]

    # -- operations

    def do_hello(self) -> Any:
        cuda = torch.version.cuda or ""
        return {
            "torch": torch.__version__,
            "cuda": cuda,
            "threads": torch.get_num_threads(),
            "python": sys.version.split()[0],
        }

    def do_facts(self, target: Any) -> Any:
        return to_json(target_facts(self.subject(target)))

    def do_terms(self, target: Any) -> Any:
        return terms_of(self.subject(target).options)

    def do_guarded(self, target: Any) -> bool:
        record: Target = from_json(Target, target)
        return options_asked(record, self.python_paths).guard

    def do_backward(self, target: Any) -> Any:
        """``{"reason": why there is none, "workloads": WorkloadFacts of each workload's backward}``."""
        names = list(self.subject(target).options.input_sets)
        written = next((path for name in names for path in sorted(self.subject(target).mutates(name))), "")
        if written:
            return {"reason": f"the reference's forward writes {written}", "workloads": []}
        found = []
        for name in map(backward_workload, names):
            subject = self.of_workload(target, name)
            assert isinstance(subject, GradientSubject)
            reason = subject.why_none(name)
            if reason:
                return {"reason": reason, "workloads": []}
            found.append(to_json(workload_facts(subject, name, *subject.trial_run(name))))
        return {"reason": "", "workloads": found}

    def do_initial(self, target: Any) -> Any:
        args, kwargs = self.subject(target).init_arguments()
        return {"init": encode_init(args, kwargs), "seed": INIT_SEED}

    def do_lint(self, target: Any, workload: str) -> Any:
        return to_json(lint(self.subject(target), workload))

    def do_structures(self, target: Any, workload: str, widen: bool = True) -> Any:
        return self.of_workload(target, workload).domain.structures(workload, widen=widen)

    def do_families(
        self, target: Any, workload: str, most: int | None, fatal: Sequence[str] = (), rare: bool = True
    ) -> Any:
        """None of those that were ``fatal``; ``rare``: those of rare values, too."""
        domain = self.of_workload(target, workload).domain
        try:
            return list(domain.families(workload, most, without=fatal, rare=rare))
        except (ForgeError, RuntimeError) as error:
            if not is_fatal(error) or not domain.trying:
                raise
            raise OracleError(f"{FATAL_FAMILY}{domain.trying}") from error

    def do_shortcuts(self, target: Any, workload: str) -> Any:
        return list(self.of_workload(target, workload).domain.shortcuts(workload))

    def do_hundreds(self, target: Any, workload: str) -> Any:
        return list(self.of_workload(target, workload).domain.hundreds(workload))

    def do_variants(self, target: Any, workload: str, sizes: bool = True, fatal: Sequence[str] = ()) -> Any:
        """Variants on which the reference itself runs, as (name, WorkloadFacts); ``sizes``: neighbouring ones, too, and
        none of the kinds that were ``fatal``."""
        subject = self.subject(target)
        args, kwargs = subject.draw(workload, 0)
        found = []
        others = fixed_names((args, kwargs), subject.draw(workload, 1))
        promised = subject.options.strides == "any"
        orders = [*outer_names(args, kwargs), *order_names(args, kwargs, promised)]
        # What shares memory with itself nobody can write element by element.
        writes = any(path.startswith("input/") for path in subject.mutates(workload))
        for name in _left(
            [*strided_names(promised, shared=not writes), *front_names(args, kwargs), *orders, *others], fatal
        ):
            found += self._variants(subject, workload, [name])
        if sizes:
            found += self._sizes(subject, workload, args, kwargs, fatal)
        return found

    def _sizes(
        self, subject: Subject, workload: str, args: tuple[Any, ...], kwargs: dict[str, Any], fatal: Sequence[str]
    ) -> list[Any]:
        """Variants with other sizes."""
        found: list[Any] = []
        on_gpu, dynamic = torch.device(self.device).type == "cuda", subject.options.dynamic
        for _, alike in itertools.groupby(neighbour_names(args, kwargs, dynamic), key=side_of):
            members = list(alike)
            # Nothing tried is nothing known: a kernel would be thought right at sizes that nobody looked at.
            taken = self._variants(subject, workload, members)
            found += taken or self._variants(subject, workload, rounder_names(members[0]))[: len(members)]
        # On a GPU a place behind the last one ends the process.
        further = () if on_gpu else further_names(args, kwargs)
        for name in _left([*further, *parted_names(args, kwargs, dynamic)], fatal):
            found += self._variants(subject, workload, [name])
        for names in apart_names(args, kwargs):
            found += self._apart(subject, workload, _left(names, fatal))
        single = single_names(args, kwargs, dynamic) if dynamic or not on_gpu else ()
        wide = wide_names(args, kwargs) if dynamic else ()
        for name in _left([*tiny_names(args, kwargs), *single, *wide], fatal):
            found += self._variants(subject, workload, [name])
        tall = tall_names(args, kwargs) if on_gpu or dynamic else ()
        found += self._tall(subject, workload, (_left(ways, fatal) for ways in tall))
        if dynamic:
            free = {old for old, _ in (side_of(name) for name, _ in found)}
            for name in _left(mixed_names(args, kwargs, free), fatal):
                found += self._variants(subject, workload, [name])
            until = time.monotonic() + _LEFT_S
            for name in _left(left_names(args, kwargs, free), fatal):
                found += self._variants(subject, workload, [name]) if time.monotonic() < until else []
            vaster = (vaster_names,) if on_gpu else ()
            for vast in (vast_names, *vaster, plane_names, usual_names, long_names):
                found += self._first(subject, workload, _left(vast(args, kwargs), fatal))
        return found

    def do_landmarks(self, target: Any, workload: str, marks: list[int]) -> Any:
        """As variants, with sizes that are multiples of a number that the target knows by name, or next to ``marks``,
        as many as the reference comes to in a while."""
        subject, found = self.subject(target), list[Any]()
        most, until = _MOST_BY_LANDMARKS[torch.device(self.device).type], time.monotonic() + _LANDMARKS_S
        call, named = subject.draw(workload, 0), named_integers(subject.module, subject.code)
        for name in [*multiple_names(*call, named, most), *landmark_names(*call, marks, most)]:
            if time.monotonic() < until and self._is_soon(subject, workload, name):
                found += self._variants(subject, workload, [name])
        return found

    def _apart(self, subject: Subject, workload: str, names: Iterable[str]) -> list[Any]:
        """The first ones that the reference takes, of those that it comes to in time."""
        until = time.monotonic() + _APART_S
        soon = itertools.takewhile(lambda _: time.monotonic() < until, names)
        some = (facts for name in soon for facts in self._variants(subject, workload, [name]))
        return list(itertools.islice(some, _MOST_APART))

    def _tall(self, subject: Subject, workload: str, names: Iterable[Sequence[str]]) -> list[Any]:
        """The first way of each size that the reference takes, for the first sizes that have one."""
        some = (facts for ways in names for facts in self._first(subject, workload, ways))
        return list(itertools.islice(some, MOST_TALL))

    def _first(self, subject: Subject, workload: str, names: Sequence[str]) -> list[Any]:
        takes = (self._variants(subject, workload, [name]) for name in names if self._is_soon(subject, workload, name))
        return next(filter(None, takes), [])

    def _is_soon(self, subject: Subject, workload: str, name: str) -> bool:
        """Would a tall call of the reference's come to an end in reasonable time? What grows in one place may take as
        much longer as it is longer, or that many times more."""
        steps = smaller_tall(name)
        if not steps:
            return True
        took_s = [self._seconds(subject, workload, step) for step in steps]
        if None in took_s:
            return True  # it does not take such numbers of rows
        first_s, second_s = (max(seconds or 0.0, 1e-6) for seconds in took_s)
        first, second, last = (grown_size(one) for one in (*steps, name))
        power = max(1.0, math.log(max(second_s / first_s, 1.0)) / math.log(second / first))
        return bool(second_s * (last / second) ** power <= _MOST_VARIANT_S)

    def _seconds(self, subject: Subject, workload: str, name: str) -> float | None:
        """The shorter of two calls; None where the reference does not take it."""
        called = (self._called(subject, workload, name) for _ in range(2))
        return min((found.seconds for found in called if found is not None), default=None)

    def _variants(self, subject: Subject, workload: str, names: Sequence[str]) -> list[Any]:
        """Those of them that the reference takes, and not by accident; of any other nothing is promised."""
        found = []
        for name in names:
            if not all(self._called(subject, workload, twin) for twin in twins_of(name)):
                continue
            called = self._called(subject, workload, name)
            if called is None or (grows_far(name) and called.seconds > _MOST_VARIANT_S):
                continue
            leaves, tree = flatten_call(*called.call)
            found.append([name, to_json(workload_facts(subject, name, leaves, tree, called.output))])
        return found

    def _called(self, subject: Subject, workload: str, name: str) -> _Called | None:
        """The reference's call of a variant; None where it does not take it, or there is no room for it."""
        try:
            changed = apply_variant(name, *subject.draw(workload, 0))
            # Only of these: a call of about the drawn size that is left out is one that nobody looked at.
            with within(self.device, share_bytes(self.device) if grows_far(name) else 0):
                began = time.monotonic()
                output = subject.run(subject.function, *changed)
        except TargetError as error:
            # Some of torch's own kernels say in other words that memory was misaligned.
            if is_fatal(error) or self._is_lost():
                raise OracleError(f"{FATAL_VARIANT}{kind_of(name)}") from _Lost()
            return None
        except (torch.OutOfMemoryError, MemoryError):
            return None  # a call of that size cannot be made here
        if self._is_lost():  # a fault in the call shows here, not at some later request
            raise OracleError(f"{FATAL_VARIANT}{kind_of(name)}") from _Lost()
        return _Called(changed, output, time.monotonic() - began)

    def _is_lost(self) -> bool:
        """Has the device failed, for good?"""
        if torch.device(self.device).type != "cuda":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return is_fatal(error)
        return False

    def do_bench(self, target: Any, workload: str, variant: str, layout: Any) -> Any:
        bench = Bench(self.of_workload(target, workload), workload, variant, layout)
        number = self._number()
        self.benches[number] = bench
        return {"bench": number, "nbytes": bench.arena.nbytes}, bench.arena.fd

    def do_fill(self, bench: int, frame: int, case: Any, poison: int) -> Any:
        self.benches[bench].fill(
            frame, Case(**{**case, "kept": tuple(case["kept"]), "others": tuple(case["others"])}), poison
        )

    def do_fill_all(self, bench: int, seeds: list[int], poison: int, weights_seed: int | None, kept: list[str]) -> Any:
        self.benches[bench].fill_all(seeds, poison, weights_seed, tuple(kept))

    def do_snapshot(self, bench: int) -> Any:
        copy = self.benches[bench].snapshot()
        return {"nbytes": copy.nbytes}, copy.fd

    def do_renew(self, bench: int, seeds: list[int], family: str) -> Any:
        self.benches[bench].renew(seeds, family)

    def do_rewrite(self, bench: int) -> Any:
        self.benches[bench].rewrite()

    def do_keeps_places(self, target: Any, workload: str) -> Any:
        return self.of_workload(target, workload).keeps_places(workload)

    def do_follow(self, bench: int, frame: int, calls: int) -> Any:
        return self.benches[bench].follow(frame, calls)

    def do_edit(self, bench: int, frame: int, seed: int) -> Any:
        return self.benches[bench].edit(frame, seed)

    def do_mutates(self, target: Any, workload: str) -> Any:
        subject = self.of_workload(target, workload)
        return [*sorted(subject.mutates(workload)), *([FOLLOWS_STATE] if subject.follows_state(workload) else [])]

    def do_draws(self, target: Any, workload: str) -> Any:
        return self.of_workload(target, workload).draws_numbers(workload)

    def do_touch(self, bench: int, frame: int, seed: int) -> Any:
        self.benches[bench].touch(frame, seed)

    def do_exchange(self, bench: int, frame: int, seed: int, alone: str, moved: Moved | None) -> Any:
        self.benches[bench].exchange(frame, seed, alone=alone, moved=moved)

    def do_exchange_together(self, bench: int, frame: int, seed: int) -> Any:
        self.benches[bench].exchange_together(frame, seed)

    def do_stage(self, bench: int, frame: int, seed: int, renewed: bool) -> Any:
        pieces = self.benches[bench].stage(frame, seed, renewed)
        return [[offset, data.hex()] for offset, data in pieces]

    def do_check(self, bench: int, frame: int, outputs: Any, zones: bool, told: bool) -> Any:
        return to_json(self.benches[bench].check(frame, outputs, zones=zones, told=told))

    def do_recheck(self, bench: int, frame: int, outputs: Any) -> Any:
        return to_json(self.benches[bench].recheck(frame, outputs))

    def do_look(self, bench: int, outputs: Any) -> Any:
        return to_json(self.benches[bench].look({int(frame): leaves for frame, leaves in outputs.items()}))

    def do_smudge(self, bench: int, frame: int, outputs: Any, seed: int, count: int) -> Any:
        self.benches[bench].smudge(outputs, seed, count)

    def do_close(self, bench: int) -> Any:
        if bench in self.benches:
            self.benches.pop(bench).close()
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def do_rotation(self, target: Any, workload: str, frames: int, compiled: bool) -> Any:
        rotation = Rotation(self.subject(target), workload, frames)
        note = rotation.compile() if compiled else ""
        number = self._number()
        self.rotations[number] = rotation
        return {
            "rotation": number,
            "compile_note": note,
            "parties": rotation.parties,
            "generated": rotation.generated,
            "draw_s": rotation.draw_s,
        }

    def do_relocate(self, foreign: str, own: str, package: str, import_root: str) -> None:
        relocate(foreign, own, package, import_root)

    def do_version(self, target: Any) -> Any:
        version = self.version(target)
        return {**version.told(), "copies": installed_copies(version.target.root, version.target.import_root)}

    def do_open_version(self, target: Any, workload: str, frames: int, backward: bool) -> Any:
        rotation = VersionRotation(self.version(target), workload, frames, backward)
        number = self._number()
        self.rotations[number] = rotation
        return {"rotation": number, "prints": rotation.prints()}

    def do_give(self, rotation: int, path: str, wanted: list[str]) -> Any:
        return self._version_rotation(rotation).give(Path(path), frozenset(wanted))

    def do_take(self, rotation: int, path: str, places: Any) -> None:
        self._version_rotation(rotation).take(Path(path), places)

    def do_answer(self, rotation: int, path: str) -> Any:
        return self._version_rotation(rotation).answer(Path(path) if path else None)

    def do_disagreements(self, rotation: int, path: str) -> Any:
        return self._version_rotation(rotation).disagreements(Path(path))

    def do_prepare_version(self, rotation: int) -> None:
        self._version_rotation(rotation).prepare()

    def version(self, target: Any) -> Version:
        """The one version of a target that this process races."""
        record: Target = from_json(Target, target)
        if record.key not in self.versions:
            self.versions[record.key] = Version(record, self.device, self.python_paths)
        return self.versions[record.key]

    def _version_rotation(self, number: int) -> VersionRotation:
        found = self.rotations[number]
        assert isinstance(found, VersionRotation)
        return found

    def do_run_many(self, rotation: int, party: str, calls: int, fetched: bool = False) -> Any:
        self.rotations[rotation].run_many(party, calls, fetched=fetched)

    def do_hold_places(self, rotation: int, wanted: bool) -> Any:
        self.rotations[rotation].hold_places(wanted)

    def do_writing_ns(self, rotation: int, answers: int) -> Any:
        return self.rotations[rotation].writing_ns(answers)

    def do_time_events(
        self, rotation: int, party: str, samples: int, flush_bytes: int, probed: bool = False, warm: bool = True
    ) -> Any:
        return self.rotations[rotation].time_events(party, samples, flush_bytes, probed=probed, warm=warm)

    def do_redraw_sets(self, rotation: int, seed: int) -> Any:
        self.rotations[rotation].redraw(seed)

    def do_end_rotation(self, rotation: int) -> Any:
        self.rotations.pop(rotation, None)
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def do_ceilings(self) -> Any:
        return to_json(roofline.measure(self.device))

    def do_canary(self) -> Any:
        """A known answer from the device; raises where the device lost its mind."""
        total = float(torch.arange(1000, device=self.device, dtype=torch.float64).sum())
        if total != 499_500.0:
            raise DeviceError(f"{self.device} answered {total} where 499500 was due", remedy="check the device")

    def _number(self) -> int:
        self.next_number += 1
        return self.next_number


def _left(names: Iterable[str], fatal: Collection[str]) -> list[str]:
    """Variants but for those of a kind, or with a first word, that was ``fatal``."""
    words = {kind for kind in fatal if not kind.startswith(STRIDED)}
    return [name for name in names if kind_of(name) not in fatal and name.partition(" ")[0] not in words]


# -- facts -------------------------------------------------------------------------------------------------------


def target_facts(subject: Subject) -> TargetFacts:
    """Import, draw and run every workload once. Raises TargetError for whatever cannot be forged."""
    options = subject.options
    workloads = []
    for name in options.input_sets:
        counted, (leaves, tree, output) = _counted(functools.partial(subject.trial_run, name))
        _require_answer(subject, name, output)
        facts = workload_facts(subject, name, leaves, tree, output)
        writes = tuple(sorted(subject.mutates(name)))
        workloads.append(dataclasses.replace(facts, flops=counted[0], convolution_flops=counted[1], writes=writes))
    mode = options.mode if subject.target.kind != "kernelbench" else _mode_of(subject)
    module = describe_module(subject.module) if subject.module is not None else None
    read = {path for name in options.input_sets for path in subject.attributes_read(name)}
    return TargetFacts(
        target_id=subject.target.id,
        precision=options.precision,
        atol=options.atol,
        rtol=options.rtol,
        languages=options.languages or _LANGUAGES,
        min_speedup=options.min_speedup,
        allow=options.allow or _default_allow(subject),
        mode=mode,  # type: ignore[arg-type]
        grad=options.grad,
        dynamic=options.dynamic,
        strides=options.strides,
        distributions=options.distributions,
        index_outputs=options.index_outputs,
        nondeterministic=options.nondeterministic,
        module=module,
        workloads=tuple(workloads),
        attributes=_attributes(subject, module, read) if module is not None else (),
        buffers=_buffers(subject, read, mutated={path for workload in workloads for path in workload.writes}),
    )


def _attributes(subject: Subject, spec: Mapping[str, Any], read: Set[str]) -> tuple[tuple[str, Any], ...]:
    """The plain attributes that forward reads, with their values; not those that it changes, nor ``training``."""
    assert subject.module is not None
    after = describe_module(subject.module)
    found = []
    for path in sorted(read):
        with contextlib.suppress(KeyError):  # a tensor, a module, an object: no plain value
            value = attribute_in(dict(spec), path)
            if path.rpartition(".")[2] != "training" and same(attribute_in(after, path), value):
                found.append((path, value))
    return tuple(found)


def _buffers(subject: Subject, read: Set[str], mutated: Set[str]) -> tuple[tuple[str, Fingerprint], ...]:
    """The tensors that forward reads and no trial gives other values, with what they hold."""
    tensors = {path for path in read & subject.state().keys() if f"state/{path}" not in mutated}
    if not tensors:
        return ()
    kept = sorted(tensors & subject.never_redrawn())
    with subject.as_constructed():
        return tuple((path, fingerprint_of(subject.state()[path])) for path in kept)


def _default_allow(subject: Subject) -> tuple[str, ...]:
    """Nobody writes a whole network anew at once: fusing a part of it beside torch's operators is work, too."""
    modules = [] if subject.module is None else list(subject.module.modules())
    products = [module for module in modules if any(p.dim() > 1 for p in module.parameters(recurse=False))]
    return ("kernel", "mixed", "library") if len(products) >= _NETWORK_PRODUCTS else ("kernel",)


def _mode_of(subject: Subject) -> str:
    return "train" if subject.module is not None and subject.module.training else "eval"


def _counted(action: Callable[[], Any]) -> tuple[tuple[int, int], Any]:
    """FLOPs of products and convolutions together, and of convolutions alone, while ``action`` runs: torch's count."""
    counter = _flop_counter()(display=False)
    with counter:
        result = action()
    by_operator = counter.get_flop_counts().get("Global", {})
    convolutions = sum(flops for operator, flops in by_operator.items() if "conv" in str(operator))
    return (int(counter.get_total_flops()), int(convolutions)), result


@functools.lru_cache(maxsize=1)
def _flop_counter() -> Any:
    from torch.utils import flop_counter

    undisabled(getattr(flop_counter, "_FlopCounterMode", object))
    return flop_counter.FlopCounterMode


def _require_answer(subject: Subject, name: str, output: Any) -> None:
    """Tensors; or nothing, of what works in place alone."""
    outputs, _ = flatten_output(output)
    in_place = output is None and bool(subject.mutates(name))
    if not in_place and not any(isinstance(value, Tensor) for value in outputs.values()):
        raise TargetError(
            f"{subject.target.id}: workload {name!r} returns {type(output).__name__}, no tensor",
            expected="a tensor, or tensors in lists, tuples and dicts; or None of what writes its inputs or its state",
        )


def workload_facts(subject: Subject, name: str, leaves: Any, tree: Any, output: Any) -> WorkloadFacts:
    """Specs and sizes of one call, FLOPs not counted.

    Raises TargetError where the output holds anything but tensors and numbers.
    """
    outputs, output_tree = flatten_output(output)
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]
    return WorkloadFacts(
        name=name,
        inputs=_specs(leaves),
        input_tree=tree,
        outputs=_specs(outputs),
        output_tree=output_tree,
        input_bytes=sum(t.numel() * t.element_size() for t in tensors),
        state_bytes=sum(t.numel() * t.element_size() for t in subject.state().values()),
        output_bytes=sum(t.numel() * t.element_size() for t in outputs.values() if isinstance(t, Tensor)),
        flops=0,
        shared=subject.in_one_storage(outputs),
        unordered=subject.target.kind == "kernelbench",
    )


def _specs(leaves: dict[str, Any]) -> Any:
    return tuple((path, spec_of(leaf) if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves.items())


# -- the process -------------------------------------------------------------------------------------------------


def _receive(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _send(sock: socket.socket, value: Any, descriptor: int | None) -> None:
    data = json.dumps(value).encode()
    ancillary = []
    if descriptor is not None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    sock.sendmsg([_LENGTH.pack(len(data))], ancillary)
    sock.sendall(data)


def _answer(oracle: _Oracle, request: dict[str, Any]) -> tuple[Any, int | None]:
    try:
        data, descriptor = oracle.serve(request)
    except ForgeError as error:
        told = {"kind": type(error).__name__, "what": error.what, "expected": error.expected, "remedy": error.remedy}
        return {"error": told, "fatal": is_fatal(error)}, None
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        what = f"{NO_ROOM}: {str(error).splitlines()[0]}"
        return {
            "error": {"kind": "DeviceError", "what": what, "expected": "", "remedy": "use a smaller workload"}
        }, None
    except Exception as error:  # noqa: BLE001 - the outermost frame: the supervisor reports what happened
        what = f"the oracle failed at {request['op']}:\n{traceback.format_exc(limit=-6)}"
        told = {"kind": "OracleError", "what": what, "expected": "", "remedy": ""}
        return {"error": told, "fatal": is_fatal(error)}, None
    return {"data": data}, descriptor


def main() -> NoReturn:
    """Serve until the supervisor's end closes. ``argv``: descriptor, device, threads, then import paths."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    serve(sock, sys.argv[2], int(sys.argv[3]), tuple(sys.argv[4:]))


def serve(sock: socket.socket, device: str, threads: int, python_paths: tuple[str, ...]) -> NoReturn:
    """Answer requests on ``sock`` until its other end closes, and end this process."""
    torch.set_num_threads(threads)
    settle_vector_math(torch)
    if device != "cpu":
        torch.cuda.set_device(device)
    oracle = _Oracle(device, python_paths)
    while True:
        try:
            (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
            request = json.loads(_receive(sock, length))
        except (EOFError, ConnectionError):
            break
        data, descriptor = _answer(oracle, request)
        _send(sock, data, descriptor)
        if isinstance(data, dict) and data.get("fatal"):
            break  # a fresh process serves the next request
    # Skip interpreter teardown: CUDA and compile threads have nothing to save.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
