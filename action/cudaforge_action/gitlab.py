"""GitLab CI as a host: folded sections, a code quality report for remarks, a dotenv report for outputs.

What becomes of the files in ``folder`` is said in ``.gitlab-ci.yml`` (``artifacts: reports: junit, codequality,
dotenv``): https://docs.gitlab.com/ci/yaml/artifacts_reports/. A dotenv report sets any variable of the jobs that need
this one: none should be taken from a job that runs code of others by a job that holds a token.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cudaforge_action.context import gitlab_context
from cudaforge_action.host import FOLDER
from cudaforge_action.plain import PlainHost
from cudaforge_action.records import Annotation
from pytest_cudaforge.report.escaping import one_line, plain

__all__ = ["CODE_QUALITY", "DOTENV", "GitLabHost"]

CODE_QUALITY = "code-quality.json"
DOTENV = "outputs.env"

_SEVERITY = {"error": "critical", "warning": "major", "notice": "info"}
# A dotenv report takes 5 KB and 20 variables, each of one line; one that holds more fails the job. The rest is in
# outputs.json only.
_MAX_DOTENV_BYTES = 5000
_MAX_DOTENV_VALUES = 20
_MAX_DOTENV_VALUE = 500


class GitLabHost(PlainHost):
    """A job of a pipeline."""

    def __init__(self, environ: Mapping[str, str], folder: Path = FOLDER, *, goes_on: bool = False) -> None:
        super().__init__(folder, gitlab_context(environ), goes_on=goes_on)
        self._remarks: list[Annotation] = []
        self._dotenv: dict[str, str] = {}
        self._sections = 0
        for name, value in list(self._outputs.items()):
            self._keep(name, value)

    def annotate(self, annotations: Sequence[Annotation]) -> None:
        super().annotate(annotations)
        self._remarks += annotations
        # A remark without a place has none in the change either.
        seen: Counter[str] = Counter()
        remarks = [_remark(one, seen) for one in self._remarks if one.path]
        self.write(CODE_QUALITY, json.dumps(remarks, indent=1) + "\n")

    def output(self, name: str, value: str) -> None:
        """As ``FORGE_<NAME>`` to the jobs that need this one: ``CUDAFORGE_`` begins settings of pytest_cudaforge."""
        super().output(name, value)
        self._keep(name, value)
        self.write(DOTENV, _lines(self._dotenv))

    def _keep(self, name: str, value: str) -> None:
        variable = "FORGE_" + re.sub(r"[^A-Z0-9_]", "_", name.upper())
        if value.isascii() and value.isprintable() and len(value) <= _MAX_DOTENV_VALUE:
            wanted = self._dotenv | {variable: value.strip()}
            if len(wanted) <= _MAX_DOTENV_VALUES and len(_lines(wanted)) <= _MAX_DOTENV_BYTES:
                self._dotenv = wanted

    @contextmanager
    def group(self, title: str) -> Iterator[None]:
        """https://docs.gitlab.com/ci/jobs/job_logs/#custom-collapsible-sections."""
        self._sections += 1
        name = f"cudaforge_{self._sections}"
        self._log(f"\x1b[0Ksection_start:{int(time.time())}:{name}\r\x1b[0K{one_line(plain(title), 500)}\n")
        try:
            yield
        finally:
            self._log(f"\x1b[0Ksection_end:{int(time.time())}:{name}\r\x1b[0K\n")

    def _log(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _lines(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())


def _remark(one: Annotation, seen: Counter[str]) -> dict[str, Any]:
    """https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format."""
    told = f"{one.title}: {one.message}" if one.title else one.message
    # GitLab tells new remarks from known ones by this: it has no figures and lines in it, which differ at each run.
    known = f"{one.level}\0{one.path}\0{one.title}"
    seen[known] += 1
    return {
        "description": plain(told)[:4000],
        "check_name": "cudaforge",
        "fingerprint": hashlib.sha256(f"{known}\0{seen[known]}".encode("utf-8", "replace")).hexdigest(),
        "severity": _SEVERITY[one.level],
        "location": {"path": plain(one.path), "lines": {"begin": max(1, one.line)}},
    }
