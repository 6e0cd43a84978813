"""Are new values as fast as values it has seen? A kernel that remembers answers is fast on nothing else.

Timed calls rotate over a few buffer sets, so a kernel may keep the answers to those and rest: in static memory, by
the inputs' address, a sample or a hash of them. Correctness does not show it, since it computes whenever something
it looked at has changed. What shows it is time: one pass over every buffer set right after all values were drawn
anew, against one pass after the very same values were drawn and written once more. Both passes find the same caches
and the same sleeping threads, and what a pass costs besides its calls cancels in their difference; only a kernel with
a memory takes them differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = [
    "CHARGED_ABOVE",
    "EVENT_SLACK_NS",
    "REFUSED_ABOVE",
    "SINGLE_REFUSED_ABOVE",
    "SINGLE_SLACK_NS",
    "Round",
    "doubtful_above",
    "lag_of",
    "pass_share_ns",
    "play_rounds",
    "single_of",
    "undisturbed",
]

#: New values may cost this many times what seen ones do before the difference is charged to the kernel's time:
#: branches learnt by heart and the noise of one short pass lie below.
CHARGED_ABOVE = 1.25
#: ... and before it is refused. Nothing but remembered answers explains that much in every round.
REFUSED_ABOVE = 2.0
#: What a pass may cost beside its calls and the fetching of their answers: a request, threads that wake up.
_PASS_NS = 500_000.0
#: A call may take so many times longer in a pass, whose inputs are in no cache, than among repeated ones.
SINGLE_REFUSED_ABOVE = 3.0
#: ... on a GPU so many ns beside CHARGED_ABOVE before the difference is charged: what the host's side of a call and of
#: fetching its answer takes more in a pass.
SINGLE_SLACK_NS = 6_000.0
#: ... by device events: the first visit after another process had the device finds its page tables cold. (Honest
#: kernels of 10 and of 68 us took 0.98 to 1.00 times as long in a pass on an H200.)
EVENT_SLACK_NS = 2_000.0
#: What others may take of a pass that they did not disturb, and how many such rounds say enough by themselves.
_QUIET, _QUIET_ROUNDS = 0.1, 2
#: Only a suspicious kernel is asked again, each round drawing every buffer set anew. An honest one whose passes differ
#: by noise alone looks suspicious in all of them once in 2**8 times at most.
MAX_ROUNDS = 8


@dataclass(frozen=True)
class Round:
    """ns per call of one pass over values drawn anew, and of one over the same values written once more.

    ``new_foreign``, ``seen_foreign``: the share of each pass that others took (see :mod:`.pressure`).
    """

    new_ns: float
    seen_ns: float
    new_foreign: float = 0.0
    seen_foreign: float = 0.0

    def undisturbed(self) -> Round:
        """Both passes without what others took of them: what is suspicious here, too, is not others' fault. Nobody is
        cleared by it, for a kernel's own threads may have kept each other waiting."""
        return Round(self.new_ns * max(0.0, 1 - self.new_foreign), self.seen_ns * max(0.0, 1 - self.seen_foreign))


def undisturbed(rounds: Sequence[Round]) -> list[Round]:
    """What is to be held against a kernel where others were busy: rounds without what those took. Where there are some
    in which they took next to nothing, these alone: one in which they took nearly all says nothing, for or against."""
    quiet = [r for r in rounds if max(r.new_foreign, r.seen_foreign) <= _QUIET]
    return [found.undisturbed() for found in (quiet if len(quiet) >= _QUIET_ROUNDS else rounds)]


def lag_of(rounds: Sequence[Round], call_ns: float) -> float:
    """How many times ``call_ns``, the time of a repeated call, a call on new values takes. 1.0 within noise.

    The smallest difference of all rounds counts: whatever disturbs a pass is gone in another round, a memory is not.
    """
    extra_ns = min((r.new_ns - r.seen_ns for r in rounds), default=0.0)
    lag = 1.0 + max(0.0, extra_ns) / max(call_ns, 1.0)
    return lag if lag > CHARGED_ABOVE else 1.0


def single_of(rounds: Sequence[Round], call_ns: float, spare_ns: float) -> float:
    """How many times ``call_ns`` a call takes in a pass over new values; 1.0 and less within noise. ``spare_ns`` of it
    are not the kernel's (:func:`pass_share_ns`; 0 by device events, which see nothing but the call).

    A kernel may do its work on the first visits after a change only, so that both passes of a round take long, and a
    module's own host code could skip calls of a long run whose answers nobody fetches. In a pass neither can rest. One
    that remembers answers may do without them in some passes, drawn by lot, so that no round differs: new values take
    their time all the same, and no pass over others says anything for it.
    """
    return (min(r.new_ns for r in rounds) - spare_ns) / max(call_ns, 1.0)


def doubtful_above(limit: float, slack_ns: float, call_ns: float) -> float:
    """From which value of :func:`single_of` on more rounds are played, and what is still there at the end is charged.
    ``slack_ns``: what a call may take more in a pass by no doing of the kernel's."""
    return min(limit, CHARGED_ABOVE + slack_ns / max(call_ns, 1.0))


def pass_share_ns(calls: int) -> float:
    """A call's share of what a pass of ``calls`` costs besides them."""
    return _PASS_NS / calls


def play_rounds(play: Callable[[], Round], call_ns: float) -> tuple[Round, ...]:
    """One round, and more of them as long as all were suspicious."""
    rounds = [play()]
    while len(rounds) < MAX_ROUNDS and lag_of(rounds, call_ns) > 1.0:
        rounds.append(play())
    return tuple(rounds)
