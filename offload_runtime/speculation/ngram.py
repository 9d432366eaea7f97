"""Guesses from the context itself: what followed earlier occurrences of its own ending (prompt lookup)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch

from offload_runtime.core import DraftBudget, TokenTree
from offload_runtime.params import SamplingParams
from offload_runtime.speculation.controller import COPY
from offload_runtime.speculation.step import Acceptance, Budgets, Drafter, Texts

NGRAM, UNIGRAM = "ngram", "unigram"
# Endings that are looked up, in tokens, and earlier occurrences of each that are looked at, however many there are.
# Where the longest occurred before a copy is worth a trial in any text.
_SIZES = (8, 3, 2, 1)
_MOST_OCCURRENCES = 32
# Where more proposals are not worth the time that they take, those less probable than this are left out.
LEAST_CHANCE = math.log(1e-3)
# Matches are never certain, nor is it that they fail.
_LEAST_RATE, _MOST_RATE = 0.01, 0.995
# Matches of so many tokens, and up to as many as the next, come true alike; as in source code, to begin with, which is
# believed like so many observations.
_MATCHED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_RATES_AT_FIRST = (0.2, 0.42, 0.5, 0.6, 0.7, 0.77, 0.84, 0.88, 0.92, 0.96, 0.98, 0.99)
_TRUST = 20
LONGEST_MATCH = _MATCHED[-1]  # longer ones are worth no more
# Tokens of plain steps that a head observes together: its pass over them takes the host 1 ms, however many they are.
MOST_PENDING_TOKENS = 256
# Observations that a running mean looks back on: texts change their nature.
_MEMORY = 200


@dataclass(frozen=True)
class Guesses:
    """Holds a tree, and of each node the log-probability that it follows its parent and no sibling before it does."""

    tree: TokenTree
    log_probabilities: Sequence[float]


@dataclass(slots=True, eq=False)
class _Candidate:
    """Is what may become a node, with its log-probabilities from the text's end on and given its parent, and the
    continuations that say so, by match and start, the longest match first."""

    chance: float
    given: float
    parent: int
    token: int
    depth: int
    starts: Sequence[tuple[int, int]]

    def __lt__(self, other: _Candidate) -> bool:
        return self.chance > other.chance


class MatchRates:
    """Says how often what followed an earlier occurrence of a text's ending follows again, by the tokens that match.

    Where one token matches it is one time in five, where a hundred do nearly always. Each class of lengths has a
    running mean: in JSON trees of 32 nodes then give 3.37 tokens a pass, where rates that stay those of code give 2.88,
    in prose 1.61 for 1.57, in code the same (SmolLM2's tokenizer, texts of 5000 tokens).
    """

    def __init__(self) -> None:
        self._rates = list(_RATES_AT_FIRST)
        self._observed = [_TRUST] * len(self._rates)
        self._logs = [(math.log(rate), math.log1p(-rate)) for rate in self._rates]

    def observe(self, matched: int, hit: bool) -> None:
        """Note whether what followed a match of so many tokens, at least one, has come true."""
        at = bisect_right(_MATCHED, matched) - 1
        self._observed[at] = min(self._observed[at] + 1, _MEMORY)
        rate = self._rates[at] + (hit - self._rates[at]) / self._observed[at]
        rate = self._rates[at] = min(max(rate, _LEAST_RATE), _MOST_RATE)
        self._logs[at] = math.log(rate), math.log1p(-rate)

    def logs(self, matched: int) -> tuple[float, float]:
        """Return the log-probabilities that what followed so many tokens follows again and that it does not."""
        return self._logs[bisect_right(_MATCHED, matched) - 1]


class NgramLookup:
    """Does prompt lookup in one sequence (Saxena, "Prompt Lookup Decoding", 2023), as a tree: what followed every
    earlier occurrence of the sequence's ending, the more probable the more of it matches.

    An index of all n-grams grows with the sequence, so a lookup does not search.

    Args:
        rates: What matches are worth; learns from what comes true.
    """

    def __init__(self, rates: MatchRates | None = None) -> None:
        self.rates = rates or MatchRates()
        self._tokens: list[int] = []
        # Of every n-gram the indices of the tokens that followed it, ascending.
        self._followers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._guess: tuple[int, int, int] | None = None  # the best one's start and match, and where it would be

    def chain(self, tokens: Sequence[int], count: int) -> TokenTree:
        """Return what followed the longest match, the latest of several: `count` tokens, or none where nothing matches.

        Args:
            tokens: As for `catch_up`.
            count: Past the end of the text the guess repeats itself, as text that loops does.
        """
        starts = self._starts(tokens)
        if not starts:
            return TokenTree()
        _, start = starts[0]
        return TokenTree.chain([self._continued(start, offset) for offset in range(count)], NGRAM)

    def tree(self, tokens: Sequence[int], depth: int, nodes: int, *, least: float = -math.inf) -> Guesses:
        """Return the most probable continuations that the text has seen, merged, the most probable nodes first.

        Args:
            tokens: As for `catch_up`.
            depth: Most tokens in a row; a continuation that reaches the end of the text repeats itself.
            nodes: Most tokens in all.
            least: Log-probability that they all have, from the text's end on.
        """
        made: list[_Candidate] = []
        waiting: list[_Candidate] = []
        self._look_behind(_Candidate(0.0, 0.0, -1, -1, 0, self._starts(tokens)), -1, waiting)  # the text's end
        while waiting and len(made) < nodes and waiting[0].chance >= least:
            made.append(heappop(waiting))
            if made[-1].depth < depth:
                self._look_behind(made[-1], len(made) - 1, waiting)
        tokens, parents = tuple(node.token for node in made), tuple(node.parent for node in made)
        return Guesses(TokenTree(tokens, parents, (NGRAM,) * len(made)), [node.given for node in made])

    def _look_behind(self, node: _Candidate, number: int, waiting: list[_Candidate]) -> None:
        """Let what follows a node take part: all continuations that have come to it go on, and of those that say the
        same the longest match tells how probable it is."""
        continued: dict[int, list[tuple[int, int]]] = {}
        for matched, start in node.starts:
            continued.setdefault(self._continued(start, node.depth), []).append((matched, start))
        others = 0.0
        for token, behind in continued.items():
            comes, fails = self.rates.logs(behind[0][0] + node.depth)
            given = others + comes
            others += fails
            heappush(waiting, _Candidate(node.chance + given, given, number, token, node.depth + 1, behind))

    def longest(self) -> int:
        """Return how many tokens of the ending of what is known occurred before, up to the largest size of an n-gram;
        0 where its last token is new."""
        return next((size for size in _SIZES if self._occurrences(size)), 0)

    def latest(self, size: int) -> int:
        """Return what followed the newest earlier occurrence of the ending of this size."""
        return self._tokens[self._occurrences(size)[-1]]

    def _starts(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Return how much matches, and where what followed begins: the longest match first, the latest of several."""
        self.catch_up(tokens)
        found: dict[int, int] = {}
        for size in _SIZES:
            for start in self._occurrences(size):
                if start not in found:
                    found[start] = self._matched(start, size)
        starts = sorted(((matched, start) for start, matched in found.items()), reverse=True)
        self._guess = (starts[0][1], starts[0][0], len(self._tokens)) if starts else None
        return starts

    def _continued(self, start: int, offset: int) -> int:
        """Return what a continuation says so far behind its start; past the end of the text it repeats itself."""
        return self._tokens[start + offset % (len(self._tokens) - start)]

    def _occurrences(self, size: int) -> Sequence[int]:
        """Return where the newest occurrences of the ending of this size end."""
        return self._followers.get(tuple(self._tokens[-size:]), ())[-_MOST_OCCURRENCES:]

    def _matched(self, start: int, length: int) -> int:
        """Return how many tokens before `start` are those of the ending, of which so many are known to be."""
        tokens, most = self._tokens, min(start, LONGEST_MATCH)
        while length < most and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def catch_up(self, tokens: Sequence[int], *, anew: bool = False) -> None:
        """Enter what is new of the sequence, and learn what came of the last guess.

        Args:
            tokens: The whole sequence.
            anew: The sequence may be another one or have been cut: all known tokens are compared, and the last guess is
                dropped. Otherwise only the newest known tokens are compared, so that a step costs what it adds; a
                change that this misses makes guesses worse until the next call with `anew`.
        """
        length = len(self._tokens)
        first = 0 if anew else max(0, length - max(_SIZES))
        changed = list(tokens[first:length]) != self._tokens[first:]
        if changed or anew:
            self._guess = None  # what follows now is not what was guessed at
        # All in this order: whatever interrupts it, no follower is known that the tokens do not have.
        if changed:
            self._followers.clear()
            self._tokens.clear()
        for index in range(len(self._tokens), len(tokens)):
            self._tokens.append(tokens[index])
            for size in _SIZES:
                if index >= size:
                    self._followers[tuple(self._tokens[index - size : index])].append(index)
        self._learn()

    def _learn(self) -> None:
        """Learn from what has come of the last guess."""
        if self._guess is None or len(self._tokens) == self._guess[2]:
            return
        (start, matched, end), self._guess = self._guess, None
        for offset in range(len(self._tokens) - end):
            # Past the end, what came so far is what was guessed.
            hit = self._tokens[end + offset] == self._tokens[start + offset]
            self.rates.observe(matched + offset, hit)
            if not hit:
                return


def _modes_of(longest: int) -> Sequence[str]:
    """Return the modes of an ending whose last `longest` tokens occurred before, that of the longest match first."""
    shorter = () if not longest else (NGRAM,) if longest > 1 else (UNIGRAM,)
    return (COPY, *shorter) if longest == _SIZES[0] else shorter


class NgramDrafter(Drafter):
    """Proposes what an `NgramLookup` for every slot says.

    It has three modes: `copy` where an ending of at least eight tokens occurred before, which is nearly always right,
    `ngram` where one of at least two did, and `unigram` where only the last token did, which is right far less often.
    """

    name = NGRAM

    def __init__(self) -> None:
        self.rates = MatchRates()
        self._lookups: defaultdict[int, NgramLookup] = defaultdict(lambda: NgramLookup(self.rates))
        self._followed: set[int] = set()  # slots whose sequences have only grown since they were compared

    def modes(self, texts: Texts) -> Sequence[str]:
        if not texts:
            return NGRAM, UNIGRAM, COPY
        for slot, tokens in texts.items():
            self.prepare(slot, tokens)
        return _modes_of(max(self._lookups[slot].longest() for slot in texts))

    def first_guess(self, slot: int, tokens: Sequence[int]) -> tuple[str, int] | None:
        """Return the first proposal behind a sequence, and its mode; None where there is none."""
        self.prepare(slot, tokens)
        lookup = self._lookups[slot]
        longest = lookup.longest()
        return (_modes_of(longest)[0], lookup.latest(longest)) if longest else None

    def join(self, slot: int, params: SamplingParams) -> None:
        self._followed.discard(slot)

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        self._lookups[slot].catch_up(tokens, anew=slot not in self._followed)
        self._followed.add(slot)

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        proposals = dict[int, TokenTree]()
        for slot, budget in budgets.items():
            self.prepare(slot, texts[slot])
            if budget.mode == COPY and self._lookups[slot].longest() < _SIZES[0]:
                proposals[slot] = TokenTree()  # another text of the step copies itself
            elif budget.tree_nodes is None:
                proposals[slot] = self._lookups[slot].chain(texts[slot], budget.gamma)
            else:
                least = LEAST_CHANCE if budget.cost_aware else -math.inf
                proposals[slot] = self.guesses(slot, texts[slot], budget, least).tree
        return proposals

    def guesses(self, slot: int, tokens: Sequence[int], budget: DraftBudget, least: float) -> Guesses:
        """Return the most probable nodes of a sequence's tree. Arguments as of `NgramLookup.tree`."""
        self.prepare(slot, tokens)
        return self._lookups[slot].tree(tokens, budget.gamma, budget.size, least=least)


class WithNgrams(Drafter):
    """Leaves budgets of the modes `ngram` and `copy` to n-grams, which cost nothing, and all others to a draft; n-grams
    take the room that its chains leave. What passes keep for a head it observes when it is asked next, or of many
    tokens at a time: that takes the host 50 us and more, in which the device is idle, and most steps may be plain ones.

    Args:
        draft: Proposes unless n-grams are asked for.
        ngrams: May be shared with the draft.
        alone: Whether n-grams may be asked for by themselves. Where a step of the draft brings many tokens, finding
            out what they bring without it is dear.
    """

    def __init__(self, draft: Drafter, ngrams: NgramDrafter, *, alone: bool = True) -> None:
        self.draft, self.ngrams, self._alone = draft, ngrams, alone
        self.name, self.draft_state = draft.name, draft.draft_state
        self._drafted = False  # in the last step, or to be next
        self._prompt_tokens: dict[int, int] = {}  # by slot, observed at once: their memory is large
        # By slot what passes have kept of tokens in a row, which the head has not observed yet.
        self._pending: dict[int, list[tuple[int, Sequence[int], torch.Tensor]]] = {}

    def modes(self, texts: Texts) -> Sequence[str]:
        drafts = self.draft.modes(texts)
        if not self._alone:
            return drafts
        # What costs nothing is tried first; a single token tells less than a draft.
        return (*(mode for mode in self.ngrams.modes(texts) if mode in (NGRAM, COPY)), *drafts)

    def join(self, slot: int, params: SamplingParams) -> None:
        self._flush(slot)
        self.draft.join(slot, params)
        self.ngrams.join(slot, params)

    def leave(self, slot: int) -> None:
        self._flush(slot)
        self.draft.leave(slot)
        self.ngrams.leave(slot)

    def first_guess(self, slot: int, tokens: Sequence[int]) -> tuple[str, int] | None:
        found = self.ngrams.first_guess(slot, tokens) if self._alone else None
        return found if found is not None and found[0] in (NGRAM, COPY) else None

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        self._drafted, self._prompt_tokens[slot] = True, len(tokens)
        self._flush(slot)
        self.draft.prepare(slot, tokens)
        self.ngrams.prepare(slot, tokens)

    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        if (before := self._pending.get(slot)) and position != before[-1][0] + len(before[-1][1]):
            self._flush(slot)
        pending = self._pending.setdefault(slot, [])
        pending.append((position, tokens, hidden))
        if position < self._prompt_tokens.get(slot, 0) or position + len(tokens) - pending[0][0] >= MOST_PENDING_TOKENS:
            self._flush(slot)

    def _flush(self, slot: int) -> None:
        """Let a head observe what is pending of a slot."""
        if pending := self._pending.pop(slot, None):
            tokens = [token for _, some, _ in pending for token in some]
            hidden = torch.cat([some for _, _, some in pending]) if len(pending) > 1 else pending[0][2]
            self.draft.observe(slot, pending[0][0], tokens, hidden)

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        looked_up = {slot: budget for slot, budget in budgets.items() if budget.mode in (NGRAM, COPY)}
        drafted = {slot: budget for slot, budget in budgets.items() if slot not in looked_up}
        self._drafted, found = bool(drafted), dict[int, TokenTree]()
        for slot in drafted:
            self._flush(slot)
        for drafter, asked in ((self.draft, drafted), (self.ngrams, looked_up)):
            if asked:
                found |= drafter.propose(texts, asked)
        for slot, budget in budgets.items():  # n-grams take the room that chains leave
            if budget.extra_nodes:
                room = budget.gamma + budget.extra_nodes
                guesses = self.ngrams.guesses(slot, texts[slot], DraftBudget(NGRAM, room), LEAST_CHANCE)
                found[slot] = found[slot].joined(guesses.tree, room)
        return found

    def ahead(self, pending: Callable[[], bool]) -> None:
        if self._drafted:
            self.draft.ahead(pending)

    def counts(self, slot: int) -> Sequence[Acceptance]:
        return self.draft.counts(slot)


def drafting(drafter: Drafter) -> Drafter:
    """Return the drafter that drafts, without the n-grams around it."""
    return drafter.draft if isinstance(drafter, WithNgrams) else drafter
