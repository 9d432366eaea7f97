"""Logits to tokens: the last step of every pass, of draft and target alike, as a pure function.

    token = argmax over allowed v of  logits[v] / T + gumbel(seed, noise_id, position, v)          (T = 0: plain argmax)

The noise and the argmax live in `offload_runtime_kernels.gumbel_argmax`. What they depend on besides the logits belongs
to the request that holds a row's slot: `SlotSampling`. Logit bias and penalties come first, then the mask of a
grammar (`grammar.py`), then after the temperature the filters that say which tokens are allowed: top-k, then top-p,
then min-p, in transformers' order. Floating sums depend on their order and therefore on the device,
so the filters weigh tokens by integers: floor(exp(scaled - max) * 2^40), with an exponential of IEEE-exact operations
and sums in int64. The CPU and the GPU then allow the same tokens, always.

Before the temperature come a request's logit bias, and its penalties for tokens that it has already, in vLLM's order:

    x[v] += bias[v]
    x[v]  = x[v] / r  if x[v] > 0 else  x[v] * r,     for v in prompt or answer           (repetition, CTRL)
    x[v] -= frequency * (times that v is in the answer)  +  presence * (v is in the answer)

The answer of a row ends where the row's token is chosen: the tokens that are known, and then those of
the row's own path through its window. So a row's logits are those of plain decoding, whatever else is proposed. Before
an answer has as many tokens as it must have, what would end it is -inf. Counts are integers
and everything else is IEEE-exact, each operation rounded by itself, so that the CPU and the GPU have the same bits.

All of this is enqueued on the current stream, nothing synchronises with the host, and no shape depends on data, so that
a draft step can be captured in a CUDA graph. Only log-probabilities, where they are asked for, are waited for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from offload_runtime_kernels import gumbel_argmax as noise_ops
from torch import Tensor

from offload_runtime.grammar import GrammarMatcher, masked
from offload_runtime.params import MOST_BIASED, SamplingParams
from offload_runtime.stream.device import overwrite, pack, unpack, upload


class LogitAdjustments:
    """Bias and penalties of every slot, and how often each slot's tokens occur.

    The counts take 5 bytes a slot and entry of the vocabulary on the device, from the first penalty on.

    Args:
        num_slots: How many there are; none has any until it is assigned.
        device: Where the logits are.

    Attributes:
        first_ends: By slot whose answer must have some tokens, the position from which on it may end, and what it ends
            with. It binds the target alone, as penalties do.
        biased: Whether any slot has a bias. Its tensors never move, so that CUDA graphs may hold them.
        penalised: Whether any slot has penalties. Those are never part of a graph.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.biased = self.penalised = False
        self.first_ends: dict[int, tuple[int, Tensor]] = {}
        self._num_slots, self._device = num_slots, device
        self._of_slots: dict[int, SamplingParams] = {}  # of those that are held
        self._repeats = False  # whether any slot has a repetition penalty
        self._bias: tuple[Tensor, Tensor] | None = None  # [S, MOST_BIASED] int32 tokens and fp32 biases, 0 behind them
        self._penalties: Tensor | None = None  # [S, 3] fp32: repetition, frequency, presence
        self._counts: tuple[Tensor, Tensor] | None = None  # [S, V]: int32 times in the answer; bool in the prompt
        self._num_seen: dict[int, int] = {}  # by slot, tokens that are counted or wait for it
        self._new_prompts: dict[int, set[int]] = {}
        self._new_tokens: dict[int, list[int]] = {}

    def assign(self, slot: int, params: SamplingParams) -> None:
        """Give these to a slot from here on; what is counted of it stays until it begins anew. Enqueued on the current
        stream."""
        self._of_slots[slot] = params
        self._look_at_slots()
        if params.biases and self._bias is None:
            shape = self._num_slots, MOST_BIASED
            self._bias = _zeros(shape, torch.int32, self._device), _zeros(shape, torch.float32, self._device)
        if self._bias is not None:
            for kept, item in zip(self._bias, (0, 1), strict=True):
                row = [pair[item] for pair in params.biases] + [0] * (MOST_BIASED - len(params.biases))
                overwrite(kept[slot], torch.tensor(row, dtype=kept.dtype))
        if params.penalised and self._penalties is None:
            self._penalties = _zeros((self._num_slots, 3), torch.float32, self._device)
            self._penalties[:, 0] = 1.0
        if self._penalties is not None:
            each = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            overwrite(self._penalties[slot], torch.tensor(each, dtype=torch.float32))

    def forbid_ends(self, slot: int, before: int, tokens: Collection[int]) -> None:
        """A slot's answer may not have any of these tokens at positions below `before`."""
        self.first_ends[slot] = before, upload(torch.tensor(sorted(tokens), dtype=torch.int64), self._device)

    def release(self, slot: int) -> None:
        """Note that nobody holds a slot any more."""
        self._of_slots.pop(slot, None)
        self.first_ends.pop(slot, None)
        for kept in (self._num_seen, self._new_prompts, self._new_tokens):
            kept.pop(slot, None)
        self._look_at_slots()

    def _look_at_slots(self) -> None:
        self.biased = any(one.biases for one in self._of_slots.values())
        self.penalised = any(one.penalised for one in self._of_slots.values())
        self._repeats = any(one.repetition_penalty != 1 for one in self._of_slots.values())

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        """A slot's sequence begins with these tokens, which are none of its answer."""
        if self._of_slots[slot].penalised:
            self._num_seen[slot] = len(prompt)
            self._new_prompts[slot], self._new_tokens[slot] = set(prompt), []

    def see(self, slot: int, tokens: Sequence[int]) -> None:
        """A slot's whole sequence, which has grown; what is new is of its answer."""
        if self._of_slots[slot].penalised:
            assert slot in self._num_seen, "penalties are counted from the prompt on"
            self._new_tokens[slot] += tokens[self._num_seen[slot] :]
            self._num_seen[slot] = len(tokens)

    def apply(
        self, logits: Tensor, slots: Tensor, paths: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Return logits as they are sampled from.

        Args:
            logits: [R, V] bf16, fp16 or fp32; stays as it is.
            slots: [R] int32/int64.
            paths: [R, A] int32: what the sequence goes on with behind the tokens that were seen, to each row; -1 where
                there is less. None leaves penalties out.
            positions: [R] of the tokens being chosen; None lets answers end.

        Returns:
            [R, V] fp32, or `logits` where nobody has bias or penalties.
        """
        if self.biased:
            logits = self._with_bias(logits.float(), slots.long())
        if self.penalised and paths is not None:
            logits = self._with_penalties(logits.float(), slots.long(), paths)
        if positions is not None:
            for slot, (before, tokens) in self.first_ends.items():
                is_early = (slots == slot).logical_and_(positions < before)[:, None]
                ends = logits.index_select(1, tokens).masked_fill(is_early, -torch.inf)
                logits = logits.index_copy(1, tokens, ends)
        return logits

    def _with_bias(self, logits: Tensor, slots: Tensor) -> Tensor:
        assert self._bias is not None
        tokens, biases = self._bias[0][slots].long(), self._bias[1][slots]  # [R, MOST_BIASED]
        last = logits.shape[1] - 1  # of a draft, which may have fewer tokens than the target
        return logits.scatter_add(1, tokens.clamp_max(last), biases.masked_fill(tokens > last, 0.0))

    def _with_penalties(self, logits: Tensor, slots: Tensor, paths: Tensor) -> Tensor:
        """At most 22 bytes a logit besides the logits, where plans have 24 for rows that are sampled together."""
        assert self._penalties is not None
        answered, prompted = self._counted(logits.shape[1])
        repetition, frequency, presence = self._penalties[slots].split(1, dim=1)  # [R, 1]
        counts = answered[slots].scatter_add_(1, paths.clamp_min(0).long(), (paths >= 0).int())  # [R, V]
        if self._repeats:
            found = prompted[slots].logical_or_(counts > 0)
            # A tensor divides a tensor: by a number CUDA would multiply with its inverse.
            penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(found, penalised, logits)
            del found, penalised
        # The product is rounded before it is subtracted, as nothing fuses the two.
        logits = logits - counts * frequency
        return logits.sub_((counts > 0) * presence)

    def _counted(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Counts of all tokens that were seen, in one upload where some are new."""
        if self._counts is None:
            shape = self._num_slots, vocab_size
            self._counts = _zeros(shape, torch.int32, self._device), _zeros(shape, torch.bool, self._device)
        answered, prompted = self._counts
        for slot in self._new_prompts:
            answered[slot].zero_()
            prompted[slot].zero_()
        of_prompts = [slot * vocab_size + token for slot, new in self._new_prompts.items() for token in new]
        of_answers = [slot * vocab_size + token for slot, new in self._new_tokens.items() for token in new]
        if of_prompts or of_answers:
            sizes = [len(of_prompts), len(of_answers)]
            marked, counted = unpack(upload(pack([of_prompts, of_answers]), self._device), sizes)
            prompted.view(-1).index_fill_(0, marked.long(), True)
            answered.view(-1).scatter_add_(0, counted.long(), torch.ones_like(counted))
        self._new_prompts, self._new_tokens = {}, {slot: [] for slot in self._num_seen}
        return self._counts


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that may be written to in inference mode and outside of it, wherever it is made."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


# A weight of 2^40 for the most likely token resolves probabilities of 1e-12, and 2^22 such tokens still fit an int64.
_WEIGHT_BITS = 40
_MAX_VOCAB_SIZE = 1 << 22
# Ways to sample of which each runs kernels of its own.
WARM_UP_SAMPLINGS = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))
# Rows that are filtered together when a token is chosen for each.
MOST_FILTERED_ROWS = 32
_LEAST_PART_ROWS = 2
# Below exp(-30) a weight is less than 2^-3, that is 0.
_LOWEST_EXPONENT = -30.0
_LOG2_E = 1.4426950216293335
# log(2) = hi + lo; hi has 10 bits, so the product with a small integer is exact.
_LN2_HI = 0.693359375
_LN2_LO = -0.00021219444170128554
# Minimax fit of (exp(r) - 1 - r) / r^2 on |r| <= log(2) / 2, error 3e-9 of exp(r), rounded to fp32.
_EXP_Q = (0.5, 0.1666651964187622, 0.04166620597243309, 0.008368886075913906, 0.0013950448483228683)


def _weights(scaled: Tensor, maximum: Tensor) -> Tensor:
    """floor(exp(scaled - maximum) * 2^40): scaled [R, N] fp32, maximum [R, 1] fp32 -> [R, N] int64.

    A row with NaN or an infinite maximum gets the weights 0 and 2^40 only: what a NaN becomes as an integer differs
    between devices.
    """
    difference = torch.where(scaled < maximum, scaled - maximum, 0.0).clamp_min_(_LOWEST_EXPONENT)
    exponent = (difference * _LOG2_E).round_()
    r = difference.sub_(exponent * _LN2_HI).sub_(exponent * _LN2_LO)
    q = r * _EXP_Q[-1]
    for coefficient in _EXP_Q[-2:0:-1]:
        q.add_(coefficient).mul_(r)
    value = q.add_(_EXP_Q[0]).mul_(r).mul_(r).add_(r).add_(1.0)
    # 2^(exponent + 40) made from its bits, a power of two whose product is exact.
    power = exponent.to(torch.int32).add_(127 + _WEIGHT_BITS).bitwise_left_shift_(23).view(torch.float32)
    return value.mul_(power).to(torch.int64)


def _smallest_allowed(scaled: Tensor, maximum: Tensor, params: SamplingParams) -> Tensor:
    """Threshold of top-k, then top-p: scaled [R, V] fp32, maximum [R, 1] fp32 -> [R, 1] fp32, ties with it included."""
    vocab_size = scaled.shape[1]
    kept = min(params.top_k or vocab_size, vocab_size)
    ordered = scaled.topk(kept, dim=1).values if kept < vocab_size else scaled.sort(dim=1, descending=True).values
    if params.top_p == 1:
        return ordered[:, -1:]
    # Ties with the k-th largest are part of the total too, and are not all in `ordered`.
    total = _weights(scaled, maximum).mul_(scaled >= ordered[:, -1:]).sum(dim=1, keepdim=True)
    # One fp64 product, correctly rounded wherever it is computed; rounding up must not ask for more than there is.
    required = total.double().mul_(params.top_p).ceil_().to(torch.int64).minimum(total)
    before_cutoff = _weights(ordered, maximum).cumsum(dim=1) < required
    cutoff = before_cutoff.sum(dim=1, keepdim=True).clamp_max_(kept - 1)
    return ordered.gather(1, cutoff)


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Set to -inf what top-k, top-p and min-p exclude; bit for bit the same on the CPU and on CUDA.

    logits: [R, V] fp32, -inf for tokens excluded already. At a threshold all ties are kept, and always one token.
    Returns [R, V] fp32: the logits as they were (not scaled) where allowed. A row with NaN is returned unchanged.
    """
    assert logits.ndim == 2 and logits.dtype == torch.float32, f"logits: [R, V] fp32, not {logits.dtype}"
    assert logits.shape[1] <= _MAX_VOCAB_SIZE, f"a vocabulary of {logits.shape[1]} overflows the integer sums"
    if not params.filtered:
        return logits
    scaled = logits * noise_ops.inverse_temperature(params.temperature)
    maximum = scaled.amax(dim=1, keepdim=True)
    excluded = torch.zeros_like(scaled, dtype=torch.bool)
    if params.top_k or params.top_p < 1:
        excluded |= scaled < _smallest_allowed(scaled, maximum, params)
    if params.min_p > 0:
        excluded |= _weights(scaled, maximum) < math.ceil(params.min_p * 2**_WEIGHT_BITS)
    return logits.masked_fill(excluded.logical_and_(~maximum.isnan()), -torch.inf)


def _filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """`filter_logits` of any floating dtype, a few rows at a time: weights in int64 and a sort take up to 37 bytes a
    logit, where 24 are planned for."""
    rows = min(max(_LEAST_PART_ROWS, len(logits) // 4), MOST_FILTERED_ROWS)
    allowed = torch.empty_like(logits, dtype=torch.float32)
    for part, filtered in zip(logits.split(rows), allowed.split(rows), strict=True):
        filtered.copy_(filter_logits(part.float(), params))
    return allowed


@dataclass(frozen=True)
class TokenLogprobs:
    """Says how likely the model took a token to be: of its own distribution, the logits as they are, in fp32. Bias,
    penalties, temperature and filters, which decide the token, do not count.

    Attributes:
        token: Its id.
        logprob: Natural logarithm of its probability.
        top: Ids of the likeliest tokens with the same of each, the likeliest first and of equal logits the lowest id.
        text: The token's own text, wherever it stands; a part of a character is written as `\\xe2`.
        top_texts: The same of the likeliest.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str = field(default="", compare=False)
    top_texts: tuple[str, ...] = field(default=(), compare=False)

    def first(self, count: int) -> TokenLogprobs:
        """Return the same with only the first of the likeliest."""
        return replace(self, top=self.top[:count], top_texts=self.top_texts[:count])


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return of each row of logits [R, V] the log-probabilities of its token and of the `count` likeliest. Waits for
    the device."""
    last, found = logits.shape[1] - 1, list[TokenLogprobs]()
    count = min(count, last + 1)
    for at in range(0, len(tokens), MOST_FILTERED_ROWS):
        rows = slice(at, at + MOST_FILTERED_ROWS)
        part = logits[rows].float() + 0.0  # of two zeros one
        # One integer says logit and id, so that no device has a choice among equals: floats in order as integers are.
        order = part.view(torch.int32)
        order = torch.where(order < 0, order ^ 0x7FFFFFFF, order).long().bitwise_left_shift_(32)
        order += torch.arange(last, -1, -1, device=part.device)
        ids = last - (order.topk(count, dim=1).values & 0xFFFFFFFF)  # [R, count]
        del order
        chosen = upload(torch.tensor(tokens[rows], dtype=torch.int32), part.device)
        ids = torch.cat((chosen[:, None].long(), ids), dim=1)
        logprobs = part.log_softmax(dim=1).gather(1, ids)
        for (token, *others), (logprob, *its) in zip(ids.tolist(), logprobs.tolist(), strict=True):
            found.append(TokenLogprobs(token, logprob, tuple(zip(others, its, strict=True))))
    return found


class SlotSampling:
    """Says how the tokens of every slot are chosen: a slot is a batch row of the caches, held by one request at a time.

    Temperature, seed and noise id lie in a device tensor that never moves, so that CUDA graphs may hold it, and so does
    a logit bias; only `graph_key` decides which kernels run.

    Penalties and grammars need the tokens of a row's own path, which the target alone is given (`sample`): drafts and
    the retrieval verifier go without, which costs acceptance and changes no token.

    Args:
        num_slots: How many there are; each is greedy until it is assigned.
        device: Where the logits are.

    Attributes:
        keys: [S, 4] int32, device: see `noise_keys`.
        filters: The different filters among the slots, each with its temperature; empty where none excludes a token.
        adjustments: Bias and penalties.
        matchers: By slot that has a grammar how far its answer has come, which its request sees to.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.keys = noise_ops.noise_keys([(0.0, 0, 0)] * num_slots).to(device)
        self._kind = torch.zeros(num_slots, dtype=torch.int32, device=device)  # [S]: index into `filters`
        self._kinds: dict[int, SamplingParams] = {}  # of the slots that are held, how they filter
        self.filters: tuple[SamplingParams, ...] = ()
        self.adjustments = LogitAdjustments(num_slots, device)
        self.matchers: dict[int, GrammarMatcher] = {}

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SlotSampling:
        """Slots 0, 1, … that choose their tokens these ways."""
        slots = cls(len(params), device)
        for slot, one in enumerate(params):
            slots.assign(slot, one)
        return slots

    def assign(self, slot: int, params: SamplingParams, matcher: GrammarMatcher | None = None) -> None:
        """Let a slot choose its tokens this way from here on, as far as `matcher` allows them; the others go on as
        before. Enqueued on the current stream.

        `filters` then holds the different filters of the slots that are held, each with its temperature. It is empty
        where no token is ever excluded.
        """
        assert slot < len(self.keys), f"slot {slot} of {len(self.keys)}"
        keys = noise_ops.noise_keys([(params.temperature, params.seed, params.noise_id)])
        overwrite(self.keys[slot : slot + 1], keys)
        self._kinds[slot] = params.filters_alone
        self._number_filters()
        self.adjustments.assign(slot, params)
        self.matchers.pop(slot, None)
        if matcher is not None:
            self.matchers[slot] = matcher

    def release(self, slot: int) -> None:
        """Note that nobody holds a slot any more, if anybody did: its filters are not run for the others."""
        if self._kinds.pop(slot, None) is not None:
            self._number_filters()
            self.adjustments.release(slot)
            self.matchers.pop(slot, None)

    def _number_filters(self) -> None:
        """Tell the device which of the filters is whose, where there are several."""
        kinds = dict(sorted(self._kinds.items()))
        self.filters = tuple(dict.fromkeys(kinds.values())) if any(one.filtered for one in kinds.values()) else ()
        if len(self.filters) > 1:
            numbers = [self.filters.index(kinds[slot]) if slot in kinds else 0 for slot in range(len(self._kind))]
            overwrite(self._kind, torch.tensor(numbers, dtype=torch.int32))

    @property
    def graph_key(self) -> Hashable:
        """Return what a captured graph of a step that samples depends on."""
        return self.filters, self.adjustments.biased

    @property
    def is_plain(self) -> bool:
        """Return whether nothing but temperature and noise stands between logits and tokens, of all slots."""
        adjusted = self.adjustments.biased or self.adjustments.penalised or self.adjustments.first_ends
        return not (self.filters or adjusted or self.matchers)

    def allowed(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Return logits [R, V] with -inf where the filters of the row's slot exclude a token (slots: [R])."""
        if not self.filters:
            return logits
        if len(self.filters) == 1:
            return _filtered(logits, self.filters[0])
        kinds, allowed = self._kind[slots.long()][:, None], logits.float()
        for number, params in enumerate(self.filters):
            if params.filtered:
                allowed = torch.where(kinds == number, _filtered(logits, params), allowed)
        return allowed


def sample(
    logits: Tensor, sampling: SlotSampling, positions: Tensor, slots: Tensor, paths: Tensor | None = None,
    masks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Choose one token a row.

    logits: [R, V] bf16, fp16 or fp32, contiguous rows. positions: [R] int32/int64, the absolute position of the token
    being chosen (not of the token that was fed). slots: [R] int32/int64, whose request the row is of. paths: [R, A]
    int32, tokens between those of the sequence that `sampling.adjustments` has seen and the one being chosen, -1 where
    there are fewer; None leaves penalties out. masks: [R, W] int32, a bit for each token that the row's grammar allows;
    None leaves grammars out. One device.
    Returns [R] int64: the tokens, lowest index first among equals; -1 for a row with NaN or without any token above
    -inf, from which the caller raises `NumericalError` when it reads the tokens anyway.
    """
    count = len(logits)
    if count > MOST_FILTERED_ROWS and not sampling.is_plain:
        parts = [slice(at, at + MOST_FILTERED_ROWS) for at in range(0, count, MOST_FILTERED_ROWS)]
        return torch.cat([
            sample(
                logits[part], sampling, positions[part], slots[part], None if paths is None else paths[part],
                None if masks is None else masks[part],
            )
            for part in parts
        ])  # fmt: skip
    if not sampling.is_plain:
        logits = sampling.adjustments.apply(logits, slots, paths, positions)
        logits = sampling.allowed(logits if masks is None else masked(logits, masks), slots)
    return noise_ops.gumbel_argmax(logits, positions, slots, sampling.keys)


def perturbed_logits(logits: Tensor, sampling: SlotSampling, positions: Tensor, slots: Tensor) -> Tensor:
    """Allowed logits / T + gumbel, of which `sample` without paths takes the argmax and a tree its top-k children.

    Arguments as `sample`. Returns [R, V] fp32, -inf where not allowed; the logits themselves at temperature 0.
    """
    if not sampling.is_plain:
        logits = sampling.allowed(sampling.adjustments.apply(logits, slots), slots)
    return noise_ops.gumbel_perturb(logits, positions, slots, sampling.keys)
