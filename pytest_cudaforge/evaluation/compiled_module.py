"""A compiler configuration as a ModelNew: the target itself, compiled with options.

So it passes through the very verification and the very clock that a ModelNew does, in a worker of its own. No code of a
candidate's runs there: the options are data that :mod:`runtime.configuration` has checked, the rest is the repo's
reference and torch's compiler. That is why this worker, unlike any other, is denied no more than the oracle is (it
imports the target, and starts compilers), and why what one configuration compiled may serve the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.records import Candidate, Isolation, Status, Target, from_json, to_json
from pytest_cudaforge.runtime import configuration

__all__ = ["OWN_INIT", "UNCONFINED", "compiled_class", "module_of"]

#: What its constructor is given: nothing (as :mod:`.initial` writes that), and any seed.
OWN_INIT = {"init": [{"tuple": []}, {"dict": []}], "seed": 0}

UNCONFINED = Isolation("C", ("its worker runs the reference and torch's compiler, and no code of a candidate's",))

_SOURCE = """\
from pytest_cudaforge.evaluation.compiled_module import compiled_class

ModelNew = compiled_class({target!r}, {python_paths!r}, {options!r})
"""


def module_of(candidate: Candidate, target: Target, python_paths: Sequence[str]) -> Candidate:
    """The module candidate that stands for a configuration. Raises Refusal where its file is not what it should be."""
    if [name for name, _ in candidate.files] != [configuration.FILE_NAME]:
        raise Refusal(Status.BUILD_ERROR, f"a compiler configuration is one file, {configuration.FILE_NAME}")
    text = candidate.file(configuration.FILE_NAME)
    try:
        configuration.parse(text)
    except BuildFailure as error:
        raise Refusal(Status.BUILD_ERROR, str(error)) from error
    record = json.dumps(to_json(target))
    source = _SOURCE.format(target=record, python_paths=tuple(python_paths), options=text)
    return Candidate.of("module", {"compiled.py": source})


def compiled_class(target: str, python_paths: tuple[str, ...], options: str) -> type:
    """A subclass of the target's class (or a module around its function) whose forward is the compiled one.

    Its constructor takes no arguments: it calls the target's ``init``, as the oracle does. In the worker only.
    """
    from pytest_cudaforge.evaluation.importing import imported
    from pytest_cudaforge.evaluation.subject import INIT_SEED, seed_generators
    from pytest_cudaforge.runtime.signature import split_init

    record: Target = from_json(Target, json.loads(target))
    reference, declared = imported(record, python_paths)
    is_class = isinstance(reference, type)
    run = configuration.compiled(reference.forward if is_class else reference, configuration.parse(options))
    if not is_class:
        return _class_around(run)

    def construct(self: Any) -> None:
        args, kwargs = split_init(declared.init() if declared.init is not None else None)
        seed_generators(INIT_SEED)  # as the oracle: after the arguments, which may have drawn numbers
        reference.__init__(self, *args, **kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    return type("ModelNew", (reference,), {"__init__": construct, "forward": forward})


def _class_around(run: Any) -> type:
    import torch

    class ModelNew(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

    return ModelNew
