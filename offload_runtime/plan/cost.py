"""How long passes, drafting and prompts take on a machine: pure functions of a plan and the machine's figures.

Each layer takes the longest of its bytes from HBM and its operations; copies of later layers, and of the next pass, run
meanwhile. So a pass takes the longer of all its copies and all its compute, and the host must have launched it by then.
A step proposes, then verifies what was proposed in one pass; `step_time` is what the search of a plan, its forecast,
the controller of windows and the statistics of a run all go by.

What a kernel attains of the machine's peaks is measured on one H200 (tools/results/): the shares carry over to other
cards, the seconds come from the machine's own figures.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from offload_runtime_kernels.encoded_linear import MOST_ROWS
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS
from offload_runtime_kernels.linear import LIBRARY_ROWS

from offload_runtime.core import depths_of
from offload_runtime.models.layers import Attention, DecoderLayer, Work
from offload_runtime.plan.memory import ModelPlan, RunPlan, unmatched_kv_bytes
from offload_runtime.plan.request import MachineFigures, device_type_of
from offload_runtime.runners.graphs import CAPTURED_ROWS, STEP_ROWS, captured_width
from offload_runtime.sizes import GB
from offload_runtime.speculation import expected_accepted, likely_parents, num_guesses

# Window-invariant attention: 72 to 80 of 650 TFLOP/s, whatever the heads. A prefill's: 325.
_WINDOW_ATTENTION_SHARE = 0.115
_PREFILL_ATTENTION_SHARE = 0.5
# Queries of a KV head are worked on in tiles of so many rows.
_ATTENTION_TILE_ROWS = 16
# A streamed 7B pass: 21.5 ms of host work for 32 layers of 9 launches, 33.8 ms with 21.
_HOST_LAYER_S = 384e-6
_HOST_LAUNCH_S = 32e-6
# Touching and locking new host memory beside a prefill: 63 GB in at most 14 s.
_GROWTH_GBPS = 4.5
# Launches of a layer: norms, rotation, attention in two; four products. Of many rows each is done in slices, which
# read the weights once each, with sums and gates of their own.
_LAYER_LAUNCHES = 5
_PRODUCTS = 4
_SLICE_ROWS, _FEWEST_SLICED_ROWS = LIBRARY_ROWS["cuda"]
_SLICED_PRODUCTS = 8
_PIECE_LAUNCHES = 3
_STEP_LAUNCHES = 12  # head, sampling, moving the window
_CHOICE_LAUNCHES = 4
# A third of the chunks change from step to step, half of them are kept by the margin of what is held.
_FETCHED_SHARE = 1 / 6

# Of what a level proposes, the share that the next one accepts while all before are right. The retrieval verifier: 0.93
# to 0.97 (4096 of 120,000 tokens of a novel, T = 0.6). A draft of the target's family: 0.83 on code, less on prose;
# where it keeps the first and newest tokens only a tenth less, and behind long texts another tenth (0.65 on that novel;
# a model agrees with itself 0.81 of the time at 8K, 0.69 at 32K, 0.77 at 120K). N-grams: 1.2 tokens a pass (prose and
# code, T = 0 to 1.2).
USUAL_ACCEPTANCE: Mapping[str, float] = {
    "verifier": 0.95, "full": 0.8, "retrieval": 0.8, "streaming": 0.72, "streaming, far": 0.65, "n-grams": 0.15,
}  # fmt: skip
_FAR_TOKENS = 8192
# Of what a draft's first child misses, the shares that its next ones hit: 0.11 to 0.12, 0.01 to 0.03 and 0.00 to 0.02
# of all where the first hits 0.83 to 0.84 (prose and code, T = 0.6).
_OTHER_CHILDREN = (0.7, 0.1, 0.05)
# Proposed tokens per pass when nothing is asked for. While weights are streamed a wider window costs nothing; on a CPU
# every row does. Of n-grams as many as a controller proposes within `MOST_ROWS`: windows of more take several times as
# long where encoded matrices are decoded in registers.
_DEFAULT_GAMMA = {"n-grams": 12, "draft": 8, "triforce": 12, "triforce, streamed": 24, "cpu": 7}
# Levels of a tree that are drafted before its pass; what was drafted beside the pass before is there already.
_PATH_STEPS = 4


# Of the time in which the rings fill up behind a pass, what goes by until its tokens are known and, from the launch of
# the next one, until a buffer is free again: 10 ms with 200 tokens in a window, 18 with 1000 (13B shape on an H200).
_BETWEEN_S = 0.015


# --- a pass of the target


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass by cause, and which of them binds: `link`, `staging`, `HBM`, `arithmetic` or `launches`.

    `compute_s` sums over the layers the longer of HBM and arithmetic, with `transfer_s` in which rows cross from card
    to card. `lookahead_s` of the copies fit the rings while nothing of the pass computes. In `exposed_s`, of one card
    of several, keys and values come that its ring has no room for, while the others' rings may be full. `weight_bytes`
    and `kv_bytes` are those of `bytes_streamed`, `staged_bytes` what of them comes out of pageable memory.
    """

    weight_bytes: int
    kv_bytes: int
    staged_bytes: int
    link_s: float
    hbm_s: float
    arithmetic_s: float
    compute_s: float
    launch_s: float
    staging_s: float
    lookahead_s: float
    exposed_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def bytes_streamed(self) -> int:
        """Bytes over the link."""
        return self.weight_bytes + self.kv_bytes

    @property
    def copies_s(self) -> float:
        """Until everything has arrived: staging and link work side by side."""
        return max(self.link_s, self.staging_s)

    @property
    def busy_s(self) -> float:
        """Of the device and of who launches its work."""
        return max(self.compute_s, self.launch_s)

    @property
    def seconds(self) -> float:
        """From pass to pass."""
        return max(self.copies_s, self.busy_s)

    @property
    def bound_by(self) -> str:
        """What takes all of it."""
        causes = {"link": self.link_s, "staging": self.staging_s, "launches": self.launch_s}
        causes["HBM" if self.hbm_s >= self.arithmetic_s else "arithmetic"] = self.compute_s
        return max(causes, key=causes.__getitem__)  # the first of equals

    def hidden_s(self, drafting_s: float) -> float:
        """Of `drafting_s`, what delays no copy."""
        return min(drafting_s, self.lookahead_s)


def pass_time(plan: RunPlan, machine: MachineFigures, *, length_tokens: int, rows: int) -> PassTime:
    """A pass of the target over windows of `rows` tokens behind `length_tokens` committed ones in every sequence, the
    ring of copies running across passes. Several cards copy side by side, and compute one after the other."""
    if plan.num_cards > 1:
        cards = [pass_time(card, machine, length_tokens=length_tokens, rows=rows) for card in plan.cards]
        unmatched = unmatched_kv_bytes([card.target for card in plan.cards], length_tokens)
        pairs = zip(plan.cards, unmatched, strict=True)
        waits_s = [nbytes / _link_bytes_per_s(card, machine) for card, nbytes in pairs]
        return _pass_of_cards(
            cards, machine, waits_s, transfer_s=transfers_s(plan, machine, rows=plan.target.batch * rows)
        )
    target, placement, batch = plan.target, plan.placement, plan.target.batch
    flops, attained_hbm = machine.flops(target.dtype), machine.attained_hbm
    captured = plan.captured_bytes > 0 and batch * captured_width(rows) <= CAPTURED_ROWS
    height = batch * (captured_width(rows) if captured else rows)
    # What crosses the link.
    streamed = target.streamed_kv(length_tokens)
    weight_bytes, kv_bytes = target.bytes_of_layers(placement.streamed_layers), sum(streamed.values())
    staged_kv_bytes = sum(streamed[layer] for layer in placement.staged_kv_layers)
    staged_bytes = target.bytes_of_layers(placement.staged_layers) + staged_kv_bytes
    pieces = sum(map(target.kv_pieces, streamed.values()))
    link_bytes_per_s = _link_bytes_per_s(plan, machine)
    link_s = (weight_bytes + kv_bytes) / link_bytes_per_s
    staging_s = staged_bytes / (machine.staging_gbps * GB)
    # Of each kind no more than a pass brings, at the pace of its copies, which staging may keep below the link's.
    lookahead_bytes = min(weight_bytes, placement.num_buffers * target.layer_bytes) + min(
        kv_bytes, target.kv_ring_bytes
    )
    # The share first: it rounds to at most 1, so that no copies come out longer than all of them.
    lookahead_s = max(link_s, staging_s) * (lookahead_bytes / max(1, weight_bytes + kv_bytes))
    # What computes: the longer of HBM and arithmetic, of the matrices and of each layer's attention.
    stages, decodings = _matrix_stages(plan, target, machine, height)
    for layer, count in _kinds(target).items():
        work = _work(layer, rows, length_tokens + rows)
        operations = work.attention_operations * _filled_up(layer.attention, rows)
        kv_s = batch * work.kv_elements * target.dtype.itemsize / attained_hbm
        stages.append((count, kv_s, batch * operations / (_WINDOW_ATTENTION_SHARE * flops)))
    layers = len(target.layers)
    products = _PRODUCTS if height < _FEWEST_SLICED_ROWS else _SLICED_PRODUCTS * -(-height // _SLICE_ROWS)
    launches = layers * (_LAYER_LAUNCHES + products) + _PIECE_LAUNCHES * pieces + decodings
    stages.append((launches, machine.launch_us * 1e-6, 0.0))  # of the device, from kernel to kernel
    return PassTime(
        weight_bytes, kv_bytes, staged_bytes, link_s,
        hbm_s=sum(count * hbm_s for count, hbm_s, _ in stages),
        arithmetic_s=sum(count * arithmetic_s for count, _, arithmetic_s in stages),
        compute_s=sum(count * max(hbm_s, arithmetic_s) for count, hbm_s, arithmetic_s in stages),
        launch_s=0.0 if captured else layers * _HOST_LAYER_S + launches * _HOST_LAUNCH_S,
        staging_s=staging_s, lookahead_s=lookahead_s,
        exposed_s=target.exposed_kv_bytes(length_tokens) / link_bytes_per_s,
    )  # fmt: skip


def _link_bytes_per_s(plan: RunPlan, machine: MachineFigures) -> float:
    """Of the link of a plan's card."""
    return machine.link_gbps * plan.limits.link_ratio * GB


def transfers_s(plan: RunPlan, machine: MachineFigures, *, rows: int) -> float:
    """Seconds in which `rows` go from card to card on their way through the layers; 0 on one card."""
    target = plan.target
    return target.num_transfers * machine.transfer_s(rows * target.config.hidden_size * target.dtype.itemsize)


def _bound_by_host(nbytes: int, seconds: float, machine: MachineFigures) -> float:
    """The time of all links together, which read one host's memory."""
    return seconds if machine.host_gbps is None else max(seconds, nbytes / (machine.host_gbps * GB))


def _pass_of_cards(
    cards: Sequence[PassTime], machine: MachineFigures, waits_s: Sequence[float], *, transfer_s: float
) -> PassTime:  # fmt: skip
    """The pass that the passes over each card's layers make together, where each one's link waits so long."""
    nbytes = sum(card.bytes_streamed for card in cards)
    busiest_s = max(card.link_s + wait_s for card, wait_s in zip(cards, waits_s, strict=True))
    overlapped_s = _bound_by_host(nbytes, busiest_s, machine)
    staging_s = sum(card.staging_s for card in cards)
    link_s = max(overlapped_s, sum(card.exposed_s for card in cards))
    copies_s = max(overlapped_s, staging_s)
    return PassTime(
        sum(card.weight_bytes for card in cards), sum(card.kv_bytes for card in cards),
        sum(card.staged_bytes for card in cards), link_s,
        hbm_s=sum(card.hbm_s for card in cards),
        arithmetic_s=sum(card.arithmetic_s for card in cards),
        compute_s=sum(card.compute_s for card in cards) + transfer_s,
        launch_s=sum(card.launch_s for card in cards), staging_s=staging_s,
        # What delays no card's copies: of one that has less to copy, also what it waits for the others.
        lookahead_s=min(card.lookahead_s + copies_s - card.copies_s for card in cards), transfer_s=transfer_s,
    )  # fmt: skip


def _matrix_stages(
    plan: RunPlan, model: ModelPlan, machine: MachineFigures, height: int
) -> tuple[list[tuple[int, float, float]], int]:
    """The products of all matrices with `height` rows.

    Returns:
        How often, and each time the seconds of HBM and of arithmetic, of which the longer one counts: what few rows
        decode in registers takes as long as reading what is stored, or as decoding it. And how many kernels decode
        matrices into memory.
    """
    slices, element_s = -(-height // _SLICE_ROWS), 2 * height / machine.flops(model.dtype)
    in_registers = height <= MOST_ROWS and device_type_of(plan.request) == "cuda"
    stages, decodings = list[tuple[int, float, float]](), 0
    for block, count in model.layout.multiplied(model.layers, head=model.has_head):
        for read in block.register_reads if in_registers else ():
            decoding_s = read.weights / machine.decode_rate(read.kind)
            stages.append((count, read.nbytes / machine.attained_hbm, max(decoding_s, read.weights * element_s)))
        rest = block.without_register_reads if in_registers else block
        stages.append((count, rest.moved_bytes(slices) / machine.attained_hbm, rest.matrix_elements * element_s))
        decodings += count * rest.num_decodings
    return stages, decodings


def _kinds(model: ModelPlan) -> Counter[DecoderLayer]:
    """The layers that a plan is about, which are of a few kinds, and how many there are of each."""
    return Counter(map(model.config.layers.__getitem__, model.layers))


@lru_cache(maxsize=4096)
def _work(layer: DecoderLayer, rows: int, context: int) -> Work:
    """What a layer declares, which plans ask for many times."""
    return layer.work(rows, context)


def _filled_up(attention: Attention, rows: int) -> float:
    """How many times the queries of a window are what they are once filled up to whole tiles."""
    queries = rows * attention.num_heads // attention.num_kv_heads
    return -(-queries // _ATTENTION_TILE_ROWS) * _ATTENTION_TILE_ROWS / queries


# --- drafting


def draft_step_s(plan: RunPlan, machine: MachineFigures, *, rows: int = 1) -> float:
    """Seconds of one step of the draft, for all sequences of a batch together, of at least `rows`; 0 without one."""
    draft = plan.draft
    if draft is None:
        return 0.0
    kept = draft.context_tokens
    if draft.cache == "streaming":
        kept = draft.options.sink_tokens + draft.recent_tokens
    elif draft.cache == "retrieval":
        kept = min(kept, draft.options.budget_tokens + 2 * BLOCK_TOKENS)
    kv_bytes = draft.batch * kept * draft.kv_token_bytes
    return _step_s(plan, draft, machine, rows=max(rows, draft.batch), kv_bytes=kv_bytes, choice_launches=0)


def verifier_step_s(plan: RunPlan, machine: MachineFigures) -> float:
    """Seconds of one step of the retrieval verifier, for all sequences of a batch together, with its share of choosing
    and fetching chunks; 0 without one."""
    target = plan.target
    if not plan.has_verifier:
        return 0.0
    if plan.num_cards > 1:
        rows = target.batch * (1 + len(guess_parents(plan, target.batch)))
        return sum(verifier_step_s(card, machine) for card in plan.cards) + transfers_s(plan, machine, rows=rows)
    options, batch = target.options, target.batch
    token_bytes = batch * target.kv_token_bytes
    held_bytes, recent_bytes = options.budget_tokens * token_bytes, 2 * BLOCK_TOKENS * token_bytes
    return _step_s(
        plan, target, machine, rows=batch * (1 + len(guess_parents(plan, batch))),
        kv_bytes=held_bytes + recent_bytes + target.summaries_bytes // target.refresh_steps,
        choice_launches=_CHOICE_LAUNCHES // target.refresh_steps,
        fetched_bytes=round(_FETCHED_SHARE * held_bytes / target.refresh_steps) if target.on_host else 0,
    )  # fmt: skip


def _step_s(
    plan: RunPlan, model: ModelPlan, machine: MachineFigures, *, rows: int, kv_bytes: int, choice_launches: int,
    fetched_bytes: int = 0,
) -> float:  # fmt: skip
    """Seconds of a step of `rows` tokens, which is one CUDA graph. What it fetches over the link, it waits for."""
    layers = len(model.layers)
    stages, decodings = _matrix_stages(plan, model, machine, rows)
    compute_s = sum(count * max(hbm_s, arithmetic_s) for count, hbm_s, arithmetic_s in stages)
    compute_s += kv_bytes / machine.attained_hbm
    launches = layers * (_LAYER_LAUNCHES + _PRODUCTS + choice_launches) + _STEP_LAUNCHES + decodings
    return compute_s + launches * machine.launch_us * 1e-6 + fetched_bytes / _link_bytes_per_s(plan, machine)


def drafting_s(plan: RunPlan, machine: MachineFigures, *, gamma: int, tree_nodes: int = 0) -> float:
    """Seconds of proposing for one pass; n-grams take none.

    Args:
        plan: Who proposes.
        machine: Where.
        gamma: Tokens proposed in a row.
        tree_nodes: Of a tree in the place of a chain; 0 for none.
    """
    draft_s = draft_step_s(plan, machine)
    if tree_nodes:
        # One for every level of the most probable path that is not there yet, and one for every so many nodes.
        return _PATH_STEPS * draft_s + tree_nodes / STEP_ROWS * draft_step_s(plan, machine, rows=STEP_ROWS)
    if not plan.has_verifier:
        return gamma * draft_s
    parents = guess_parents(plan, plan.target.batch)
    verifier_steps = gamma / (1 + expected_accepted(parents, usual_acceptance(plan.draft)))
    num_levels = max(depths_of(parents), default=-1) + 1
    return verifier_steps * (verifier_step_s(plan, machine) + num_levels * draft_s)


# --- how much is proposed, and accepted


def usual_acceptance(draft: ModelPlan | None) -> float:
    """Of a draft's proposals at its full context; None stands for n-grams."""
    if draft is None:
        return USUAL_ACCEPTANCE["n-grams"]
    far = draft.cache == "streaming" and draft.context_tokens > _FAR_TOKENS
    return USUAL_ACCEPTANCE["streaming, far" if far else draft.cache]


def guess_parents(plan: RunPlan, batch: int) -> tuple[int, ...]:
    """The tree that the draft proposes to a step of the retrieval verifier for each of `batch` sequences; no nodes
    without either."""
    if plan.draft is None or not plan.has_verifier:
        return ()
    return likely_parents(num_guesses(plan.draft.options.gamma_draft, batch), usual_acceptance(plan.draft))


def tree_nodes(plan: RunPlan) -> int:
    """Nodes of the trees that are proposed; 0 for chains."""
    if plan.draft is None or plan.has_verifier:
        return 0
    return min(plan.draft.tree_nodes, max(0, plan.target.context_tokens - 2))


def gamma(plan: RunPlan) -> int:
    """Tokens proposed for a pass in a row, at most what the context has room for."""
    request = plan.request
    if plan.proposer == "none" and not plan.has_verifier:
        return 0
    if request.gamma is not None:
        chosen = request.gamma
    elif tree_nodes(plan):
        chosen = request.max_gamma
    elif device_type_of(request) == "cpu":
        chosen = _DEFAULT_GAMMA["cpu"]
    elif plan.has_verifier:
        chosen = _DEFAULT_GAMMA["triforce, streamed" if plan.target.on_host else "triforce"]
    else:
        chosen = _DEFAULT_GAMMA["n-grams" if plan.draft is None else "draft"]
    return max(0, min(chosen, request.max_gamma, plan.target.context_tokens - 2))


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


# --- a step: proposals and the pass that verifies them


def step_time(verify: PassTime, drafting_s: float) -> float:
    """Seconds of a step that proposes for `drafting_s`, some of which pass while the rings fill."""
    return max(verify.copies_s + drafting_s - verify.hidden_s(drafting_s), verify.busy_s + drafting_s)


def predicted_step_s(
    plan: RunPlan, machine: MachineFigures, *, proposals: int, drafted: bool, in_tree: bool, num_sequences: int,
    length_tokens: int,
) -> float:  # fmt: skip
    """Seconds of a step.

    Args:
        plan: What lives where, and who proposes.
        machine: Where.
        proposals: Of each sequence's window.
        drafted: Whether a model computes them; n-grams take no time.
        in_tree: Whether what is drafted is a tree rather than a chain.
        num_sequences: That take part.
        length_tokens: Of each of them.
    """
    plan, rows = plan.of_batch(num_sequences), 1 + proposals
    length_tokens = max(0, min(length_tokens, plan.target.context_tokens - rows))
    verify = pass_time(plan, machine, length_tokens=length_tokens, rows=rows)
    nodes = proposals if in_tree else 0
    return step_time(verify, drafting_s(plan, machine, gamma=proposals, tree_nodes=nodes) if drafted else 0.0)


@dataclass(frozen=True)
class StepPrediction:
    """A step at some acceptance: `tokens` of each sequence, `tok_per_s` of all of them.

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


def verification(plan: RunPlan, machine: MachineFigures) -> PassTime:
    """A pass over a window of proposals, at the full context."""
    window = tree_nodes(plan) or gamma(plan)
    return pass_time(plan, machine, length_tokens=plan.target.context_tokens - window - 1, rows=window + 1)


def predict_step(plan: RunPlan, machine: MachineFigures, acceptance: float | None = None) -> StepPrediction:
    """How fast tokens come at the full context, all sequences of a batch together.

    Args:
        plan: What proposes, and where everything lives.
        machine: Where it runs.
        acceptance: By the target, of each proposal; None for what is usual of who proposes.
    """
    if acceptance is None:
        acceptance = USUAL_ACCEPTANCE["verifier"] if plan.has_verifier else usual_acceptance(plan.draft)
    verify, nodes, depth = verification(plan, machine), tree_nodes(plan), gamma(plan)
    tokens = expected_tree_tokens(acceptance, nodes, depth) if nodes else expected_tokens(acceptance, depth)
    proposing_s = drafting_s(plan, machine, gamma=depth, tree_nodes=nodes)
    seconds = step_time(verify, proposing_s)
    bound_by = "drafting" if seconds - verify.seconds > verify.seconds else verify.bound_by
    return StepPrediction(
        acceptance, tokens, proposing_s, verify.hidden_s(proposing_s), seconds,
        plan.target.batch * tokens / seconds, bound_by,
    )  # fmt: skip


def tok_per_s(plan: RunPlan, machine: MachineFigures) -> float:
    """Tokens per second at the usual acceptance: what plans are compared by.

    Who proposes decides as much as the bytes of a pass do, since every proposal that is accepted saves one.
    """
    return predict_step(plan, machine).tok_per_s


# --- the link between passes


def link_slack(plan: RunPlan, machine: MachineFigures, *, widest: int = 0) -> tuple[float, int]:
    """What costs nothing beside a link that is busy with passes over a streamed target.

    Args:
        plan: What lives where.
        machine: Where.
        widest: Rows of the widest window, if it is wider than what is usual.

    Returns:
        Seconds behind a pass in which drafting delays nothing, as the link brings what the next one begins with; rows
        of a sequence in a pass up to which nothing takes longer than the link, 0 where something always does.
    """
    length = plan.target.context_tokens - 1

    def slack_s(rows: int) -> float:
        time = pass_time(plan, machine, length_tokens=length - rows + 1, rows=rows)
        return time.busy_s - time.copies_s

    one = pass_time(plan, machine, length_tokens=length, rows=1)
    widest = max(widest, tree_nodes(plan) + 1, gamma(plan) + 1)
    # Windows of sizes like these are what is proposed.
    rows = [*range(1, min(widest, 32)), *range(32, widest, 32), widest]
    bound = bisect_right(rows, 0.0, key=slack_s)
    return max(0.0, one.lookahead_s - _BETWEEN_S), rows[bound - 1] if bound else 0


# --- prompts


@dataclass(frozen=True)
class PrefillTime:
    """Time to the first token by cause; host memory grows before the first layer, everything else overlaps.

    Of `link_bytes` the weights go to the device once and the keys and values back once.
    """

    link_bytes: int
    link_s: float
    compute_s: float
    growth_s: float
    seconds: float
    bound_by: str
    staging_s: float


def prefill_time(plan: RunPlan, machine: MachineFigures, prompt_tokens: int) -> PrefillTime:
    """Prompts of `prompt_tokens` in every sequence, one after the other. The link is taken to carry both directions
    one after the other. Several cards are taken to work on different pieces of a prompt at a time, which nothing has
    measured: without gaps where layers are in turn; where they are in blocks, a card waits for the first piece."""
    layers, target = plan.target.config.num_layers, plan.target
    cards = [_prefill_work(card, machine, prompt_tokens) for card in plan.cards]
    pieces = -(-prompt_tokens // target.chunk_tokens)
    abreast = len(cards) * pieces / (pieces + len(cards) - 1) if target.in_blocks else min(len(cards), pieces)
    transfer_s = target.batch * transfers_s(plan, machine, rows=prompt_tokens)
    hbm_s, arithmetic_s = sum(card.hbm_s for card in cards), sum(card.arithmetic_s for card in cards)
    compute_s = (sum(max(card.hbm_s, card.arithmetic_s) for card in cards) + transfer_s) / abreast
    link_bytes = sum(card.link_bytes for card in cards)
    link_s = max(card.link_s for card in cards)
    if len(cards) > 1:
        link_s = _bound_by_host(link_bytes, link_s, machine)
    growth_s, staging_s = sum(card.growth_s for card in cards), sum(card.staging_s for card in cards)
    causes = {"HBM" if hbm_s >= arithmetic_s else "arithmetic": compute_s, "link": link_s, "staging": staging_s}
    causes["host memory"] = growth_s
    # Layers grow ahead of the one that is computed; what the first is written to has to be there first.
    seconds = growth_s / layers + max(compute_s, link_s, staging_s, growth_s)
    return PrefillTime(link_bytes, link_s, compute_s, growth_s, seconds, max(causes, key=causes.__getitem__), staging_s)


@dataclass(frozen=True)
class _PrefillWork:
    """What one card has to do for prompts, in seconds by cause."""

    hbm_s: float
    arithmetic_s: float
    link_bytes: int
    link_s: float
    growth_s: float
    staging_s: float


def _prefill_work(plan: RunPlan, machine: MachineFigures, prompt_tokens: int) -> _PrefillWork:
    target, placement = plan.target, plan.placement
    batch, flops = target.batch, machine.flops(target.dtype)
    work = [(_work(layer, prompt_tokens, prompt_tokens), count) for layer, count in _kinds(target).items()]
    product_operations = sum(count * one.product_operations for one, count in work)
    attention_operations = sum(count * one.attention_operations for one, count in work)
    slices = -(-prompt_tokens // _SLICE_ROWS)
    pieces = -(-prompt_tokens // target.chunk_tokens)
    moved_bytes = sum(target.layout.layers[layer].moved_bytes(slices, passes=pieces) for layer in target.layers)
    hbm_s = batch * moved_bytes / machine.attained_hbm
    arithmetic_s = batch * (product_operations + attention_operations / _PREFILL_ATTENTION_SHARE) / flops
    full_tokens = prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    written_bytes = batch * target.kv_bytes_of(target.kv_layers_on_host, full_tokens)
    staged_kv_bytes = batch * target.kv_bytes_of(placement.staged_kv_layers, full_tokens)
    link_bytes = batch * target.bytes_of_layers(placement.streamed_layers) + written_bytes
    link_s = link_bytes / _link_bytes_per_s(plan, machine)
    # What is staged grows as the threads that write there touch it.
    growth_s = (written_bytes - staged_kv_bytes) / (_GROWTH_GBPS * GB)
    staged_bytes = batch * target.bytes_of_layers(placement.staged_layers) + staged_kv_bytes
    staging_s = staged_bytes / (machine.staging_gbps * GB)
    return _PrefillWork(hbm_s, arithmetic_s, link_bytes, link_s, growth_s, staging_s)
