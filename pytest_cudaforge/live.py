"""The live table of a forging session on a real terminal. Imported only there: it needs rich."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pytest_cudaforge.display import event_line, money_text, speedup_text
from pytest_cudaforge.events import ForgeEvent

__all__ = ["LiveTable"]

#: Kinds that are also kept as a line above the table.
_KEPT = frozenset({"note", "stopping"})
_COLOURS = {"PASSED": "green", "forged": "bold green", "kept_reference": "green", "failed": "red", "error": "bold red"}
_REFRESHES_PER_S = 4
#: Lines of the terminal that the table's frame, its header and the line of the rest take.
_FRAME_LINES = 7


@dataclass
class _Line:
    """The state of one target in one language."""

    round: int = 0
    status: str = "waiting"
    best: float | None = None
    usd: float = 0.0
    done: bool = False
    touched: float = 0.0


class LiveTable:
    """An observer that redraws one table: target, round, status, best speedup, spent. Use as a context manager."""

    def __init__(self, console: Console, targets: Iterable[str], verbosity: int = 0) -> None:
        self._console = console
        self._verbosity = verbosity
        self._lines: dict[tuple[str, str], _Line] = {(target, ""): _Line() for target in targets}
        self._started = time.monotonic()
        self._live = Live(
            console=console,
            get_renderable=self.table,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_event(self, event: ForgeEvent) -> None:
        if event.kind in _KEPT or self._verbosity > 0:
            self._console.print(event_line(event), markup=False, highlight=False)
        if not event.target:
            return
        # The first event with a language takes over the line that stood for the target.
        waiting = self._lines.pop((event.target, ""), None) if event.language else None
        line = self._lines.setdefault((event.target, event.language), waiting or _Line())
        line.round = event.round or line.round
        line.status = event.status or event.kind
        line.best = event.best if event.best is not None else line.best
        line.usd = max(event.usd, line.usd)
        line.done = event.kind == "done"
        line.touched = time.monotonic()

    def table(self) -> Table:
        """The table as it stands: what is being worked on first; as many lines as the terminal has."""
        seconds = time.monotonic() - self._started
        spent = sum(line.usd for line in self._lines.values())
        done = sum(line.done for line in self._lines.values())
        title = f"forging {done}/{len(self._lines)}   {seconds // 60:.0f}:{seconds % 60:02.0f}   {money_text(spent)}"
        table = Table(title=title, title_justify="left", expand=False)
        table.add_column("target", overflow="fold")
        for name in ("round", "status", "best", "spent"):
            table.add_column(name, no_wrap=True, justify="left" if name == "status" else "right")
        ordered = sorted(self._lines.items(), key=lambda pair: (pair[1].done, -pair[1].touched))
        shown = ordered[: max(1, self._console.height - _FRAME_LINES)]
        for (target, language), line in shown:
            # Text, not markup: ids may hold brackets.
            label = Text(target + (f" [{language}]" if language else ""))
            status = Text(line.status, style=_COLOURS.get(line.status, ""))
            number = str(line.round) if line.round else ""
            table.add_row(label, number, status, speedup_text(line.best), money_text(line.usd))
        if len(ordered) > len(shown):
            table.add_row(f"... and {len(ordered) - len(shown)} more", "", "", "", "")
        return table
