"""How much to propose, and who proposes it: the most tokens a second, by what was accepted and how long steps took.

    argmax over modes and a few sizes of  (1 + E[accepted](size)) / time(size)

so that where the link binds, and windows take no time, it is the largest one. Nothing here can change a token, has a
clock or knows of plans: times come from a cost function, corrected by what was measured. Two accounts bound what may be
lost, one to proposals that are not worth it, by the length of the text, one to finding out about others than the best.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise

from offload_runtime.core import DraftBudget
from offload_runtime.params import SamplingParams

# Proposals of a window: gamma of a chain, nodes of a tree. Finer steps would tell less than the noise of times.
SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

COPY = "copy"
# How often a mode's first proposal is accepted before anything is known: a draft is right three times of four, what
# followed the same tokens before half of the time, a single token one time of five, and many tokens nearly always.
_FIRST_RATES: Mapping[str, float] = {"chain": 0.75, "tree": 0.8, "ngram": 0.5, "unigram": 0.2, COPY: 0.9}
# That counts as much of a step: three without a hit settle it. What a size lets expect of the next one counts more.
_FIRST_WEIGHT, _NEXT_WEIGHT = 0.25, 4.0
# Steps that means look back on, while a mode is chosen and while it is not: texts change their nature.
_MEMORY, _IDLE_MEMORY = 24, 48
# Times of a size that its mean looks back on; one that is so much longer than expected may have captured a graph or
# waited for a reader: it counts as no more than that where there are enough others, else if the next one is as long.
_TIMES, _ENOUGH, _SUSPICIOUS = 16, 3, 1.5
# Of all time, what may be lost to proposals that are not worth it, and again to finding out about others than the best;
# what that may cost in plain steps before any time has passed.
_LOST_SHARE, _PROBING_SHARE, _FIRST_PROBING = 0.003, 0.003, 2.0
# Changes of the time of plain steps that leave what is expected of others: to expect it anew took 0.1 ms a step.
_NOISE = 0.002
# Plain steps that a text may lose at first, or so many if those before it have gained; the least and the most that
# earlier steps give credit for. Of what other texts have said so many steps count. Where a text could lose no more than
# those before it had left, a draft that is worth 2.8 x plain decoding brought 1.7 (13B, H200, copying behind code).
_FIRST_LOSS, _MOST_FIRST_LOSS, _LEAST_CREDIT, _MOST_CREDIT, _KNOWN_STEPS = 1.5, 2.5, -0.2, 8.0, 6.0
# The first loss is for so many tries.
_TRIES = 3
# How much better than it looks a mode may be after one step; less after more of them.
_OPTIMISM = 1.0
# So much better than plain decoding must be what replaces it: what is less is noise.
_MARGIN = 0.02
# What is not so many times as fast as plain decoding is only held against plain steps that were timed. Where trees took
# 10 % more than the figures of a machine say, 37 of the first 128 steps grew one of which nothing was accepted, since
# plain steps were thought to be as slow (simulated: the worst of 240 answers was 0.964 x plain, and is 0.988).
_CLEAR = 1.5
# Plain steps behind one that was found to be best before the same modes are looked at again: where that is beside a
# pass that was launched ahead the device is not idle. Where the host had to decide in between a 13B took 8.9 ms a token
# with a head that did not help, and plainly 7.1 (H200).
_REST = 3
# Tokens a step that proposals have brought in about so many, where they do well enough for each to be asked about.
_LITTLE_GAIN, _GAIN_MEMORY = 0.1, 16
# Contexts shorter than this take a pass equally long; beyond, every doubling is timed anew.
_SHORT_TOKENS = 1024


def _as_timed(choice: DraftBudget) -> DraftBudget:
    """Return a choice whose steps take as long: copies are n-grams."""
    return DraftBudget("ngram", choice.size) if choice.mode == COPY else choice


# Which of `SIZES` is the largest within one.
_index: Callable[[int], int] = cache(lambda size: bisect_right(SIZES, size) - 1)
# No proposals at all.
PLAIN = DraftBudget("plain", 0)

# Seconds to expect of a step of so many sequences of so many tokens each.
Cost = Callable[[DraftBudget, int, int], float]


def size_for(count: int) -> int:
    """Return the smallest of `SIZES` that is no less than `count`, or the largest of all."""
    return SIZES[min(bisect_left(SIZES, count), len(SIZES) - 1)]


def size_within(count: int) -> int:
    """Return the largest of `SIZES` that is no more than `count`."""
    return SIZES[_index(count)]


def guessed_cost(choice: DraftBudget, *, streamed: bool = False) -> float:
    """Return how many plain steps a step may take, where there are no figures of the machine.

    A draft's tokens cost, rows hardly do; where layers are streamed neither costs much.
    """
    per_proposal = {"chain": 0.042, "tree": 0.012}.get(choice.mode, 0.002)
    return 1 + (per_proposal / 10 if streamed else per_proposal) * choice.size


class AcceptanceModel:
    """Knows how many proposals of a mode the target accepts: rates by size, each an exponential mean with a prior.

    The first proposals of a window are those of a smaller one, so a window tells about all sizes up to its own, and the
    rate between two sizes is the prior of the next. A chain's rate is that of a proposal behind accepted ones; others
    are ordered by probability, which falls like 1 / number.

    Args:
        mode: As of `DraftBudget`.
    """

    def __init__(self, mode: str) -> None:
        self._first, self._in_a_row = _FIRST_RATES[mode], mode in ("chain", COPY)
        self._hits, self._trials = [0.0] * len(SIZES), [0.0] * len(SIZES)  # as they were when a step was last observed
        self._kept = 1.0  # the share of these that counts now
        self.steps = 0.0  # observed, decayed
        self.credit = _FIRST_LOSS  # plain steps that a text may lose to copies, and as many as they have brought tokens

    def observe(self, size: int, windows: Sequence[Sequence[int]]) -> None:
        """Note what came of windows of up to `size` proposals.

        Args:
            size: Proposals asked for; what was not proposed counts as rejected.
            windows: Of each sequence the numbers of those accepted, in the order in which they were proposed.
        """
        self.decay(_MEMORY)
        self._hits, self._trials = ([self._kept * one for one in counts] for counts in (self._hits, self._trials))
        self._kept = 1.0
        self.steps += 1
        for path in windows:
            tried = min(size, len(path) + 1) if self._in_a_row else size
            for step, (low, high) in enumerate(pairwise(SIZES[: _index(size) + 1])):
                self._trials[step] += max(0, min(high, tried) - low) / len(windows)
            for node in path:
                self._hits[_index(node)] += 1 / len(windows)

    def forget(self, steps: float) -> None:
        """Let what is known count as no more than so many steps."""
        if self.steps > steps:
            self._kept *= steps / self.steps
            self.steps = steps

    def decay(self, memory: int) -> None:
        """Let what is known of so many steps become older by one, of this mode or of another one."""
        if self.steps:
            kept = 1 - 1 / memory
            self.steps *= kept
            self._kept *= kept

    def curve(self, count: int = len(SIZES)) -> list[float]:
        """Return the accepted proposals to be expected of a window of each of the first `SIZES`."""
        rate, accepted, reached = self._first, 0.0, 1.0
        curve = [0.0]
        for step, (low, high) in enumerate(pairwise(SIZES[:count])):
            weight = _FIRST_WEIGHT if not step else _NEXT_WEIGHT * (1 if self._in_a_row else high - low)
            if step and not self._in_a_row:
                rate *= (SIZES[step - 1] + low + 1) / (low + high + 1)
            hits, trials = self._kept * self._hits[step], self._kept * self._trials[step]
            rate = min(1.0, (hits + weight * rate) / (trials + weight))
            if self._in_a_row:
                behind = reached * rate ** (high - low)
                accepted += (reached - behind) * rate / (1 - rate) if rate < 1 else reached * (high - low)
                reached = behind
            else:
                accepted += rate * (high - low)
            curve.append(accepted)
        return curve


class LatencyModel:
    """Knows the seconds of steps, from before anything is proposed until the target's tokens are on the host: what the
    cost function says, in the ratio that was measured.

    Args:
        cost: Times to expect; without figures of the machine only their proportions count.
        sure: Whether it comes from such figures, so that plain decoding need not be timed to hold others against it.
        before: Of other contexts, whose ratios count until there are own ones, and where plain decoding was timed so
            that once is enough here.

    Attributes:
        suspect: What is to be timed again.
    """

    def __init__(self, cost: Callable[[DraftBudget], float], *, sure: bool, before: LatencyModel | None = None) -> None:
        self._expect, self._before = cache(cost), before
        self._sure = sure or (before is not None and before.knows_plain)
        self._plain_times = 0 if sure else 1 if self._sure else 2  # that are needed to hold others against it
        self._ratios: dict[DraftBudget, tuple[float, int]] = {}  # the mean, and how many it is of
        self.suspect: DraftBudget | None = None
        self._curves: dict[str, list[float]] = {}
        self._plain_ratio = 0.0  # that the curves were made with
        self._plain_s: float | None = None

    def observe(self, choice: DraftBudget, seconds: float) -> None:
        """Note how long a step took."""
        choice = _as_timed(choice)
        usual_s, (ratio, count) = self.seconds(choice), self._ratios.get(choice, (0.0, 0))
        suspicious, suspect = seconds > _SUSPICIOUS * usual_s and (self._sure or bool(self._ratios)), self.suspect
        self.suspect = None
        if suspicious and count >= _ENOUGH:
            seconds = _SUSPICIOUS * usual_s
        elif suspicious and suspect != choice:
            self.suspect = choice
            return
        count = min(count + 1, _TIMES)
        self._plain_s = None
        self._ratios[choice] = ratio, _ = ratio + (seconds / self._expect(choice) - ratio) / count, count
        if choice != PLAIN:
            self._curves.pop(choice.mode, None)
        elif abs(ratio - self._plain_ratio) > _NOISE * ratio:
            self._plain_ratio = ratio
            self._curves.clear()

    @property
    def knows_plain(self) -> bool:
        """Return whether others can be held against plain decoding; a single time of it may be an exception."""
        return self._ratios.get(PLAIN, (0.0, 0))[1] >= self._plain_times

    @property
    def has_timed_plain(self) -> bool:
        """Return whether plain decoding was timed often enough for small differences to it to count."""
        return self._ratios.get(PLAIN, (0.0, 0))[1] >= _ENOUGH

    def knows(self, mode: str) -> bool:
        """Return whether times of a mode are more than a guess."""
        return self._sure or any(choice.mode == _as_timed(DraftBudget(mode, 1)).mode for choice in self._ratios)

    @property
    def plain_s(self) -> float:
        """Return the seconds of plain decoding: no more than anything else takes."""
        if self._plain_s is None:
            measured = (ratio * self._expect(one) for one, (ratio, _) in self._ratios.items())
            self._plain_s = min([self.seconds(PLAIN), *measured])
        return self._plain_s

    def seconds(self, choice: DraftBudget) -> float:
        """Return the seconds to be expected."""
        return self._expect(choice) * self.ratio(_as_timed(choice))

    def curve(self, mode: str, count: int) -> list[float]:
        """Return the seconds of windows of each of the first `SIZES`, and perhaps of further ones."""
        mode = _as_timed(DraftBudget(mode, 1)).mode
        curve = self._curves.setdefault(mode, [])
        curve += [self.seconds(DraftBudget(mode, size) if size else PLAIN) for size in SIZES[len(curve) : count]]
        return curve

    def ratio(self, choice: DraftBudget) -> float:
        """Return the ratio of what was measured to what was expected: a choice's own, and those of other sizes of its
        mode the more the nearer they are."""
        at, total, weights = _index(choice.size), 0.0, 0.0
        for other, (ratio, count) in self._ratios.items():
            if other.mode in (choice.mode, PLAIN.mode):
                weight = count if other == choice else 0.5 ** abs(_index(other.size) - at)
                total, weights = total + weight * ratio, weights + weight
        if weights:
            return total / weights
        if self._ratios:  # of nothing like it
            return min(ratio for ratio, _ in self._ratios.values())
        return 1.0 if self._before is None else self._before.ratio(choice)


@dataclass(frozen=True)
class _Standing:
    """Compares a choice with plain decoding: its speed, how long it takes, and the speed that it may turn out to
    have."""

    choice: DraftBudget
    speed: float
    cost: float
    upper_bound: float


@dataclass
class _Rest:
    """Says of which modes plain decoding was last found to be best, by which times, and for how many steps that is not
    asked again; and whether the pass of the last one was launched ahead."""

    latency: LatencyModel | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    left: int = 0
    launched: bool = False

    def begin(self, latency: LatencyModel, limits: Mapping[str, int]) -> None:
        """Rest."""
        self.latency, self.limits, self.left = latency, limits, _REST

    def end(self) -> None:
        """Note that something may be better than plain decoding."""
        self.latency, self.left = None, 0


class _Account:
    """Holds what is known of texts that are sampled in one way, and what may be lost to finding out more."""

    def __init__(self, modes: Collection[str]) -> None:
        self.models = {mode: AcceptanceModel(mode) for mode in modes}
        self._credits: dict[LatencyModel, float] = {}
        self._newest = _FIRST_LOSS
        self.probing = _FIRST_PROBING  # against the best
        self.rest = _Rest()
        self.overlooked: set[str] = set()  # modes that steps tell about which propose nothing, so that no other need
        self.gain = 0.0  # tokens more than plain steps would have brought in the time, a step of late

    def credit(self, latency: LatencyModel) -> float:
        """Return how many plain steps may be lost against plain decoding. Where there were no steps of such a length
        yet it is what others have earned, and no debt: what short passes have lost, long ones would take long to earn.
        """
        return self._credits.get(latency, max(_FIRST_LOSS, self._newest))

    def begin(self) -> None:
        """Begin a text, which may lose as much as the first one, whatever those before it have lost."""
        self._newest = max(_FIRST_LOSS, min(self._newest, _MOST_FIRST_LOSS))
        self.gain = 0.0
        self._credits.clear()

    def earn(self, latency: LatencyModel, tokens: float, cost: float) -> None:
        """Note that a step of so many plain ones brought so many tokens."""
        self.gain += (tokens - cost - self.gain) / _GAIN_MEMORY
        credit = self.credit(latency) + tokens - (1 - _LOST_SHARE) * cost
        self._newest = self._credits[latency] = max(_LEAST_CREDIT, min(credit, _MOST_CREDIT))


# Ways to choose tokens that are told apart: those who ask a server may send any.
_MOST_ACCOUNTS = 64


class Controller:
    """Chooses for all texts of a runtime, and learns from what came of it.

    Args:
        modes: All that there can ever be.
        cost: Seconds of steps by the figures of the machine; None where it is not known.
        streamed: Whether a pass brings anything over the link.
    """

    def __init__(self, modes: Collection[str], cost: Cost | None = None, *, streamed: bool = False) -> None:
        self._cost = cost or (lambda choice, *_: guessed_cost(choice, streamed=streamed))
        self._sure = cost is not None
        # By how tokens are chosen, but for the noise.
        self._accounts = lru_cache(_MOST_ACCOUNTS)(lambda _: _Account(modes))
        self._latencies: dict[tuple[int, int], LatencyModel] = {}

    def begin(self, sampling: SamplingParams) -> None:
        """Begin a text: none of those before it says whether it copies itself."""
        account = self._account(sampling)
        account.rest.end()
        account.begin()
        for model in account.models.values():
            model.forget(_KNOWN_STEPS)
        if COPY in account.models:
            account.models[COPY] = AcceptanceModel(COPY)

    def choose(
        self, sampling: SamplingParams, limits: Mapping[str, int], *, num_sequences: int = 1, context_tokens: int = 0,
        launched: bool = False,
    ) -> DraftBudget:  # fmt: skip
        """Return what the next step had better propose.

        Args:
            sampling: How tokens are chosen; the seed does not matter.
            limits: The modes that have something to propose, each with its largest window.
            num_sequences: How many take part.
            context_tokens: The tokens of the longest.
            launched: Whether a plain pass of the next step is running already.
        """
        account = self._account(sampling)
        latency = self._latency(num_sequences, context_tokens)
        rest = account.rest
        rest.launched = launched
        if rest.latency is not latency or latency.suspect is not None or not limits.keys() <= rest.limits.keys():
            rest.end()
        if launched or rest.left:
            rest.left = max(0, rest.left - 1)
            return PLAIN
        if not latency.knows_plain:
            return PLAIN
        if (suspect := latency.suspect) is not None and suspect.size <= limits.get(suspect.mode, 0):
            return suspect
        if COPY in limits and not account.models[COPY].steps:  # however long windows took in other texts
            first = self._best_of(COPY, limits[COPY], account, latency).choice
            return first if first.size else DraftBudget(COPY, 1)
        choice, loss = self._best(limits, account, latency)
        if choice == PLAIN:
            rest.begin(latency, limits)
        else:
            rest.end()
            account.probing -= loss
        return choice

    def _best(self, limits: Mapping[str, int], account: _Account, latency: LatencyModel) -> tuple[DraftBudget, float]:
        """Return what had better be proposed by modes of these largest windows, and the plain steps that it may lose
        against what looks best."""
        windows = [self._best_of(mode, largest, account, latency) for mode, largest in limits.items()]
        found = [_Standing(PLAIN, 1.0, 1.0, 1.0), *windows]
        best = max(found, key=lambda one: one.speed if one.choice == PLAIN else one.speed - _MARGIN)
        if best.speed < _CLEAR and not latency.has_timed_plain:
            return PLAIN, 0.0
        other = max(found, key=lambda one: one.speed if one is best else one.upper_bound)
        loss = max(0.0, 1 - other.speed / best.speed) * other.cost
        # What looks best comes first: it tells about the others, too. Trying a chain and n-grams before a tree that
        # cost nothing took 3 of 22 passes of a 13B over an emulated link, 10 % of the speed (H200).
        mode = best.choice.mode
        untried = best.choice != PLAIN and latency.knows(mode) and not account.models[mode].steps
        if other is best or untried or loss > account.probing:
            return best.choice, 0.0
        return other.choice, loss

    def rests(self, sampling: SamplingParams) -> bool:
        """Return whether the next step may be plain, whatever there is to propose then, if that makes it faster."""
        account = self._account(sampling)
        rest, latency = account.rest, account.rest.latency
        if not rest.left and rest.launched and latency is not None:
            limits = {mode: most for mode, most in rest.limits.items() if mode not in account.overlooked}
            if self._best(limits, account, latency)[0] == PLAIN:
                rest.begin(latency, rest.limits)
            else:
                rest.end()
        return rest.left > 0 and account.gain < _LITTLE_GAIN

    def overlooked(self, sampling: SamplingParams, mode: str, hits: Sequence[bool]) -> None:
        """Learn from a step that proposed nothing what a mode that costs nothing would have proposed first.

        Args:
            sampling: How tokens were chosen.
            mode: The mode.
            hits: Of each sequence for which it has something whether that would have been accepted.
        """
        account = self._account(sampling)
        if mode not in account.models:
            return
        account.overlooked.add(mode)
        account.models[mode].observe(1, [[0] if hit else [] for hit in hits])
        rest = account.rest
        if any(hits) and rest.latency is not None:  # what has matched once is likely to go on
            most = max(rest.limits.values(), default=1)
            if self._best({mode: most}, account, rest.latency)[0] != PLAIN:
                rest.end()

    def _best_of(self, mode: str, largest: int, account: _Account, latency: LatencyModel) -> _Standing:
        """Return the best window of a mode, of those that may be lost."""
        model, count = account.models[mode], _index(largest) + 1
        gains, times, plain_s = model.curve(count), latency.curve(mode, count), latency.plain_s
        # Where times are no more than a guess, the first one tells most if it is of the smallest window.
        credit = model.credit if mode == COPY else account.credit(latency)
        allowed = credit / max(1.0, _TRIES - model.steps) if latency.knows(mode) else -1.0
        best = _Standing(PLAIN, 0.0, 1.0, 0.0)
        optimism = 1 + _OPTIMISM * (model.steps + 0.1) ** -0.5
        for step in range(1, count):
            cost = times[step] / plain_s
            speed = (1 + gains[step]) / cost
            # A draft whose smallest window is dear may lose at once what is meant for some tries.
            if cost - 1 <= (credit if step == 1 else allowed) and speed > best.speed:
                bound = speed if mode in account.overlooked else speed * optimism
                best = _Standing(DraftBudget(mode, SIZES[step]), speed, cost, bound)
        return best

    def observe(
        self, sampling: SamplingParams, choice: DraftBudget, windows: Sequence[Sequence[int]], *, tokens: float,
        seconds: float | None = None, num_sequences: int = 1, context_tokens: int = 0,
    ) -> None:  # fmt: skip
        """Learn from a step. Arguments as of `choose`, and:

        Args:
            choice: What was asked for.
            windows: Of the sequences whose windows could be as large as that, the numbers of the accepted proposals.
            tokens: New ones of a sequence, on average.
            seconds: The step's; None where its windows could not be as large as that.
        """
        account, latency = self._account(sampling), self._latency(num_sequences, context_tokens)
        usual_s = latency.seconds(choice)
        if seconds is not None:
            latency.observe(choice, seconds)
            usual_s = min(seconds, _SUSPICIOUS * latency.seconds(choice))
        for mode, model in account.models.items():
            if mode != choice.mode:
                model.decay(_IDLE_MEMORY)
            elif windows:
                model.observe(choice.size, windows)
        cost = 1.0 if choice == PLAIN else max(1.0, usual_s / latency.plain_s)
        if choice.mode == COPY:
            copies = account.models[COPY]
            earned = tokens - 1 if any(windows) else 1 - cost
            copies.credit = min(copies.credit + earned, _MOST_CREDIT)
        account.earn(latency, tokens, cost)
        account.probing = min(account.probing + _PROBING_SHARE * cost, _MOST_CREDIT)

    def _account(self, sampling: SamplingParams) -> _Account:
        """Return the account of requests that choose their tokens so."""
        return self._accounts(sampling.without_noise)

    def _latency(self, num_sequences: int, context_tokens: int) -> LatencyModel:
        """Return the times of steps about so many sequences, the longest of which has so many tokens; it begins with
        what was measured of the nearest length."""
        octave = (context_tokens // _SHORT_TOKENS).bit_length()
        key = num_sequences, octave
        if key not in self._latencies:
            timed = {length: model for (number, length), model in self._latencies.items() if number == num_sequences}
            before = timed[min(timed, key=lambda length: abs(length - octave))] if timed else None
            tokens = _SHORT_TOKENS * 3 << octave >> 2  # a length in the middle of an octave
            self._latencies[key] = LatencyModel(
                lambda choice: self._cost(choice, num_sequences, tokens), sure=self._sure, before=before
            )
        return self._latencies[key]
