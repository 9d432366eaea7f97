"""Who proposes, and how much, chosen round by round: the most tokens a second, by what was measured so far.

Pure arithmetic without a clock. All costs are in plain rounds (one pass of the target, one token), so that they compare
from one context length to the next. Nothing here can change a token: the target's samples are the output in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload_runtime.speculation.round_times import RoundTimes
from offload_runtime.speculation.window_gains import Gains
from offload_runtime.speculation.window_sizes import PLAIN, SIZES, Choice, steps_within

# Of all time, what may be lost to proposals that are not worth it, and again to finding out about others than the best.
_LOST_SHARE = 0.005
_PROBING_SHARE = 0.005
# Plain rounds that may be lost before any time has passed, and the most that earlier gains give credit for.
_FIRST_LOSS = 0.4
_MOST_CREDIT = 4.0
# A single round that took exceptionally long may not keep proposals off for longer than this lasts.
_LEAST_CREDIT = -0.2
# The same of finding out; against plain decoding this is lost too only as far as that allows.
_MOST_PROBING = 3.0
# Of it, what is kept for looking at other families than the best.
_FOR_OTHERS = 1.0
# So much better than plain decoding must be what replaces it: what is less is noise.
_MARGIN = 0.02
# So much better than a tree must look what it tells about, or there is nothing to find out.
_WORTH_A_TRY = 0.1
# Rounds of a family before its figures are believed, and more while they might still turn out the best.
_TRIED, _WELL_TRIED = 3, 12
# Rounds until what lost is looked at again, each time twice as many up to a limit.
_LOSER_ROUNDS, _MOST_LOSER_ROUNDS = 16, 128
# At least so many where it is far behind: looking costs most of a round, and a short answer has hardly more than 20.
_FAR_BEHIND_ROUNDS = 48
# How much better than it looks something may be after one round; less after more of them.
_LUCK = 1.5
# The same for the sizes next to the best one: while little is known, and later.
_NEIGHBOUR_ROUNDS, _LATER_NEIGHBOUR_ROUNDS, _LITTLE_KNOWN = 6, 32, 64
# Rounds that a choice stands once a while has been played: choosing costs the host time.
_STANDING_ROUNDS = 4

# By family how often the first proposal is expected to be accepted before anything is known, and whether proposals
# stand behind each other: a draft is right three times of four, what followed the same tokens before half of the time,
# and what followed a single token one time of five.
_AT_FIRST: Mapping[str, tuple[float, bool]] = {
    "chain": (0.75, True), "tree": (0.8, False), "ngram": (0.5, True), "unigram": (0.2, True)
}  # fmt: skip


def _new_gains(family: str, largest: int) -> Gains:
    """Of a family about which nothing is known yet, in windows of up to `largest` proposals."""
    first, in_depth = _AT_FIRST[family]
    return Gains(largest, first=first, in_depth=in_depth)


@dataclass
class _Revisits:
    """When something other than the best is played again."""

    due: int
    interval: int


@dataclass(frozen=True)
class _Standing:
    """A choice in plain rounds: how long it takes and how many tokens it brings."""

    choice: Choice
    cost: float
    tokens: float

    @property
    def advantage(self) -> float:
        """Speed as a multiple of plain decoding's."""
        return self.tokens / self.cost


_PLAIN_STANDING = _Standing(PLAIN, 1.0, 1.0)


class Chooser:
    """Chooses for texts that are sampled in one way, and learns from what is played.

    What is played is mostly the choice that is best by the figures. Others are looked at while little is known, and
    then ever more seldom, within an allowance. Besides, an account is kept against plain decoding: where proposals have
    lost more than they may, plain rounds are played until they are affordable again, whatever the figures promise.

    Args:
        largest: By family, the largest window that there can be.
    """

    def __init__(self, largest: Mapping[str, int]) -> None:
        self._gains = {family: _new_gains(family, size) for family, size in largest.items()}
        self._round = 0
        self._credit = _FIRST_LOSS  # what may be lost against plain decoding
        self._probing = _MOST_PROBING  # what may be lost against the best
        self._revisits: dict[str, _Revisits] = {}
        self._neighbour_due = _NEIGHBOUR_ROUNDS
        self._upwards = True
        self._best = _PLAIN_STANDING
        self._last = PLAIN
        self._standing: tuple[tuple[tuple[str, int], ...], int] | None = None  # where, and until which round

    def choose(self, times: RoundTimes, limits: Mapping[str, int]) -> Choice:
        """How to play the next round.

        Args:
            times: Of rounds like this one.
            limits: The families that have something to propose, each with its largest window.
        """
        if self._last.size <= limits.get(self._last.family, 0) and times.doubts(self._last):
            return self._last
        key = tuple(limits.items())
        if self._standing is not None and (self._standing[0], self._round < self._standing[1]) == (key, True):
            return self._best.choice
        standings = {
            family: found
            for family, largest in limits.items()
            if (found := self._best_of(family, times, largest, self._credit)) is not None
        }
        before, self._best = self._best, self._settled(standings)
        if self._best.choice != before.choice and self._round < _LITTLE_KNOWN:
            self._neighbour_due = min(self._neighbour_due, self._round + 1)
        # What was never played may take longer than expected.
        stands = self._round >= _LITTLE_KNOWN and (self._best.choice == PLAIN or times.has_played(self._best.choice))
        self._standing = (key, self._round + _STANDING_ROUNDS) if stands else None
        if not times.knows_plain:
            return PLAIN  # what all others are held against
        other = self._opening(times, limits, standings) or self._probe(times, limits, standings)
        if other is not None:
            self._standing = None
        return other or self._best.choice

    def learn(
        self, times: RoundTimes, choice: Choice, windows: Sequence[Sequence[int]], *, tokens: float,
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        """A round was played.

        Args:
            times: Of rounds like this one, which learn too.
            choice: What was asked for.
            windows: Of the sequences whose windows could be as large as that, the numbers of the accepted proposals.
            tokens: New ones of a sequence, on average.
            seconds: The round's; None where its windows could not be as large as that.
        """
        if seconds is not None:
            times.observe(choice, seconds)
        if choice != PLAIN and windows:
            self._gains[choice.family].observe(choice.size, windows, number=self._round)
        self._round += 1
        self._last = choice
        cost = 1.0 if choice == PLAIN else times.cost(choice, seconds)
        credit = self._credit + tokens - cost + _LOST_SHARE * cost
        self._credit = max(_LEAST_CREDIT, min(credit, _MOST_CREDIT))
        self._probing = min(self._probing + _PROBING_SHARE * cost, _MOST_PROBING)

    def _best_of(self, family: str, times: RoundTimes, largest: int, loss: float) -> _Standing | None:
        """The best window of a family of which no more than `loss` plain rounds are lost if nothing is accepted."""
        curve, gains = times.curve(family, largest), self._gains[family].curve()
        standings = [
            _Standing(Choice(family, size), seconds / curve[0], 1 + gained)
            for size, seconds, gained in zip(SIZES[1 : steps_within(largest) + 1], curve[1:], gains[1:], strict=False)
            if seconds / curve[0] - 1 <= loss
        ]
        return max(standings, key=lambda standing: standing.advantage, default=None)

    def _settled(self, standings: Mapping[str, _Standing]) -> _Standing:
        """The best of what has been tried and can be afforded."""
        best = _PLAIN_STANDING
        for family, standing in standings.items():
            least = 1 + _MARGIN if best is _PLAIN_STANDING else best.advantage
            if self._gains[family].num_rounds >= _TRIED and standing.advantage > least:
                best = standing
        for name in (PLAIN.family, *standings):
            if name == best.choice.family:
                self._revisits.pop(name, None)
            else:
                self._revisits.setdefault(name, _Revisits(self._round + _LOSER_ROUNDS, _LOSER_ROUNDS))
        return best

    def _opening(
        self, times: RoundTimes, limits: Mapping[str, int], standings: Mapping[str, _Standing]
    ) -> Choice | None:
        """A family that has hardly been tried, at a size whose failure is affordable."""
        families = list(limits)
        if times.is_sure:  # the most promising first: it tells about others
            families.sort(key=lambda family: -standings[family].advantage if family in standings else 0.0)
        for family in families:
            rounds = self._gains[family].num_rounds
            if rounds < _TRIED:
                found = self._best_of(family, times, limits[family], self._credit / _TRIED)
                found = found or self._best_of(family, times, 1, self._credit)
                if found is not None and self._could_win(found, rounds):
                    # Where costs are no more than a guess, the first time tells most if it is of the smallest window.
                    return found.choice if rounds or times.is_sure else Choice(family, 1)
            elif rounds < _WELL_TRIED and family in standings and family != self._best.choice.family:
                standing = standings[family]
                if self._best.advantage > 1 and not self._is_far_behind(standing, rounds) and self._pay(standing):
                    return standing.choice
        return None

    def _probe(self, times: RoundTimes, limits: Mapping[str, int], standings: Mapping[str, _Standing]) -> Choice | None:
        """Something other than the best, where it is due and the allowance suffices."""
        due = [name for name, revisits in self._revisits.items() if self._round >= revisits.due]
        due = [name for name in due if name == PLAIN.family or name in limits]
        for name in due:
            found: _Standing | None = _PLAIN_STANDING
            if name != PLAIN.family:
                found = self._best_of(name, times, limits[name], min(self._credit, self._probing))
            revisits = self._revisits[name]
            if found is not None and revisits.interval < _FAR_BEHIND_ROUNDS and self._is_far_behind(found, _TRIED):
                revisits.interval = _FAR_BEHIND_ROUNDS
                revisits.due = self._round + revisits.interval - _LOSER_ROUNDS
            elif found is not None and self._pay(found):
                revisits.interval = min(2 * revisits.interval, _MOST_LOSER_ROUNDS)
                revisits.due = self._round + revisits.interval
                return found.choice
        if self._best.choice == PLAIN or self._round < self._neighbour_due or self._probing < _FOR_OTHERS:
            return None
        found = self._neighbour(times, limits)
        if found is None or not self._pay(found):
            return None
        little = self._round < _LITTLE_KNOWN
        self._neighbour_due = self._round + (_NEIGHBOUR_ROUNDS if little else _LATER_NEIGHBOUR_ROUNDS)
        return found.choice

    def _is_far_behind(self, standing: _Standing, rounds: int) -> bool:
        """Whether it is worse than the best even if it was unlucky in so many rounds."""
        return standing.advantage * (1 + _LUCK * rounds**-0.5) <= self._best.advantage

    def _could_win(self, standing: _Standing, rounds: int) -> bool:
        """Whether this, played in so many rounds, might turn out better than the best so far.

        A tree tells about others too: what n-grams propose is among its nodes, so that alone they can only be cheaper,
        and its first node is a chain's, which tells more than a first chain or two that were unlucky.
        """
        best, family = self._best, standing.choice.family
        behind = rounds > 0 and self._is_far_behind(standing, rounds)
        if best.choice.family != "tree" or family not in ("chain", "ngram"):
            return not behind
        tokens = best.tokens
        if family == "chain":
            rate = self._gains["tree"].first_rate
            tokens = sum(rate**depth for depth in range(standing.choice.size + 1))
        promising = tokens / standing.cost > (1 + _WORTH_A_TRY) * best.advantage
        if family == "chain" and rounds:
            return promising or not behind
        return promising and not behind

    def _neighbour(self, times: RoundTimes, limits: Mapping[str, int]) -> _Standing | None:
        """The next size above or below the best, in turns; None where there is none."""
        self._upwards = not self._upwards
        family, at = self._best.choice.family, steps_within(self._best.choice.size)
        to = at + 1 if self._upwards else at - 1
        if not 0 < to <= steps_within(limits[family]):
            return None
        curve = times.curve(family, SIZES[to])
        return _Standing(Choice(family, SIZES[to]), curve[to] / curve[0], 1 + self._gains[family].curve()[to])

    def _pay(self, standing: _Standing) -> bool:
        """Take what playing this in place of the best is expected to lose out of the allowance, if it suffices."""
        loss = max(0.0, standing.cost - standing.tokens / self._best.advantage)
        if loss > self._probing:
            return False
        self._probing -= loss
        return True
