"""From passes to tokens per second: what a round of proposing and verifying gives, by how often proposals are right."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# Of what a draft's first child misses, the shares that its next ones hit: 0.11 to 0.12, 0.01 to 0.03 and 0.00 to 0.02
# of all where the first hits 0.83 to 0.84 (prose and code, T = 0.6).
_OTHER_CHILDREN = (0.7, 0.1, 0.05)


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Tokens of one verification of `gamma` proposals, each right with probability `acceptance` while all before are.

    (1 - a^(gamma + 1)) / (1 - a): the accepted ones and the verifier's own (Leviathan et al., arXiv 2211.17192, eq. 1).
    """
    assert 0 <= acceptance <= 1 and gamma >= 0
    return float(sum(acceptance**depth for depth in range(gamma + 1)))


@lru_cache(maxsize=4096)
def expected_tree_tokens(acceptance: float, nodes: int, depth: int) -> float:
    """Tokens of one verification of the best tree of a draft whose first child is right with probability `acceptance`,
    wherever it stands, and whose other children are as often as they usually are."""
    return best_tree_tokens([acceptance, *((1 - acceptance) * share for share in _OTHER_CHILDREN)], nodes, depth)


def best_tree_tokens(hits: Sequence[float], nodes: int, depth: int) -> float:
    """The verifier's own token and the sum of the `nodes` most probable paths no longer than `depth`, where the child
    of rank r is what it says with probability `hits[r]`, whatever came before (Chen et al., Sequoia, arXiv
    2402.12374)."""
    assert nodes >= 0 and depth >= 0
    total, heap = 1.0, [(-hit, 1) for hit in hits] if depth else []
    heapq.heapify(heap)
    for _ in range(nodes):
        if not heap:
            break
        negative, length = heapq.heappop(heap)
        total -= negative
        if length < depth:
            for hit in hits:
                heapq.heappush(heap, (negative * hit, length + 1))
    return total


@dataclass(frozen=True)
class RoundCosts:
    """What a round takes: a pass over the target, and before it the proposals for it.

    `link_s` is the pass's copies, `busy_s` its compute or its launches, whichever is longer, and `bound_by` what binds
    it (see `PassPrediction`). Proposing `gamma` tokens takes a draft step each; with a middle level (`middle_step_s`
    not None), steps of it that each verify `gamma_draft` of the draft's. A tree of `tree_nodes`, no deeper than
    `gamma`, takes `tree_steps` instead. `lookahead_s` of copies fit the ring while nothing of the pass computes. A step
    serves all sequences of a batch.
    """

    link_s: float
    busy_s: float
    bound_by: str
    lookahead_s: float
    gamma: int
    draft_step_s: float = 0.0
    middle_step_s: float | None = None
    gamma_draft: int = 0
    batch: int = 1
    tree_nodes: int = 0
    tree_steps: float = 0.0


@dataclass(frozen=True)
class RoundPrediction:
    """A round at some acceptance: `tokens` of each sequence, `tok_per_s` of all of them.

    `hidden_s` of `drafting_s` pass while the ring fills. `bound_by` is `drafting` where the rest of it takes longer
    than the pass.
    """

    acceptance: float
    tokens: float
    drafting_s: float
    hidden_s: float
    seconds: float
    tok_per_s: float
    bound_by: str


def predict_round(costs: RoundCosts, acceptance: float, *, draft_acceptance: float = 0.0) -> RoundPrediction:
    """How fast tokens come.

    Args:
        costs: Of the round.
        acceptance: By the target, of each proposal.
        draft_acceptance: By the middle level, of the draft's; without a middle level it is of no meaning.
    """
    tokens = expected_tokens(acceptance, costs.gamma)
    if costs.tree_nodes:
        tokens = expected_tree_tokens(acceptance, costs.tree_nodes, costs.gamma)
        drafting_s = costs.tree_steps * costs.draft_step_s
    elif costs.middle_step_s is None:
        drafting_s = costs.gamma * costs.draft_step_s
    else:
        steps = costs.gamma / expected_tokens(draft_acceptance, costs.gamma_draft)
        drafting_s = steps * (costs.middle_step_s + costs.gamma_draft * costs.draft_step_s)
    hidden_s = min(drafting_s, costs.lookahead_s)
    pass_s = max(costs.link_s, costs.busy_s)
    seconds = max(costs.link_s + drafting_s - hidden_s, costs.busy_s + drafting_s)
    bound_by = "drafting" if seconds - pass_s > pass_s else costs.bound_by
    return RoundPrediction(
        acceptance, tokens, drafting_s, hidden_s, seconds, costs.batch * tokens / seconds, bound_by
    )  # fmt: skip
