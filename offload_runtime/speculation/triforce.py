"""TriForce's hierarchy as a proposer: a small draft, checked by the target over a small retrieved cache, proposes.

Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding",
arXiv 2404.11912. Every level samples with the same noise and is checked by equality with the next, so nothing needs a
correction: the full target decides in the end.

A step of either level is one of all sequences; those that have enough stand still until the last one has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload_runtime.config import SamplingParams
from offload_runtime.runners import DeviceWindow, DraftModel, WindowInput, WindowOutput
from offload_runtime.runners.retrieval_verifier import RetrievalVerifier
from offload_runtime.speculation.step import Acceptance, DraftRequest, Proposer, chains_where
from offload_runtime.speculation.tree import Proposal


class TriForceProposer(Proposer):
    """Proposes what draft and retrieval verifier agree on: chains, as their window is one.

    Args:
        window: Shared by both levels.
        verifier: The target over retrieved chunks.
        draft: The small model; None lets the retrieval verifier decode by itself, a token a step.
        gamma_draft: Tokens that the draft proposes to each step of the retrieval verifier.
        refresh_steps: The chunks are chosen anew by the queries of every so many steps, of all sequences at once.
        max_tokens_with_draft: Of a sequence in the target's cache, tentative ones included.
    """

    name = "retrieval"
    # The first step of a draft feeds two tokens, and a window without a draft needs one.
    _KNOWN_TOKENS = 2

    def __init__(
        self, window: DeviceWindow, verifier: RetrievalVerifier, draft: DraftModel | None, *, gamma_draft: int,
        refresh_steps: int, max_tokens_with_draft: int,
    ) -> None:  # fmt: skip
        assert refresh_steps > 0 and (gamma_draft > 0) == (draft is not None)
        self._window = window
        self.verifier = verifier
        self._draft = draft
        self._gamma = gamma_draft
        self._refresh_steps = refresh_steps
        self._max_tokens_with_draft = max_tokens_with_draft
        self.num_steps = 0  # of the retrieval verifier since `start`, each of all sequences

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return chains_where(self._room, texts)

    def start(self, slots: Sequence[SamplingParams]) -> None:
        self.verifier.start(slots)
        if self._draft is not None:
            self._draft.start(slots)
        self.num_steps = 0

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        if self._draft is not None:
            self._draft.prepare(slot, tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Run both levels until they agree on enough tokens of every sequence; the host reads the window a few times on
        the way."""
        inputs = {request.slot: one for request in requests if (one := self._inputs(request)) is not None}
        if not inputs:
            return [Proposal() for _ in requests]
        lengths = {sequence: one.end for sequence, one in inputs.items()}
        reach = {sequence: one.last + 1 - one.end for sequence, one in inputs.items()}
        refresh = self.verifier.begin(lengths, reach)
        for request in requests:
            if self._draft is not None and request.slot in inputs:
                self._draft.texts.catch_up(request.slot, request.tokens)
        self._window.upload(inputs)
        outputs = self._agree(inputs, refresh=refresh)
        agreed = {sequence: self._proposals(sequence, one, outputs[sequence]) for sequence, one in inputs.items()}
        return [Proposal.chain(agreed.get(request.slot, ()), self.name) for request in requests]

    def counts(self, slot: int) -> Sequence[Acceptance]:
        """What the retrieval verifier decided about the draft's proposals, those behind what was asked for included."""
        if self._draft is None:
            return ()
        steps, accepted = self.verifier.counts[slot]
        return (Acceptance("draft", "retrieval", steps, steps * self._gamma, accepted),)

    def _inputs(self, request: DraftRequest) -> WindowInput | None:
        """What the device is told of a sequence; None where there is no room to propose anything."""
        length = len(request.tokens)
        count = min(request.longest_chain, self._room(length))
        if count <= 0:
            return None
        stop = length + count
        return WindowInput(request.tokens[-self._KNOWN_TOKENS :], length, stop, stop + self._gamma)

    def _room(self, length: int) -> int:
        """Most tokens that can be proposed behind `length` tokens."""
        room = min(self._max_tokens_with_draft - length, self._window.capacity - self._KNOWN_TOKENS)
        if self._draft is not None:
            room = min(room, self._draft.room(length))
        return room - self._gamma - 1  # the last step may write the keys of proposals beyond what is asked for

    def _agree(self, inputs: Mapping[int, WindowInput], *, refresh: bool) -> Mapping[int, WindowOutput]:
        """Enqueue steps until every sequence has reached its stop; what the window holds then.

        So many steps at a time as some sequence needs in any case: all together as many as the slowest one takes.
        """
        ends = {sequence: one.end for sequence, one in inputs.items()}
        while True:
            missing = {sequence: inputs[sequence].stop - end for sequence, end in ends.items()}
            for _ in range(max(1, max(missing.values()) // (self._gamma + 1))):
                if self._draft is not None:
                    # Who has reached the stop stands still.
                    longest = {sequence: min(end, inputs[sequence].stop - 1) for sequence, end in ends.items()}
                    self._draft.steps(self._gamma, longest=longest)
                self.verifier.step(self._gamma, refresh=refresh or self.num_steps % self._refresh_steps == 0)
                self.num_steps += 1
                ends = {sequence: end + self._gamma + 1 for sequence, end in ends.items()}
                refresh = False
            outputs = self._window.read()
            ends = {s: outputs[s].end for s in ends if outputs[s].end < inputs[s].stop}
            if not ends:
                return outputs

    def _proposals(self, sequence: int, inputs: WindowInput, outputs: WindowOutput) -> list[int]:
        """What was agreed on for a sequence, of which the draft takes note."""
        if self._draft is not None:
            self._draft.texts.learned(sequence, outputs.between(inputs.base, inputs.base + outputs.end - inputs.end))
        proposals = outputs.between(inputs.end, inputs.stop)
        bad = next((index for index, token in enumerate(proposals) if token < 0), len(proposals))
        return proposals[:bad]  # a level with NaN logits has nothing to say
