"""Many targets at once: model calls, builds and device time overlap; one budget, one Ctrl-C, one result.

``forge_all`` is synchronous and runs the event loop; evaluations run in threads (the device lease is inside the
Evaluator). Ctrl-C once: no new step begins, calls under way are awaited and stored, the best so far is selected and
published. Twice: everything is dropped at once; what was finished is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaforge import chat, compiler, strategies
from pytest_cudaforge.budget import Caps, Ledger
from pytest_cudaforge.chat import ChatModel, Role, prices
from pytest_cudaforge.chat.record import Recorder
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import ConfigError, ForgeError
from pytest_cudaforge.events import ForgeEvent, Observer, Silent
from pytest_cudaforge.exchange import Price, StopSignal
from pytest_cudaforge.languages import DEVICE_LANGUAGES, LANGUAGES
from pytest_cudaforge.loop import Evaluates, ForgeContext, forge
from pytest_cudaforge.publishing import Commit, Published, check_branch, commit_branch, publish, refusal
from pytest_cudaforge.records import DeviceFacts, Target, Trace
from pytest_cudaforge.report.rows import Totals, totals
from pytest_cudaforge.store import RunStore, total_usage
from pytest_cudaforge.strategies import Limits

__all__ = ["ForgeEvent", "Models", "Observer", "SessionOptions", "SessionResult", "forge_all", "languages_for"]

#: Outcomes after which ``-x`` stops the session.
FAILURES = ("failed", "error")


@dataclass(frozen=True)
class Models:
    """Who plays the two roles; by default :func:`load_models` reads them from the configuration."""

    coder: ChatModel
    judge: ChatModel


@dataclass(frozen=True)
class SessionOptions:
    """What the command line says about one run, beyond the configuration.

    ``record``: file for the conversation (``--forge-record``). ``branch``: commit winners there (``--forge-branch``).
    ``stop_after_failure``: pytest's ``-x``. ``publish``: write winners to ``forge_dir``. ``lock_wait_s``: how long to
    wait for another run on the same target.
    """

    fresh: bool = False
    record: Path | None = None
    branch: str | None = None
    stop_after_failure: bool = False
    publish: bool = True
    lock_wait_s: float = 600.0


@dataclass(frozen=True)
class SessionResult:
    """Traces in the order of targets; ``usage`` is what all of them cost, ``spent_usd`` what *this* run paid."""

    traces: tuple[Trace, ...]
    totals: Totals
    spent_usd: float
    unpriced_calls: int
    seconds: float
    interrupted: bool = False
    commit: Commit | None = None
    notes: tuple[str, ...] = ()


def forge_all(
    targets: Sequence[Target],
    config: ForgeConfig,
    evaluator: Evaluates,
    observer: Observer | None = None,
    *,
    options: SessionOptions | None = None,
    models: Models | None = None,
) -> SessionResult:
    """Forge every target in every language that fits the device. Runs its own event loop.

    What goes wrong with one target is in its trace; raised are only wrong settings (``ConfigError``), a branch that
    cannot be written (``PublishError``, before the first call) and ``KeyboardInterrupt`` for the second Ctrl-C.
    """
    session = _Session(config, evaluator, observer or Silent(), options or SessionOptions(), models)
    return session.run(targets)


def load_models(config: ForgeConfig, evaluator: object) -> Models:
    """Coder and Judge of the configuration; a ``command``'s processes are stopped while a block is timed."""
    lease = getattr(evaluator, "lease", None)
    coder = chat.load(config, "coder", lease)
    if config.chat.coder.provider == compiler.LANGUAGE:
        return Models(coder, coder)  # whoever was to be the Judge: there is nothing to ask
    return Models(coder, chat.load(config, "judge", lease))


def languages_for(config: ForgeConfig, device: DeviceFacts) -> tuple[str, ...]:
    """The languages to forge in on this device. Raises :class:`ConfigError` where the configured ones do not fit it."""
    if config.chat.coder.provider == compiler.LANGUAGE:
        return (compiler.LANGUAGE,)
    native = "cuda" if device.kind == "cuda" else "cpp"
    if config.languages is None:
        return (native,)
    fitting = DEVICE_LANGUAGES if device.kind == "cuda" else ("cpp",)
    chosen = tuple(name for name in config.languages if name in fitting or name not in LANGUAGES)
    if not chosen:
        raise ConfigError(
            f"languages: {', '.join(config.languages)} cannot run on {device.name}",
            expected=" or ".join(fitting),
            remedy="choose another device with --forge-device, or change languages",
        )
    return chosen


class _Session:
    """One run: what its targets share."""

    def __init__(
        self,
        config: ForgeConfig,
        evaluator: Evaluates,
        observer: Observer,
        options: SessionOptions,
        models: Models | None,
    ) -> None:
        self.config = config
        self.evaluator = evaluator
        self.observer = observer
        self.options = options
        self.models = models or load_models(config, evaluator)
        if options.branch is not None:
            check_branch(config.root, options.branch)
        self.strategy = strategies.load(config.strategy)
        self.languages = languages_for(config, evaluator.device)
        self.price = price_of(config)
        self.stop = StopSignal()
        self.published: list[Published] = []
        self.ledger = Ledger(
            Caps(config.max_usd_per_target, config.max_usd, config.max_minutes_per_target, config.max_minutes)
        )
        self.executor = ThreadPoolExecutor(max_workers=config.concurrency, thread_name_prefix="cudaforge")

    def run(self, targets: Sequence[Target]) -> SessionResult:
        finished = False
        try:
            traces = asyncio.run(self._forge_targets(targets))
            finished = True
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            # After an abort the threads are inside evaluations whose children close() kills; do not wait for them here.
            self.executor.shutdown(wait=finished, cancel_futures=True)
            if not finished:
                _abort(self.evaluator)
        return self._result(traces)

    async def _forge_targets(self, targets: Sequence[Target]) -> list[Trace]:
        slots = asyncio.Semaphore(self.config.concurrency)
        work = [(target, language) for target in targets for language in self.languages]
        with _interrupts(self._first_interrupt, _cancel_of_current_task()):
            tasks = [asyncio.create_task(self._forge_one(slots, *item)) for item in work]
            try:
                return list(await asyncio.gather(*tasks))
            except asyncio.CancelledError:
                await asyncio.gather(*tasks, return_exceptions=True)
                raise

    async def _forge_one(self, slots: asyncio.Semaphore, target: Target, language: str) -> Trace:
        async with slots:
            if self.stop.reason:
                return Trace(target.id, language, "cancelled", self.stop.reason)
            trace = self._publish(target, await forge(target, self._context(target, language)))
        if self.options.stop_after_failure and trace.outcome in FAILURES:
            self._stop(f"-x: {target.id} failed")
        return trace

    def _publish(self, target: Target, trace: Trace) -> Trace:
        if trace.outcome != "forged" or trace.final is None or not self.options.publish:
            return trace
        reason = refusal(trace.final)
        if reason:
            return dataclasses.replace(trace, notes=(*trace.notes, f"{reason}; {trace.final.isolation.remedy}"))
        try:
            item = publish(
                trace,
                target,
                self.evaluator.facts(target),
                self.config.forge_dir,
                builds=getattr(self.evaluator, "builds", None),
            )
        except ForgeError as error:
            note = "the winner is kept in the run directory and published by the next run"
            return dataclasses.replace(trace, outcome="error", reason=str(error), notes=(*trace.notes, note))
        self.published.append(item)
        return dataclasses.replace(trace, files=tuple(_shown(path, self.config.root) for path in item.files))

    def _context(self, target: Target, language: str) -> ForgeContext:
        config, options = self.config, self.options
        return ForgeContext(
            language=language,
            evaluator=self.evaluator,
            coder=self.models.coder,
            judge=self.models.judge,
            strategy=self.strategy,
            limits=limits_of(config),
            store=RunStore(config.run_dir).target(target, language),
            ledger=self.ledger,
            observer=self.observer,
            executor=self.executor,
            config_digest=config_digest(config),
            fresh=options.fresh,
            min_headroom=config.min_headroom,
            lock_wait_s=options.lock_wait_s,
            allow=config.allow,
            price=self.price,
            stop=self.stop,
            recorder=Recorder(options.record) if options.record is not None else None,
            profile=config.profile,
        )

    # -- stopping --------------------------------------------------------------------------------------------------

    def _first_interrupt(self) -> None:
        self._stop("stopped by Ctrl-C", "; calls under way are awaited and stored, Ctrl-C again drops them")

    def _stop(self, reason: str, detail: str = "") -> None:
        self.stop.request(reason)
        self.observer.on_event(ForgeEvent("", "stopping", text=reason + detail))

    # -- the result ------------------------------------------------------------------------------------------------

    def _result(self, traces: Sequence[Trace]) -> SessionResult:
        seconds = time.monotonic() - self.ledger.started_s
        commit = self._commit()
        usage = total_usage([trace.usage for trace in traces])
        return SessionResult(
            traces=tuple(traces),
            totals=totals(traces, usage, seconds),
            spent_usd=self.ledger.usd,
            unpriced_calls=self.ledger.unpriced_calls,
            seconds=seconds,
            interrupted="Ctrl-C" in self.stop.reason,
            commit=commit,
            notes=self._notes(),
        )

    def _commit(self) -> Commit | None:
        if self.options.branch is None or not self.published:
            return None
        names = ", ".join(sorted({item.entry.qualname for item in self.published}))
        return commit_branch(self.config.root, self.options.branch, self.published, f"perf: forge {names}")

    def _notes(self) -> tuple[str, ...]:
        if not self.ledger.unpriced_calls:
            return self.config.notes
        capped = self.config.max_usd is not None or self.config.max_usd_per_target is not None
        text = f"the price of {self.ledger.unpriced_calls} call(s) is not known: only tokens are counted"
        return (text + ("; max_usd could not be kept for them" if capped else ""),)


def limits_of(config: ForgeConfig) -> Limits:
    """What the configuration says to a strategy."""
    return Limits(rounds=config.rounds, patience=config.patience, roofline_stop=config.roofline_stop)


def config_digest(config: ForgeConfig) -> str:
    """sha256 over the settings that shape a conversation; where files lie and what it may cost do not."""
    shaping = ("rounds", "patience", "roofline_stop", "strategy", "allow", "trials", "languages")
    data: dict[str, Any] = {name: getattr(config, name) for name in shaping}
    for role, settings in (("coder", config.chat.coder), ("judge", config.chat.judge)):
        data[role] = [settings.provider, settings.model, settings.base_url, settings.temperature, dict(settings.extra)]
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def price_of(config: ForgeConfig) -> Price:
    """The most that a call may cost, from the price table; None for providers that bill elsewhere or not at all."""
    table = prices.load(config.prices)

    def price(role: Role, input_tokens: int) -> float | None:
        settings = config.chat.coder if role == "coder" else config.chat.judge
        if settings.provider != "openai":
            return None
        return table.reserve_usd(settings.model, input_tokens, settings.max_output_tokens)

    return price


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _abort(evaluator: object) -> None:
    close: Callable[[], None] | None = getattr(evaluator, "close", None)
    if close is not None:
        close()


def _cancel_of_current_task() -> Callable[[], None]:
    task = asyncio.current_task()

    def cancel() -> None:
        if task is not None:
            task.cancel()

    return cancel


@contextlib.contextmanager
def _interrupts(first: Callable[[], None], second: Callable[[], None]) -> Iterator[None]:
    """SIGINT calls ``first``, then ``second``; what was installed before comes back at the end.

    By the loop's own handler: it has a descriptor to be woken by, so a signal that comes just before the loop goes to
    sleep is not left lying until the next one, which would count as one with it. Outside the main thread signals
    cannot be caught, and are somebody else's business.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, steps = asyncio.get_running_loop(), [second, first]

    def on_signal() -> None:
        if steps:
            steps.pop()()

    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
