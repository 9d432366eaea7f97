"""A draft, beside which the n-grams of the text propose what costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from offload_runtime.config import SamplingParams
from offload_runtime.speculation.acceptance import Acceptance
from offload_runtime.speculation.ngrams import LEAST_CHANCE, NgramProposer
from offload_runtime.speculation.proposal import Proposal
from offload_runtime.speculation.proposers import Proposer, Turn


class WithNgrams:
    """Leaves turns of the family `ngram` to n-grams, which cost nothing, and all others to a draft; beside its chains
    n-grams take what room there is.

    Args:
        draft: Proposes unless n-grams are asked for.
        ngrams: May be shared with the draft.
        alone: Whether n-grams may be asked for by themselves. Where a round of the draft brings many tokens, finding
            out what they bring without it is dear.
    """

    def __init__(self, draft: Proposer, ngrams: NgramProposer, *, alone: bool = True) -> None:
        self.draft, self.ngrams, self._alone = draft, ngrams, alone
        self._drafted = False  # in the last round, or to be next

    @property
    def name(self) -> str | None:
        """The draft's."""
        return self.draft.name

    def families(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        drafts = self.draft.families(texts)
        if not self._alone:
            return drafts
        # What costs nothing is tried first; a single token tells less than a draft.
        told = (family for family in self.ngrams.families(texts) if family == self.ngrams.name)
        return (*told, *drafts)

    def start(self, params: SamplingParams, num_sequences: int = 1) -> None:
        self.draft.start(params, num_sequences)
        self.ngrams.start(params, num_sequences)

    def prepare(self, sequence: int, tokens: Sequence[int]) -> None:
        self._drafted = True
        self.draft.prepare(sequence, tokens)
        self.ngrams.prepare(sequence, tokens)

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        found: dict[int, Proposal] = {}
        drafted = [turn for turn in turns if turn.family != self.ngrams.name]
        self._drafted = bool(drafted)
        for proposer, asked in (
            (self.draft, drafted),
            (self.ngrams, [turn for turn in turns if turn.family == self.ngrams.name]),
        ):
            if asked:
                answers = proposer.propose(asked)
                found |= {turn.sequence: proposal for turn, proposal in zip(asked, answers, strict=True)}
        return [self._filled(turn, found[turn.sequence]) for turn in turns]

    def _filled(self, turn: Turn, proposal: Proposal) -> Proposal:
        """With n-grams in the room beside a chain."""
        if not turn.beside:
            return proposal
        room = turn.gamma + turn.beside
        looked_up = self.ngrams.guesses(replace(turn, gamma=room, tree_nodes=room), LEAST_CHANCE).proposal
        return proposal.joined(looked_up, room)

    def ahead(self, pending: Callable[[], bool]) -> None:
        if self._drafted:
            self.draft.ahead(pending)

    def counts(self, sequence: int = 0) -> Sequence[Acceptance]:
        return self.draft.counts(sequence)


def drafting(proposer: Proposer) -> Proposer:
    """Who drafts, without the n-grams beside."""
    return proposer.draft if isinstance(proposer, WithNgrams) else proposer
