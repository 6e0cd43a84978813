"""A configuration as a ModelNew. Its worker: tests/whole/test_whole_compiler_forging.py."""

from __future__ import annotations

import pytest
from flow_records import make_target

from pytest_cudaforge.evaluation.compiled_module import compiled_class, module_of
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.records import Candidate, Status
from pytest_cudaforge.runtime.configuration import FILE_NAME, LANGUAGE


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({FILE_NAME: '{"freezing": true}'}, "'freezing' is no option that may be chosen"),
        ({FILE_NAME: '{"cpp.threads": true}'}, "cpp.threads = True"),
        ({FILE_NAME: '{"cpp.threads": 1}', "more.py": "raise SystemExit"}, "one file, options.json"),
        ({"options.py": "import os"}, "one file, options.json"),
    ],
)
def test_what_is_no_configuration_is_refused_before_anything_runs(tmp_path, files, why):
    with pytest.raises(Refusal) as caught:
        module_of(Candidate.of(LANGUAGE, files), make_target(tmp_path), ())
    assert caught.value.status is Status.BUILD_ERROR
    assert why in caught.value.reason


def test_the_module_is_the_target_and_its_options_and_nothing_else(tmp_path):
    text = '{"cpp.threads": 1}\n'
    found = module_of(Candidate.of(LANGUAGE, {FILE_NAME: text}), make_target(tmp_path), ("src",))
    (source,) = [source for _, source in found.files]
    called: list[tuple[object, ...]] = []
    exec(source.replace("from pytest_cudaforge", "# "), {"compiled_class": lambda *args: called.append(args)})
    ((target, paths, options),) = called
    assert '"layers.py::scale"' in str(target) and (paths, options) == (("src",), text)


def test_its_constructor_calls_init_as_the_oracle_does(tmp_path):
    import json

    import torch

    from pytest_cudaforge.discovery import discover
    from pytest_cudaforge.evaluation.subject import Subject
    from pytest_cudaforge.records import to_json

    (tmp_path / "gained.py").write_text(
        "import torch\nfrom torch import nn\nfrom pytest_cudaforge import forge_target\nfrom gained_by import scaled\n"
        "@forge_target(inputs=lambda: [torch.randn(4)], init=lambda: [torch.Size([4]), float(torch.rand(1))])\n"
        "class Gain(nn.Module):\n    def __init__(self, size, gain):\n        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.randn(size))\n\n    def forward(self, x):\n"
        "        return scaled(x, self.weight)\n"
    )
    (tmp_path / "gained_by.py").write_text("def scaled(x, weight):\n    return x * weight\n")
    (target,) = discover([tmp_path / "gained.py"], tmp_path).targets
    subject = Subject(target, "cpu")
    assert subject.module is not None
    made = compiled_class(json.dumps(to_json(target)), (), "{}")()
    assert isinstance(made, type(subject.module))
    assert torch.equal(made.weight, subject.module.weight)
    assert list(dict(made.named_parameters())) == ["weight"]
