"""How long passes, drafting and prompts take on a machine: pure functions of a plan and the machine's figures.

Each layer takes the longest of its bytes from HBM and its operations; copies of later layers, and of the next pass, run
meanwhile. So a pass takes the longer of all its copies and all its compute, and the host must have launched it by then.
A step proposes, then verifies what was proposed in one pass; `step_time` is what the search of a plan, its forecast,
the controller of windows and the statistics of a run all go by.

What a kernel attains of the machine's peaks is measured on one H200 (tools/results/): the shares carry over to other
cards, the seconds come from the machine's own figures.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from offload_runtime_kernels.encoded_linear import MOST_ROWS
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS
from offload_runtime_kernels.linear import LIBRARY_ROWS

from offload_runtime.core import DraftBudget, depths_of
from offload_runtime.hardware import MachineProfile
from offload_runtime.models.layers import Attention, DecoderLayer, Work
from offload_runtime.plan.model import ModelPlan
from offload_runtime.plan.sizes import DTYPE_NAMES, RunPlan
from offload_runtime.runners.graphs import CAPTURED_ROWS, COPY_STEP_ROWS, STEP_ROWS, captured_width
from offload_runtime.sizes import GB
from offload_runtime.speculation.triforce import num_guesses
from offload_runtime.speculation.window import best_tree_tokens, expected_accepted, likely_parents
from offload_runtime.stream.device import are_blocks

# cuBLAS over 7B's weights (3.76 ms at 64 rows) and attention over 120,000 keys, both of 4.3 TB/s.
_HBM_SHARE = 0.8
# Of the rate at which products decode back to back, what they reach in a pass, between other kernels. With it an 8B in
# Q4_K_M and in Q8_0, whole on an H200, is predicted to take 5 % less and 2 % more time than it did.
_DECODE_SHARE = 0.9
# But one of them takes so long at least, behind a kernel before it: the three of Qwen3-30B-A3B's attention, of 2048 and
# 4096 columns in Q4_K and Q6_K, took 26 us of an H200.
_DECODED_PRODUCT_S = 6e-6
# Window-invariant attention: 72 to 80 of 650 TFLOP/s, whatever the heads. A prefill's: 325.
_WINDOW_ATTENTION_SHARE = 0.115
_PREFILL_ATTENTION_SHARE = 0.5
# The gated delta rule, mostly by fp32 multiply-adds, of which consumer cards do as many: operations a second in windows
# (64 rows of a 27B on an H200: 0.087 ms a layer) and in prompts (8192 tokens: 4.4 ms). A single row takes as long as
# one kernel waits for another.
_WINDOW_DELTA_FLOPS, _PREFILL_DELTA_FLOPS, _DELTA_S = 7e12, 12e12, 28e-6
# Experts, too: in windows of 1 to 64 rows 3 to 7e12 (gpt-oss-120b in MXFP4, Qwen3-30B in Q4_K_M on an H200), a single
# row 11 and 13 us more, since its chains have no others beside them; in prompts this share of what cuBLAS reaches in
# fp32, or of its peak, and where that is not known so much.
_WINDOW_EXPERT_FLOPS, _EXPERTS_S, _PREFILL_EXPERT_SHARE, _PREFILL_EXPERT_FLOPS = 5e12, 12e-6, 0.6, 30e12
# Elements of experts go through a GPU's shared memory: of the memory's rate a row of Qwen3-30B in bf16 had so much (49
# us a layer).
_EXPERT_ELEMENTS_SHARE = 0.4
# Queries of a KV head are worked on in tiles of so many rows.
_ATTENTION_TILE_ROWS = 16
# A streamed 7B pass: 21.5 ms of host work for 32 layers of 9 launches, 33.8 ms with 21.
_HOST_LAYER_S = 384e-6
_HOST_LAUNCH_S = 32e-6
# Touching and locking new host memory beside a prefill: 63 GB in at most 14 s.
_GROWTH_GBPS = 4.5
# Launches of a layer: norms, rotation, attention in two; four products. Of many rows each is done in slices, which
# read the weights once each, with sums and gates of their own. Around experts: the router's product, its choice, their
# sum, and what is added.
_LAYER_LAUNCHES = 5
_EXPERT_LAUNCHES = 4
_PRODUCTS = 4
_SLICE_ROWS, _FEWEST_SLICED_ROWS = LIBRARY_ROWS["cuda"]
_SLICED_PRODUCTS = 8
_PIECE_LAUNCHES = 3
_STEP_LAUNCHES = 12  # head, sampling, moving the window
_CHOICE_LAUNCHES = 4
# A third of the chunks change from step to step, half of them are kept by the margin of what is held.
_FETCHED_SHARE = 1 / 6
# Weights a second of what is left of bf16, decoded with its copy (H200: 190e9); Q8_0 and FP8 took as long.
_REST_WEIGHTS_PER_S = 190e9
# A kernel that has little to do, however fast one is launched behind another within a CUDA graph: a step of a 135M
# draft takes 0.6 to 0.66 ms for 282 of them.
_KERNEL_US = 2.0
# Assumed where a profile does not say: a kernel within a CUDA graph; a few rows through mapped page-locked memory,
# written by a kernel of one card and read by one of the other.
_GRAPH_LAUNCH_US, _TRANSFER_US = 2.5, 30.0
# A staged byte crosses the host's memory three times: read, written, read by the link. Two channels of DDR4-3200 carry
# 51 GB/s at best, so 17 of staged bytes; a share is left to everything else.
_STAGING_GBPS = 10.0
# Of what cores read of host memory, what link and CPU are taken to reach together.
_BOTH_SHARE = 0.8

# Of what a level proposes, the share that the next one accepts while all before are right. The retrieval verifier: 0.93
# to 0.97 (4096 of 120,000 tokens of a novel, T = 0.6). A draft of the target's family: 0.83 on code, less on prose;
# where it keeps the first and newest tokens only a tenth less, and behind long texts another tenth (0.65 on that novel;
# a model agrees with itself 0.81 of the time at 8K, 0.69 at 32K, 0.77 at 120K). N-grams: 1.2 tokens a pass (prose and
# code, T = 0 to 1.2). Those of heads, by what their proposals are counted as, are assumptions: of those that makers
# publish none was measured here; published are 0.8 of MTP layers at depth one, for which they were trained, and fewer
# behind their own rows. So is that of a model's own copy in 4 bits: rounded, of a 1.5B, it agreed on 0.86 of prose and
# 0.95 of code (T = 0.6).
USUAL_ACCEPTANCE: Mapping[str, float] = {
    "verifier": 0.95, "full": 0.8, "retrieval": 0.8, "streaming": 0.72, "streaming, far": 0.65, "n-grams": 0.15,
    "target": 0.86, "mtp": 0.6, "eagle3": 0.7, "dflash": 0.75,
}  # fmt: skip
_FAR_TOKENS = 8192
# Of what a draft's first child misses, the shares that its next ones hit: 0.11 to 0.12, 0.01 to 0.03 and 0.00 to 0.02
# of all where the first hits 0.83 to 0.84 (prose and code, T = 0.6).
_OTHER_CHILDREN = (0.7, 0.1, 0.05)
# Proposed tokens per pass when nothing is asked for. While weights are streamed a wider window costs nothing; on a CPU
# every row does. Of n-grams as many as a controller proposes within `MOST_ROWS`: windows of more take several times as
# long where encoded matrices are decoded in registers.
_DEFAULT_GAMMA = {"n-grams": 12, "draft": 8, "triforce": 12, "triforce, streamed": 24, "cpu": 7}
_GAMMA_WITH_EXPERTS = 3  # where rows bring experts of their own
# Levels of a tree that are drafted before its pass; what was drafted beside the pass before is there already. Of that,
# the share that is behind the path that came true: beside passes of 0.32 s a copy of a 13B made 28 steps of 16 nodes,
# and 3 to 22 more before the next one, 9 on average, for a window of 256 (9 tokens a pass, H200).
_PATH_STEPS, _KEPT_AHEAD = 4, 0.25
# Of the time in which the rings fill up behind a pass, what goes by until its tokens are known and, from the launch of
# the next one, until a buffer is free again: 10 ms with 200 tokens in a window, 18 with 1000 (13B shape on an H200).
_BETWEEN_S = 0.015


# --- the machine


def _hbm(machine: MachineProfile) -> float:
    """Bytes per second that kernels read."""
    assert machine.hbm_gbps is not None
    return _HBM_SHARE * machine.hbm_gbps * GB


def _link(plan: RunPlan, machine: MachineProfile) -> float:
    """Bytes per second of the link of a plan's card."""
    assert machine.link_gbps is not None
    return machine.link_gbps * plan.limits.cards[0].link_ratio * GB


def _demand(plan: RunPlan, machine: MachineProfile) -> float:
    """Bytes per second of missing experts: of the link, or of link and CPU together, whose sum host memory bounds."""
    link, host_gbps = _link(plan, machine), machine.host_gbps
    if plan.on_cpu or plan.request.cpu_share is not None or host_gbps is None:
        return link
    return max(link, _BOTH_SHARE * host_gbps * GB)


def _launch_s(machine: MachineProfile) -> float:
    """Return the seconds from kernel to kernel of a CUDA graph."""
    return max(machine.graph_launch_us or _GRAPH_LAUNCH_US, _KERNEL_US) * 1e-6


def _decode_rate(machine: MachineProfile, kind: str) -> float:
    """Weights per second that products of few rows decode in registers. A kind that was not measured is taken for the
    slowest that was; if none was, only memory bounds them."""
    rates = machine.decode_gweights_per_s
    return _DECODE_SHARE * 1e9 * rates.get(kind, min(rates.values(), default=math.inf))


def _staging(machine: MachineProfile) -> float:
    """Bytes per second of copies within host memory while the link is busy: where that was not measured, half of what
    the cores read beside it, since as much is written."""
    gbps = machine.staging_gbps
    if gbps is None and machine.host_gbps is not None and machine.link_gbps is not None:
        gbps = max(machine.host_gbps - machine.link_gbps, machine.host_gbps / 4) / 2
    return (gbps or _STAGING_GBPS) * GB


def transfers_s(plan: RunPlan, machine: MachineProfile, *, rows: int) -> float:
    """Return the seconds in which `rows` go from card to card on their way through the layers; 0 on one card."""
    target, gbps = plan.target, machine.transfer_gbps or machine.link_gbps
    assert gbps is not None
    nbytes = rows * target.config.hidden_size * target.dtype.itemsize
    owners = [0, *target.owners, 0]  # from the embedding on the first card through the layers to the head
    num_transfers = sum(one != other for one, other in pairwise(owners)) if plan.num_cards > 1 else 0
    return num_transfers * ((machine.transfer_us or _TRANSFER_US) * 1e-6 + nbytes / (gbps * GB))


def _links_s(machine: MachineProfile, nbytes: int, busiest_s: float) -> float:
    """Seconds of all links together, which read one host's memory."""
    host_gbps = sum(machine.links_at_once_gbps) or machine.host_gbps
    return busiest_s if host_gbps is None else max(busiest_s, nbytes / (host_gbps * GB))


# --- a pass of the target


@dataclass(frozen=True)
class PassTime:
    """Holds the seconds of a pass by cause, and says which of them binds: `link`, `staging`, `experts`, `HBM`,
    `arithmetic` or `launches`.

    `compute_s` sums over the layers the longer of HBM and arithmetic, with the time in which rows cross from card to
    card. `lookahead_s` of the copies run while nothing of the pass computes, until a ring is full. In `exposed_s`, of
    one card of several, keys and values come that its ring has no room for, while the others' rings may be full.
    `weight_bytes` and `kv_bytes` are those of `bytes_streamed`, `staged_bytes` what of them comes out of pageable
    memory. `expert_bytes` are brought once a layer has chosen: nothing computes in these `demand_s`.
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
    expert_bytes: int = 0
    demand_s: float = 0.0

    @property
    def bytes_streamed(self) -> int:
        """Return the bytes that go over the link."""
        return self.weight_bytes + self.kv_bytes + self.expert_bytes

    @property
    def copies_s(self) -> float:
        """Return the seconds until everything has arrived: staging and link work side by side."""
        return max(self.link_s, self.staging_s)

    @property
    def busy_s(self) -> float:
        """Return the seconds that the device works, or the host that launches its work, if that takes longer."""
        return max(self.compute_s, self.launch_s)

    @property
    def seconds(self) -> float:
        """Return the seconds from pass to pass."""
        return max(self.copies_s, self.busy_s) + self.demand_s

    @property
    def bound_by(self) -> str:
        """Return what takes all of it."""
        causes = {"link": self.link_s, "staging": self.staging_s, "launches": self.launch_s}
        causes["experts"] = self.demand_s
        causes["HBM" if self.hbm_s >= self.arithmetic_s else "arithmetic"] = self.compute_s
        return max(causes, key=causes.__getitem__)  # the first of equals


def pass_time(plan: RunPlan, machine: MachineProfile, *, length_tokens: int, rows: int) -> PassTime:
    """Return the times of a pass of the target over windows of `rows` tokens behind `length_tokens` committed ones in
    every sequence, the ring of copies running across passes. Several cards copy side by side, and compute one after the
    other."""
    if plan.num_cards > 1:
        return _pass_of_cards(plan, machine, length_tokens=length_tokens, rows=rows)
    target, placement, batch = plan.target, plan.placement, plan.target.batch
    captured = plan.captured_bytes > 0 and batch * captured_width(rows) <= CAPTURED_ROWS
    height = batch * (captured_width(rows) if captured else rows)
    # What crosses the link.
    streamed = target.streamed_kv(length_tokens)
    weight_bytes, kv_bytes = target.bytes_over_link(placement.streamed_layers), sum(streamed.values())
    staged_bytes = target.bytes_over_link(placement.staged_layers)
    staged_bytes += sum(streamed[layer] for layer in placement.staged_kv_layers)
    pieces, link = sum(map(target.kv_pieces, streamed.values())), _link(plan, machine)
    link_s, staging_s = (weight_bytes + kv_bytes) / link, staged_bytes / _staging(machine)
    exposed_bytes = sum(max(0, nbytes - target.kv_ring_bytes) for nbytes in streamed.values())
    expert_bytes = target.missed_bytes(batch * rows)  # none for rows that fill up a graph
    # What computes: the longer of HBM and arithmetic, of the matrices and of each layer's attention.
    stages, others = _matrix_stages(plan, target, machine, height)
    stages.append((1, *_bases_s(target, machine)))
    for layer, count in _kinds(target).items():
        work = _work(layer, rows, length_tokens + rows)
        operations = batch * work.attention_operations * _filled_up(layer, rows)
        kv_s = batch * work.kv_elements * target.dtype.itemsize / _hbm(machine)
        stages.append((count, kv_s, _attention_s(layer, operations, machine.flops(DTYPE_NAMES[target.dtype]))))
    layers = len(target.layers)
    products = _PRODUCTS if height < _FEWEST_SLICED_ROWS else _SLICED_PRODUCTS * -(-height // _SLICE_ROWS)
    launches = layers * (_LAYER_LAUNCHES + products) + _PIECE_LAUNCHES * pieces + others
    stages.append((launches, _launch_s(machine), 0.0))  # of the device, from kernel to kernel
    return PassTime(
        weight_bytes, kv_bytes, staged_bytes, link_s,
        hbm_s=sum(count * hbm_s for count, hbm_s, _ in stages),
        arithmetic_s=sum(count * arithmetic_s for count, _, arithmetic_s in stages),
        compute_s=sum(count * max(hbm_s, arithmetic_s) for count, hbm_s, arithmetic_s in stages),
        launch_s=0.0 if captured else layers * _HOST_LAYER_S + launches * _HOST_LAUNCH_S, staging_s=staging_s,
        # At the pace of all copies, which staging may keep below the link's. The share first: it rounds to at most 1.
        lookahead_s=max(link_s, staging_s) * (_bytes_ahead(target, streamed) / max(1, weight_bytes + kv_bytes)),
        exposed_s=exposed_bytes / link, expert_bytes=expert_bytes,
        demand_s=expert_bytes / _demand(plan, machine),
    )  # fmt: skip


def _bytes_ahead(target: ModelPlan, streamed_kv: Mapping[int, int]) -> int:
    """Bytes that come before a pass of one card begins: one queue brings weights and pieces of keys and values, layer
    by layer, and waits as soon as one of the two rings has no buffer for the next."""
    placement, nbytes = target.placement, 0
    buffers, kv_buffers = placement.num_buffers, placement.kv_ring_buffers
    for layer in target.layers:
        if layer in placement.streamed_layers:
            if not buffers:
                break
            buffers, nbytes = buffers - 1, nbytes + target.bytes_over_link((layer,))
        if kv_bytes := streamed_kv.get(layer):
            pieces = target.kv_pieces(kv_bytes)
            nbytes += kv_bytes * min(pieces, kv_buffers) // pieces
            if pieces > kv_buffers:
                break
            kv_buffers -= pieces
    return nbytes


def _pass_of_cards(plan: RunPlan, machine: MachineProfile, *, length_tokens: int, rows: int) -> PassTime:
    """The pass that the passes over each card's layers make together."""
    cards = [pass_time(card, machine, length_tokens=length_tokens, rows=rows) for card in plan.cards]
    names = (
        "weight_bytes", "kv_bytes", "staged_bytes", "hbm_s", "arithmetic_s", "launch_s", "staging_s", "expert_bytes",
        "demand_s",
    )  # fmt: skip
    sums = {name: sum(getattr(card, name) for card in cards) for name in names}
    transfer_s = transfers_s(plan, machine, rows=plan.target.batch * rows)
    links_s = _links_s(machine, sum(card.bytes_streamed for card in cards), max(card.link_s for card in cards))
    copies_s = max(links_s, sums["staging_s"])
    return PassTime(
        **sums, link_s=max(links_s, sum(card.exposed_s for card in cards)),
        compute_s=sum(card.compute_s for card in cards) + transfer_s,
        # What delays no card's copies: of one that has less to copy, also what it waits for the others.
        lookahead_s=min(card.lookahead_s + copies_s - card.copies_s for card in cards),
    )  # fmt: skip


def _matrix_stages(
    plan: RunPlan, model: ModelPlan, machine: MachineProfile, height: int
) -> tuple[list[tuple[int, float, float]], int]:
    """The products of all matrices with `height` rows.

    Returns:
        How often, and each time the seconds of HBM and of arithmetic, of which the longer one counts: what few rows
        decode in registers takes as long as reading what is stored, or as decoding it. And how many kernels there are
        beside those of dense layers in elements: what decodes matrices into memory, and what is around experts.
    """
    slices, hbm = -(-height // _SLICE_ROWS), _hbm(machine)
    element_s = 2 * height / machine.flops(DTYPE_NAMES[model.dtype])
    in_registers = height <= MOST_ROWS and not plan.on_cpu
    stages, others = list[tuple[int, float, float]](), 0
    for block, count in model.placed_layout.multiplied(model.layers, head=model.has_head):
        for read in block.register_reads if in_registers else ():
            decoding_s = max(read.weights / _decode_rate(machine, read.kind), read.launches * _DECODED_PRODUCT_S)
            stages.append((count, read.nbytes / hbm, max(decoding_s, read.weights * element_s)))
        rest = block.without_register_reads if in_registers else block
        moved_bytes = rest.moved_bytes(slices, rows=height, expert_passes=0)
        stages.append((count, moved_bytes / hbm, rest.matrix_elements * element_s))
        if (of := block.experts) is not None:
            share = 1.0 if of.block.encoded_bytes or plan.on_cpu else _EXPERT_ELEMENTS_SHARE
            products_s = 2 * height * of.chosen * of.block.matrix_elements / _WINDOW_EXPERT_FLOPS
            stages.append((count, of.used(height) * of.block.total_bytes / (share * hbm), _EXPERTS_S + products_s))
        others += count * (rest.num_decodings + (_EXPERT_LAUNCHES if block.experts else 0))
    return stages, others


def _bases_s(target: ModelPlan, machine: MachineProfile) -> tuple[float, float]:
    """Seconds of HBM and of arithmetic in which a pass decodes what is left of streamed layers, besides those of what
    is streamed and of what comes of it: their copies are read, too."""
    if target.rest is None:
        return 0.0, 0.0
    streamed = target.placement.streamed_layers
    weights = sum(target.layout.layers[layer].matrix_elements for layer in streamed)
    return target.copied_bytes(streamed) / _hbm(machine), weights / _REST_WEIGHTS_PER_S


def _kinds(model: ModelPlan) -> Counter[DecoderLayer]:
    """The layers that a plan is about, which are of a few kinds, and how many there are of each."""
    return Counter(map(model.config.layers.__getitem__, model.layers))


@lru_cache(maxsize=4096)
def _work(layer: DecoderLayer, rows: int, context: int) -> Work:
    """What a layer declares, which plans ask for many times."""
    return layer.work(rows, context)


def _attention_s(layer: DecoderLayer, operations: float, flops: float, *, in_prompt: bool = False) -> float:
    """Seconds of what a layer does with other rows than its own, where products of matrices reach so many `flops`."""
    if isinstance(layer.attention, Attention):
        return operations / ((_PREFILL_ATTENTION_SHARE if in_prompt else _WINDOW_ATTENTION_SHARE) * flops)
    return _DELTA_S + operations / (_PREFILL_DELTA_FLOPS if in_prompt else _WINDOW_DELTA_FLOPS)


def _filled_up(layer: DecoderLayer, rows: int) -> float:
    """How many times the queries of a window are what they are once filled up to whole tiles."""
    attention = layer.attention
    if not isinstance(attention, Attention):
        return 1.0
    queries = rows * attention.num_heads // attention.num_kv_heads
    return -(-queries // _ATTENTION_TILE_ROWS) * _ATTENTION_TILE_ROWS / queries


# --- drafting


def draft_step_s(plan: RunPlan, machine: MachineProfile, *, rows: int = 1) -> float:
    """Return the seconds of one step of the draft, for all sequences of a batch together, of at least `rows`; 0 without
    one."""
    draft = plan.draft
    if draft is None:
        return 0.0
    kept = draft.context_tokens
    if draft.cache == "streaming":
        kept = draft.options.sink_tokens + draft.recent_tokens
    elif draft.cache == "retrieval":
        kept = min(kept, draft.options.budget_tokens + 2 * BLOCK_TOKENS)
    kv_bytes, rows = draft.batch * kept * draft.kv_bytes_of(draft.layers, 1), max(rows, draft.batch)
    of_experts = sum(one.used(rows) * one.block.total_bytes for one in plan.target.head_experts)
    demand_s = of_experts * (1 - plan.target.expected_hits) / _demand(plan, machine)
    crossing_s = transfers_s(plan, machine, rows=rows) if draft.is_copy else 0.0
    return _step_s(plan, draft, machine, rows=rows, kv_bytes=kv_bytes) + crossing_s + demand_s


def verifier_step_s(plan: RunPlan, machine: MachineProfile) -> float:
    """Return the seconds of one step of the retrieval verifier that a plan has, for all sequences of a batch together,
    with its share of choosing and fetching chunks."""
    target, batch, options = plan.target, plan.target.batch, plan.target.options
    refresh_steps = options.steps_between_choices(on_host=target.on_host)
    rows = batch * (1 + len(guess_parents(plan, batch)))
    token_bytes, found_s = batch * target.kv_bytes_of(target.layers, 1), transfers_s(plan, machine, rows=rows)
    held_bytes, recent_bytes = options.budget_tokens * token_bytes, 2 * BLOCK_TOKENS * token_bytes
    fetched_bytes = _FETCHED_SHARE * held_bytes / refresh_steps if target.on_host else 0
    kv_bytes = held_bytes + recent_bytes + target.summaries_bytes // refresh_steps
    launches = _CHOICE_LAUNCHES // refresh_steps
    step_s = _step_s(plan, target, machine, rows=rows, kv_bytes=kv_bytes, choice_launches=launches)
    return found_s + fetched_bytes / _link(plan, machine) + step_s


def _step_s(
    plan: RunPlan, model: ModelPlan, machine: MachineProfile, *, rows: int, kv_bytes: int, choice_launches: int = 0
) -> float:
    """Seconds of a step of `rows` tokens, which is one CUDA graph."""
    stages, others = _matrix_stages(plan, model, machine, rows)
    compute_s = sum(count * max(hbm_s, arithmetic_s) for count, hbm_s, arithmetic_s in stages)
    launches = len(model.layers) * (_LAYER_LAUNCHES + _PRODUCTS + choice_launches) + _STEP_LAUNCHES + others
    deltas_s = _DELTA_S * sum(layer in model.config.deltas for layer in model.layers)
    return compute_s + kv_bytes / _hbm(machine) + deltas_s + launches * _launch_s(machine)


def drafting_s(plan: RunPlan, machine: MachineProfile, *, gamma: int, tree_nodes: int = 0) -> float:
    """Return the seconds of proposing for one pass `gamma` tokens in a row, or a tree of `tree_nodes`; n-grams take
    none."""
    if plan.draft is not None and plan.draft.block_rows:
        return draft_step_s(plan, machine, rows=plan.draft.batch * plan.draft.block_rows)
    draft_s = draft_step_s(plan, machine)
    if tree_nodes:
        # One for every level of the most probable path that is not there yet, and one for every so many nodes.
        rows = COPY_STEP_ROWS if plan.draft is not None and plan.draft.is_copy else STEP_ROWS
        return _PATH_STEPS * draft_s + tree_nodes / rows * draft_step_s(plan, machine, rows=rows)
    if not plan.has_verifier:
        return gamma * draft_s
    parents = guess_parents(plan, plan.target.batch)
    verifier_steps = gamma / (1 + expected_accepted(parents, usual_acceptance(plan.draft)))
    num_levels = max(depths_of(parents), default=-1) + 1
    return verifier_steps * (verifier_step_s(plan, machine) + num_levels * draft_s)


def drafting_ahead_s(plan: RunPlan, machine: MachineProfile, verify: PassTime, *, tree_nodes: int) -> float:
    """Return the seconds of that which pass beside the pass before, while that waits for the link: trees grow there,
    but on a CPU, or where steps bring experts themselves."""
    draft = plan.draft
    if draft is None or draft.block_rows or plan.on_cpu or plan.target.pool_share < 1:
        return 0.0
    rows = COPY_STEP_ROWS if draft.is_copy else STEP_ROWS
    grown_s = tree_nodes / rows * draft_step_s(plan, machine, rows=rows)
    return min(grown_s, _KEPT_AHEAD * max(0.0, verify.copies_s - verify.compute_s))


# --- how much is proposed, and accepted


def usual_acceptance(draft: ModelPlan | None) -> float:
    """Return the share of a draft's proposals that is accepted at its full context; None stands for n-grams."""
    if draft is None:
        return USUAL_ACCEPTANCE["n-grams"]
    if draft.is_head:
        return USUAL_ACCEPTANCE[draft.config.name]
    far = draft.cache == "streaming" and draft.context_tokens > _FAR_TOKENS
    return USUAL_ACCEPTANCE["streaming, far" if far else draft.cache]


def guess_parents(plan: RunPlan, batch: int) -> tuple[int, ...]:
    """Return the tree that the draft proposes to a step of the retrieval verifier for each of `batch` sequences; no
    nodes without either."""
    if plan.draft is None or not plan.has_verifier:
        return ()
    return likely_parents(num_guesses(plan.draft.options.gamma_draft, batch), usual_acceptance(plan.draft))


def tree_nodes(plan: RunPlan) -> int:
    """Nodes of the trees that are proposed; 0 for chains."""
    if plan.draft is None or plan.has_verifier:
        return 0
    return min(plan.draft.tree_nodes, max(0, plan.target.context_tokens - 2))


def gamma(plan: RunPlan) -> int:
    """Return how many tokens are proposed for a pass in a row, at most what the context has room for."""
    request, who = plan.request, "n-grams" if plan.draft is None else "draft"
    if plan.drafter == "none" and not plan.has_verifier:
        return 0
    if plan.has_verifier:
        who = "triforce, streamed" if plan.target.on_host else "triforce"
    usual = _DEFAULT_GAMMA["cpu" if plan.on_cpu else who]
    if plan.target.pool_share < 1:
        usual = min(usual, _GAMMA_WITH_EXPERTS)
    chosen = request.gamma or (request.max_gamma if tree_nodes(plan) else usual)
    if plan.draft is not None and plan.draft.block_rows:
        chosen = min(chosen, plan.draft.block_rows - 1)
    return max(0, min(chosen, request.max_gamma, plan.target.context_tokens - 2))


# --- a step: proposals and the pass that verifies them


@dataclass(frozen=True)
class StepPrediction:
    """A step at some acceptance: `tokens` of each sequence, `tok_per_s` of all of them.

    `hidden_s` of `drafting_s` pass beside the pass before, or while the ring fills. `bound_by` is `drafting` where the
    rest of it takes longer than the pass.
    """

    acceptance: float
    tokens: float
    drafting_s: float
    hidden_s: float
    seconds: float
    tok_per_s: float
    bound_by: str


def step_time(verify: PassTime, drafting_s: float) -> float:
    """Return the seconds of a step that proposes for `drafting_s`, some of which pass while the rings fill and delay no
    copy."""
    planned_s = max(verify.copies_s + max(0.0, drafting_s - verify.lookahead_s), verify.busy_s + drafting_s)
    return planned_s + verify.demand_s


def predicted_step_s(
    plan: RunPlan, machine: MachineProfile, budget: DraftBudget, num_sequences: int, length_tokens: int
) -> float:
    """Return the seconds of a step of so many sequences of `length_tokens` each, to each of which so much is
    proposed."""
    draft, rows = plan.draft and replace(plan.draft, batch=num_sequences), 1 + budget.size
    plan = replace(plan, target=replace(plan.target, batch=num_sequences), draft=draft)
    length_tokens = max(0, min(length_tokens, plan.target.context_tokens - rows))
    verify = pass_time(plan, machine, length_tokens=length_tokens, rows=rows)
    nodes = budget.size if budget.mode == "tree" else 0
    proposing_s = drafting_s(plan, machine, gamma=budget.size, tree_nodes=nodes) if budget.drafts else 0.0
    return step_time(verify, proposing_s - drafting_ahead_s(plan, machine, verify, tree_nodes=nodes))


def full_pass(plan: RunPlan, machine: MachineProfile, *, rows: int = 1) -> PassTime:
    """Return the times of a pass over windows of `rows` tokens at the end of the full context."""
    return pass_time(plan, machine, length_tokens=plan.target.context_tokens - rows, rows=rows)


def predict_step(plan: RunPlan, machine: MachineProfile, acceptance: float | None = None) -> StepPrediction:
    """Return how fast tokens come at the full context, all sequences of a batch together, where the target accepts each
    proposal with a probability of `acceptance`, None for what is usual of who proposes."""
    if acceptance is None:
        acceptance = USUAL_ACCEPTANCE["verifier"] if plan.has_verifier else usual_acceptance(plan.draft)
    nodes, depth = tree_nodes(plan), gamma(plan)
    verify = full_pass(plan, machine, rows=(nodes or depth) + 1)
    # The best tree of a draft whose first child is right so often, and whose others are as often as they usually are.
    hits = (acceptance, *((1 - acceptance) * share for share in _OTHER_CHILDREN))
    tokens = best_tree_tokens(hits if nodes else hits[:1], nodes or depth, depth)
    proposing_s = drafting_s(plan, machine, gamma=depth, tree_nodes=nodes)
    ahead_s = drafting_ahead_s(plan, machine, verify, tree_nodes=nodes)
    seconds = step_time(verify, proposing_s - ahead_s)
    return StepPrediction(
        acceptance, tokens, proposing_s, ahead_s + min(proposing_s - ahead_s, verify.lookahead_s), seconds,
        tok_per_s=plan.target.batch * tokens / seconds,
        bound_by="drafting" if seconds - verify.seconds > verify.seconds else verify.bound_by,
    )  # fmt: skip


def tok_per_s(plan: RunPlan, machine: MachineProfile) -> float:
    """Return the tokens per second at the usual acceptance: what plans are compared by.

    Who proposes decides as much as the bytes of a pass do, since every proposal that is accepted saves one. Where rows
    bring experts of their own that may cost more than it brings, and nothing is proposed.
    """
    proposed = predict_step(plan, machine).tok_per_s
    if plan.target.pool_share == 1:
        return proposed
    return max(proposed, plan.target.batch / full_pass(plan, machine).seconds)


def link_slack(plan: RunPlan, machine: MachineProfile, *, widest: int = 0) -> tuple[float, int]:
    """Return what costs nothing beside a link that is busy with passes over a streamed target.

    Args:
        plan: What lives where.
        machine: Where.
        widest: Rows of the widest window, if it is wider than what is usual.

    Returns:
        Seconds behind a pass in which drafting delays nothing, as the link brings what the next one begins with; rows
        of a sequence in a pass up to which nothing takes longer than the link, 0 where something always does.
    """

    def slack_s(rows: int) -> float:
        time = full_pass(plan, machine, rows=rows)
        return time.busy_s - time.copies_s

    if plan.target.pool_share < 1:  # whose misses every further row adds to
        return 0.0, 0
    widest = max(widest, tree_nodes(plan) + 1, gamma(plan) + 1)
    # Windows of sizes like these are what is proposed.
    rows = [*range(1, min(widest, 32)), *range(32, widest, 32), widest]
    bound = bisect_right(rows, 0.0, key=slack_s)
    return max(0.0, full_pass(plan, machine).lookahead_s - _BETWEEN_S), rows[bound - 1] if bound else 0


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


def _prefill_expert_flops(machine: MachineProfile) -> float:
    """Operations a second of experts in prompts."""
    tflops = machine.tflops.get("fp32")
    return _PREFILL_EXPERT_FLOPS if tflops is None else _PREFILL_EXPERT_SHARE * tflops * 1e12


def prefill_time(plan: RunPlan, machine: MachineProfile, prompt_tokens: int) -> PrefillTime:
    """Prompts of `prompt_tokens` in every sequence, one after the other. The link is taken to carry both directions
    one after the other. Several cards are taken to work on different pieces of a prompt at a time, which nothing has
    measured: without gaps where layers are in turn; where they are in blocks, a card waits for the first piece."""
    target, batch, cards = plan.target, plan.target.batch, plan.cards
    slices, pieces = -(-prompt_tokens // _SLICE_ROWS), -(-prompt_tokens // target.chunk_tokens)
    hbm_s = arithmetic_s = compute_s = link_s = growth_s = staging_s = 0.0
    link_bytes = 0
    for card in cards:
        own, placement = card.target, card.placement
        blocks = map(own.placed_layout.layers.__getitem__, own.layers)
        expert_pieces = -(-prompt_tokens // max(own.chunk_tokens, own.expert_tokens))
        moved_bytes = sum(
            block.moved_bytes(slices, rows=prompt_tokens, passes=pieces, expert_passes=expert_pieces)
            for block in blocks
        )
        bases_s = _bases_s(own, machine)
        flops, expert_flops, own_s = machine.flops(DTYPE_NAMES[own.dtype]), _prefill_expert_flops(machine), 0.0
        for layer, count in _kinds(own).items():
            work = _work(layer, prompt_tokens, prompt_tokens)
            around_s = _attention_s(layer, work.attention_operations, flops, in_prompt=True)
            own_s += count * (work.product_operations / flops + work.expert_operations / expert_flops + around_s)
        card_hbm_s = batch * (moved_bytes / _hbm(machine) + pieces * bases_s[0])
        card_s = batch * (own_s + pieces * bases_s[1])
        hbm_s, arithmetic_s, compute_s = hbm_s + card_hbm_s, arithmetic_s + card_s, compute_s + max(card_hbm_s, card_s)
        full_tokens = prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        written_bytes = batch * own.kv_bytes_of(own.kv_layers_on_host, full_tokens)
        staged_kv_bytes = batch * own.kv_bytes_of(placement.staged_kv_layers, full_tokens)
        brought_bytes = own.bytes_over_link(placement.streamed_layers) + own.missed_bytes_of_prompt(expert_pieces)
        own_bytes = batch * brought_bytes + written_bytes
        link_bytes, link_s = link_bytes + own_bytes, max(link_s, own_bytes / _link(card, machine))
        # What is staged grows as the threads that write there touch it.
        growth_s += (written_bytes - staged_kv_bytes) / (_GROWTH_GBPS * GB)
        staging_s += (batch * own.bytes_over_link(placement.staged_layers) + staged_kv_bytes) / _staging(machine)
    abreast = len(cards) * pieces / (pieces + len(cards) - 1) if are_blocks(target.owners) else min(len(cards), pieces)
    compute_s = (compute_s + batch * transfers_s(plan, machine, rows=prompt_tokens)) / abreast
    if len(cards) > 1:
        link_s = _links_s(machine, link_bytes, link_s)
    causes = {"HBM" if hbm_s >= arithmetic_s else "arithmetic": compute_s, "link": link_s, "staging": staging_s}
    causes["host memory"] = growth_s
    # Layers grow ahead of the one that is computed; what the first is written to has to be there first.
    seconds = growth_s / target.config.num_layers + max(compute_s, link_s, staging_s, growth_s)
    return PrefillTime(link_bytes, link_s, compute_s, growth_s, seconds, max(causes, key=causes.__getitem__), staging_s)
