"""Every exception this package raises, on one screen.

ForgeError                      anything below; its message says what, what was expected, what to do
├── UsageError                  the caller asked for something that cannot be (exit status 2)
│   ├── ConfigError             cudaforge.yaml, environment or option is wrong
│   └── TargetError             this target cannot be forged: inputs raise, the reference fails, ...
│       └── StaleEntry          a kernel's target, workload or torch is not the one it was verified with
├── SituationError              the machine or a service is not as needed (exit status 2)
│   ├── ToolchainError          no compiler, NVRTC or header
│   ├── DeviceError             no device, device lost or unhealthy
│   ├── SandboxError            a child process could not be isolated or started
│   ├── OracleError             the trusted child died or broke its protocol
│   ├── ProviderError           an LLM provider refused, failed or answered garbage
│   ├── ReplyPending            the `command` provider has no reply yet (exit status 75); not a failure
│   ├── BudgetExhausted         a cap of rounds, minutes or USD would be passed
│   ├── StoreError              the run directory cannot be read or written
│   └── PublishError            files, manifest or branch could not be written
└── CandidateError              the candidate's own fault: data for the loop, never fatal to a run
    ├── PlanError               plan.py broke a rule of the format (has .line)
    │   ├── PlanSyntaxError     outside the Python subset
    │   └── PlanLimitError      step, launch, size or byte cap
    ├── Unsupported             plan.py said `raise Unsupported("...")` for this signature
    ├── BuildFailure            the compiler refused the source (has .log)
    ├── LaunchFailure           arguments, limits or the launch itself were refused
    ├── ReplyError              a reply is not in the agreed form: one repair round, then a failed round
    └── WorkerFailure           the candidate's process did not answer as it should (has .phase)
        ├── WorkerCrash         it died; .signal names the signal ("SIGSEGV") or is ""
        ├── WorkerTimeout       no answer within the limit; its whole group was killed
        └── WorkerProtocol      its answer was malformed
"""

from __future__ import annotations

__all__ = [
    "BudgetExhausted",
    "BuildFailure",
    "CandidateError",
    "ConfigError",
    "DeviceError",
    "ForgeError",
    "LaunchFailure",
    "OracleError",
    "PlanError",
    "PlanLimitError",
    "PlanSyntaxError",
    "ProviderError",
    "PublishError",
    "ReplyError",
    "ReplyPending",
    "SandboxError",
    "SituationError",
    "StaleEntry",
    "StoreError",
    "TargetError",
    "ToolchainError",
    "Unsupported",
    "UsageError",
    "WorkerCrash",
    "WorkerFailure",
    "WorkerProtocol",
    "WorkerTimeout",
]


class ForgeError(Exception):
    """Base of all. ``ForgeError(what, expected=..., remedy=...)`` renders as one readable text."""

    def __init__(self, what: str, *, expected: str = "", remedy: str = "") -> None:
        self.what = what
        self.expected = expected
        self.remedy = remedy
        parts = [what]
        if expected:
            parts.append(f"expected: {expected}")
        if remedy:
            parts.append(f"to do: {remedy}")
        super().__init__("\n  ".join(parts))


class UsageError(ForgeError): ...


class ConfigError(UsageError): ...


class TargetError(UsageError): ...


class StaleEntry(TargetError): ...


class SituationError(ForgeError): ...


class ToolchainError(SituationError): ...


class DeviceError(SituationError): ...


class SandboxError(SituationError): ...


class OracleError(SituationError): ...


class ProviderError(SituationError): ...


class ReplyPending(SituationError): ...


class BudgetExhausted(SituationError): ...


class StoreError(SituationError): ...


class PublishError(SituationError): ...


class CandidateError(ForgeError): ...


class PlanError(CandidateError):
    """``line`` is the 1-based line of plan.py, or None where no line is to blame."""

    def __init__(self, what: str, *, line: int | None = None, expected: str = "", remedy: str = "") -> None:
        self.line = line
        where = f"plan.py:{line}: " if line is not None else ""
        # An error rebuilt from its own data (it crosses a process boundary) already says where.
        super().__init__(what if what.startswith(where) else where + what, expected=expected, remedy=remedy)


class PlanSyntaxError(PlanError): ...


class PlanLimitError(PlanError): ...


class Unsupported(CandidateError): ...


class BuildFailure(CandidateError):
    """``log`` is the compiler's output, cut to the lines about the candidate's own files."""

    def __init__(self, what: str, *, log: str = "", expected: str = "", remedy: str = "") -> None:
        self.log = log
        super().__init__(what, expected=expected, remedy=remedy)


class LaunchFailure(CandidateError): ...


class WorkerFailure(CandidateError):
    """``phase`` is the last phase the supervisor had begun, e.g. "run main"."""

    def __init__(self, what: str, *, phase: str = "", expected: str = "", remedy: str = "") -> None:
        self.phase = phase
        super().__init__(what, expected=expected, remedy=remedy)


class WorkerCrash(WorkerFailure):
    """``signal`` is the signal's name, or "" where the process exited; ``status`` is then its exit status."""

    def __init__(self, what: str, *, phase: str = "", signal: str = "", status: int | None = None) -> None:
        self.signal = signal
        self.status = status
        super().__init__(what, phase=phase)


class WorkerTimeout(WorkerFailure):
    """``limit_s`` is the time the supervisor allowed."""

    def __init__(self, what: str, *, phase: str = "", limit_s: float = 0.0) -> None:
        self.limit_s = limit_s
        super().__init__(what, phase=phase)


class WorkerProtocol(WorkerFailure): ...


class ReplyError(CandidateError): ...
