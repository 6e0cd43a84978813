"""A kernel's folder as it is published: the sources that were verified, their verdict, and what is told about them.

Sources, entry and verdict are the verify job's. How the kernel came to be is known to the machine that forged it alone,
which ran candidate code: its trace is read, and told through :mod:`pytest_cudaforge.report`, which takes all text for
hostile. The verify job's own ``report.md`` is not used, so that no text reaches a pull request without that.
"""

from __future__ import annotations

import dataclasses

from cudaforge_action.branch import Kernel
from cudaforge_action.records import ForgedKernel, VerifiedKernel
from cudaforge_action.shards import Verified
from pytest_cudaforge.publishing import PICTURE
from pytest_cudaforge.records import Evaluation, Trace
from pytest_cudaforge.report import markdown, pictures
from pytest_cudaforge.report.markdown import escape

__all__ = ["NONSENSE", "Origin", "kernel_of"]

#: What a repo is asked to carry for one kernel's story.
_MOST_REPORT_CHARS = 400_000
_MOST_PICTURE_CHARS = 400_000
_MOST_PROMPTS = 40
#: What numbers and names that nobody checked can do to arithmetic and formatting: a division by a time of 0, an integer
#: of ten thousand digits, a round that refers to none.
NONSENSE = (ArithmeticError, ValueError, LookupError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a forge job tells of a kernel, and on which machine."""

    kernel: ForgedKernel
    trace: Trace
    machine: str = ""


def kernel_of(verified: Verified, kernel: VerifiedKernel, origin: Origin | None) -> Kernel:
    """The kernel with its whole folder. ``kernel`` has an entry and a verdict that passed; ``origin``: None where the
    forge job's part is lost, which costs the story."""
    assert kernel.entry is not None and kernel.evaluation is not None
    read = verified.files[kernel.entry.directory]
    files = {file.name: read[file.name] for file in kernel.entry.files}
    files["evaluation.json"] = read["evaluation.json"]
    provenance = _provenance(verified, kernel, origin)
    report, picture = _told(kernel, kernel.evaluation, origin)
    files["report.md"] = f"{report}\n{provenance}".encode("utf-8", "replace")
    if picture:
        files[PICTURE] = picture.encode("utf-8", "replace")
    return Kernel(kernel.entry, files)


def _told(kernel: VerifiedKernel, final: Evaluation, origin: Origin | None) -> tuple[str, str]:
    """Report and picture: with the whole story, or as much of it as can be told."""
    plain = Trace(kernel.target, kernel.language, "forged", "verified from source", final=final)
    if origin is not None:
        told = dataclasses.replace(origin.trace, target=kernel.target, language=kernel.language, final=final)
        try:
            picture = _picture(told)
            report = markdown.report(told, picture=PICTURE if picture else "")
            if len(report) <= _MOST_REPORT_CHARS:
                return report, picture
        except NONSENSE:
            pass
        plain = dataclasses.replace(plain, notes=("the story of its making could not be told",))
    try:
        return markdown.report(plain), ""
    except NONSENSE:
        return f"# {escape(kernel.target)} ({escape(kernel.language)})\n", ""


def _picture(trace: Trace) -> str:
    found = pictures.summary(trace)
    drawn = found.standalone() if found is not None else ""
    return drawn if len(drawn) <= _MOST_PICTURE_CHARS else ""


def _provenance(verified: Verified, kernel: VerifiedKernel, origin: Origin | None) -> str:
    lines = [
        ("target's source", f"sha256 {kernel.source_digest[:16]}"),
        ("kernel", f"sha256 {kernel.digest[:16]}"),
        ("verified on", verified.shard.machine),
        ("at commit", verified.shard.commit[:12]),
    ]
    if origin is not None:
        prompts = [digest[:12] for digest in origin.kernel.prompts]
        lines += [
            ("forged on", origin.machine),
            ("models", ", ".join(dict.fromkeys(origin.kernel.models))),
            ("prompts", ", ".join(prompts[:_MOST_PROMPTS]) + (", …" if len(prompts) > _MOST_PROMPTS else "")),
        ]
    return "## Provenance\n\n" + "\n".join(f"- {name}: {escape(text[:1000])}" for name, text in lines if text) + "\n"
