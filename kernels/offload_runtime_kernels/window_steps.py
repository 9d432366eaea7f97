"""What a step on the device does around its pass, each in one launch: find its rows, note tokens, accept proposals.

All of it works on *windows*, the newest tokens of B sequences in one int32 tensor, a row for each:

    window[b] = [end, base, stop, last, committed, tokens...]        token of position p = window[b, 5 + p - base]

`end` is how many tokens of the sequence are known, `base` the position of the first token here, and the first
`committed` are in the target's cache for good. Behind `end` lie proposals: a chain, or a tree whose nodes take the next
positions of the cache in their order, wherever in the text they stand. A sequence stands still once `end` reaches
`stop`, and proposes nothing at position `last` or behind it: its rows are padding then, and nothing of it is written.

These are a handful of integers each, but as torch operations about forty launches a step, which at two microseconds is
as long as the pass of a small draft.
"""

from dataclasses import dataclass

import torch

from offload_runtime_kernels._jit import jit, tl, triton

WINDOW_HEADER_WORDS = 5
_HEADER = tl.constexpr(WINDOW_HEADER_WORDS)
_BASE, _COMMITTED = 1, 4


@dataclass(frozen=True)
class StepRotation:
    """How the rows of a step rotate: by position times `frequencies` [B, P] fp32, the result times `scaling` [P]."""

    frequencies: torch.Tensor
    scaling: torch.Tensor


@dataclass(frozen=True)
class StepLayout:
    """Which T rows a step has of each sequence, counted from where the step starts; int32 on the windows' device.

    `cache_positions` [T]: where a row's token lies in the window, and its keys in the cache. `positions` [T]: where it
    stands in the text; the same where all of it is a chain. The first `counted` rows say which keys matter.
    Of a tree `ancestors` [T, A]: the cache positions on the path to each row, itself included, one for each position
    from `first` on; before that all rows see every key.
    """

    cache_positions: torch.Tensor
    positions: torch.Tensor
    counted: int
    first: int = 0
    ancestors: torch.Tensor | None = None

    @classmethod
    def chain(cls, first: int, count: int, device: torch.device) -> "StepLayout":
        """`count` tokens in a row."""
        cache_positions = torch.arange(first, first + count, dtype=torch.int32, device=device)
        return cls(cache_positions, cache_positions, count)


@dataclass(frozen=True)
class TreeLinks:
    """How the n nodes of a tree of proposals hang together; on the windows' device.

    `parents` [n] int32: the row whose sample a node has to equal, 0 for the newest known token and 1 + i for node i.
    `paths` [n] int64: bit i says that node i is on the way to it, itself included. `depths` [n] int32, from 1 on.
    """

    parents: torch.Tensor
    paths: torch.Tensor
    depths: torch.Tensor


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, T of each of B sequences; tensors on the windows' device.

    `tokens` [B*T] int32. `positions` [B, T] int32, of the rows in their cache, -1 for padding, and `slots` [B*T] int32.
    `following` [B*T] int32, the sequence's position behind each row, whose token its logits say, and `ahead` [B] that
    of the last rows. `sequences` [B*T] int32: 0 to B - 1, T times each. `used` [B] int32: the `most_used` rows that
    count, 0 for a sequence that stands still. `cos`, `sin` [B*T, P] fp32. `committed` [B] int32 and `ancestors`
    [B, T, A] int32 of trees, as of `QueryRows`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    cache_positions: torch.Tensor
    following: torch.Tensor
    ahead: torch.Tensor
    slots: torch.Tensor
    used: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    most_used: int
    committed: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None


def _goes_on(window: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[B] bool: which sequences a step at `start` [B] is about."""
    return (window[:, 0] < window[:, 2]) & (start < window[:, 3])


def step_rows_reference(
    window: torch.Tensor, start: torch.Tensor, layout: StepLayout, rotation: StepRotation, *, last_token: int,
    skip_committed: bool = False, place: torch.Tensor | None = None,
) -> StepRows:  # fmt: skip
    """Plain torch version of `step_rows`."""
    batch, count = len(window), len(layout.cache_positions)
    goes_on = _goes_on(window, start)[:, None]
    shift, turn = (0, 0) if place is None else (place[:batch, :1], place[:batch, 1:])
    cache_positions, positions = start[:, None] + layout.cache_positions, start[:, None] + layout.positions  # [B, T]
    there = goes_on & (cache_positions >= window[:, _COMMITTED if skip_committed else _BASE, None])
    index = (cache_positions - window[:, _BASE, None] + WINDOW_HEADER_WORDS).where(there, 0)
    tokens = window.gather(1, index.long()).clamp_(0, last_token).where(there, 0)
    angle = (positions - shift + turn).where(there, 0)[..., None] * rotation.frequencies[:batch, None]
    following = (positions + 1).where(goes_on, 0)
    committed = ancestors = None
    if layout.ancestors is not None:
        committed = (start[:, None] + layout.first - shift)[:, 0]
        ancestors = start[:, None, None] + layout.ancestors - (shift if place is None else place[:batch, :1, None])
    return StepRows(
        tokens=tokens.flatten(),
        positions=(positions - shift).where(there, -1),
        cache_positions=(cache_positions - shift).where(there, -1).flatten(),
        following=following.flatten(),
        ahead=following[:, -1].contiguous(),
        slots=torch.arange(batch, dtype=torch.int32, device=window.device).repeat_interleave(count),
        used=goes_on[:, 0].int() * layout.counted,
        cos=(angle.cos() * rotation.scaling).flatten(0, 1),
        sin=(angle.sin() * rotation.scaling).flatten(0, 1),
        most_used=layout.counted,
        committed=committed,
        ancestors=ancestors,
    )


def put_tokens_reference(
    window: torch.Tensor, start: torch.Tensor, tokens: torch.Tensor, *, offset: int = 0,
    cursor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Plain torch version of `put_tokens`."""
    goes_on, steps = _goes_on(window, start)[:, None], torch.arange(tokens.shape[1], device=window.device)
    index = (start[:, None] - window[:, _BASE, None] + WINDOW_HEADER_WORDS + offset + steps).where(goes_on, steps)
    window.scatter_(1, index, tokens.to(torch.int32).where(goes_on, window.gather(1, index)))
    if cursor is not None:
        cursor.copy_((start + tokens.shape[1]).where(goes_on[:, 0], cursor))


def _put(data: torch.Tensor, index: torch.Tensor, values: torch.Tensor, there: torch.Tensor) -> None:
    """data[b, index[b]] = values[b] where it is `there`; all [B, 1]."""
    index = index.clamp_min(0)
    data.scatter_(1, index, values.to(torch.int32).where(there, data.gather(1, index)))


def accept_reference(
    window: torch.Tensor, samples: torch.Tensor, second_samples: torch.Tensor, counts: torch.Tensor, links: TreeLinks,
    runners_up: torch.Tensor,
) -> None:  # fmt: skip
    """Plain torch version of `accept`."""
    end = window[:, 0].clone()
    goes_on, nodes = _goes_on(window, end), torch.arange(len(links.parents), device=window.device)
    first = (end - window[:, _BASE] + WINDOW_HEADER_WORDS).where(goes_on, 0).long()[:, None]  # [B, 1]
    proposals = window.gather(1, first + nodes)
    matches = proposals == samples.gather(1, links.parents.long().expand(len(window), -1))
    found = (matches.long() << nodes).sum(1, keepdim=True)  # [B, 1]
    accepted = (links.paths & ~found == 0) & goes_on[:, None]  # [B, n]
    depths = torch.zeros_like(first), links.depths.long() * accepted
    depth, last = torch.cat(depths, dim=1).max(1, keepdim=True)  # the newest known token has depth 0 and row 0
    for node in nodes.tolist():  # a node never stands behind its own cache position
        index = first + int(links.depths[node]) - 1
        _put(window, index, proposals[:, node : node + 1], accepted[:, node : node + 1])
        second = second_samples[:, links.parents[node], None]
        _put(runners_up, index - WINDOW_HEADER_WORDS, second, accepted[:, node : node + 1])
    index = first + depth
    _put(window, index, samples.gather(1, last), goes_on[:, None])
    _put(runners_up, index - WINDOW_HEADER_WORDS, second_samples.gather(1, last), goes_on[:, None])
    window[:, 0] = (end + depth[:, 0].int() + 1).where(goes_on, end)
    counts[: len(window), 0] += goes_on
    counts[: len(window), 1] += depth[:, 0] * goes_on


@jit
def _step_at(window_ptr, start):
    """Whether a step at `start` is about the sequence of this window."""
    return (tl.load(window_ptr) < tl.load(window_ptr + 2)) & (start < tl.load(window_ptr + 3))


@jit(do_not_specialize=("words", "start_stride", "count", "counted", "first", "last_token"))
def _step_rows_kernel(
    window_ptr, start_ptr, place_ptr, frequencies_ptr, scaling_ptr, layout_cache_positions_ptr, layout_positions_ptr,
    paths_ptr, tokens_ptr, positions_ptr, cache_positions_ptr, following_ptr, ahead_ptr, slots_ptr, used_ptr, cos_ptr,
    sin_ptr, committed_ptr, ancestors_ptr, words, start_stride, count, counted, first, last_token,
    PAIRS: tl.constexpr, PAIRS_BLOCK: tl.constexpr, PLACED: tl.constexpr, SINCE: tl.constexpr, DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = row // count
    start = tl.load(start_ptr + slot * start_stride)
    window_ptr += slot * words
    goes_on = _step_at(window_ptr, start)
    cache_position = start + tl.load(layout_cache_positions_ptr + row % count)
    position = start + tl.load(layout_positions_ptr + row % count)
    there = goes_on & (cache_position >= tl.load(window_ptr + SINCE))
    token = tl.load(window_ptr + _HEADER + cache_position - tl.load(window_ptr + 1), mask=there, other=0)
    shift = 0
    turn = 0
    if PLACED:
        shift = tl.load(place_ptr + slot * 2)
        turn = tl.load(place_ptr + slot * 2 + 1)
    tl.store(tokens_ptr + row, tl.minimum(tl.maximum(token, 0), last_token))
    tl.store(positions_ptr + row, tl.where(there, position - shift, -1))
    tl.store(cache_positions_ptr + row, tl.where(there, cache_position - shift, -1))
    following = tl.where(goes_on, position + 1, 0)
    tl.store(following_ptr + row, following)
    tl.store(slots_ptr + row, slot)
    last = row % count == count - 1
    tl.store(ahead_ptr + slot, following, mask=last)
    tl.store(used_ptr + slot, tl.where(goes_on, counted, 0), mask=last)
    pair = tl.arange(0, PAIRS_BLOCK)
    inside = pair < PAIRS
    frequency = tl.load(frequencies_ptr + slot * PAIRS + pair, mask=inside, other=0.0)
    scaling = tl.load(scaling_ptr + pair, mask=inside, other=0.0)
    angle = tl.where(there, position - shift + turn, 0).to(tl.float32) * frequency
    tl.store(cos_ptr + row * PAIRS + pair, tl.cos(angle) * scaling, mask=inside)
    tl.store(sin_ptr + row * PAIRS + pair, tl.sin(angle) * scaling, mask=inside)
    if DEPTH > 0:
        level = tl.arange(0, DEPTH_BLOCK)
        above = tl.load(paths_ptr + row % count * DEPTH + level, mask=level < DEPTH, other=0)
        tl.store(ancestors_ptr + row * DEPTH + level, start + above - shift, mask=level < DEPTH)
        tl.store(committed_ptr + slot, start + first - shift, mask=last)


@jit(do_not_specialize=("words", "start_stride", "count", "offset"))
def _put_tokens_kernel(
    window_ptr, start_ptr, tokens_ptr, cursor_ptr, words, start_stride, count, offset, LANES: tl.constexpr,
    MOVES: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    start = tl.load(start_ptr + slot * start_stride)
    window_ptr += slot * words
    goes_on = _step_at(window_ptr, start)
    place = window_ptr + _HEADER + start + offset - tl.load(window_ptr + 1)
    lane = tl.arange(0, LANES)
    # Compared lane by lane: the interpreter turns a broadcast truth value into an integer, which is no mask.
    inside = (lane < count) & (goes_on.to(tl.int32) + tl.zeros_like(lane) != 0)
    token = tl.load(tokens_ptr + slot * count + lane, mask=inside, other=0)
    tl.store(place + lane, token.to(tl.int32), mask=inside)
    if MOVES:
        tl.store(cursor_ptr + slot, start + count, mask=goes_on)


# One warp a sequence: what it reads of the window it has read before it writes there.
@jit(do_not_specialize=("words", "num_nodes", "num_rows", "capacity"))
def _accept_kernel(
    window_ptr, samples_ptr, second_samples_ptr, counts_ptr, parents_ptr, paths_ptr, depths_ptr, runners_up_ptr, words,
    num_nodes, num_rows, capacity, LANES: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    window_ptr += slot * words
    samples_ptr += slot * num_rows
    second_samples_ptr += slot * num_rows
    counts_ptr += slot * 2
    end = tl.load(window_ptr)
    goes_on = _step_at(window_ptr, end)
    cache_position = end - tl.load(window_ptr + 1)
    tokens_ptr = window_ptr + _HEADER + cache_position
    runners_up_ptr += slot * capacity + cache_position
    lane = tl.arange(0, LANES)
    inside = (lane < num_nodes) & (goes_on.to(tl.int32) + tl.zeros_like(lane) != 0)
    proposal = tl.load(tokens_ptr + lane, mask=inside, other=0)
    parent = tl.load(parents_ptr + lane, mask=inside, other=0)
    sample = tl.load(samples_ptr + parent, mask=inside, other=0)
    second = tl.load(second_samples_ptr + parent, mask=inside, other=0)
    bit = tl.full([LANES], 1, dtype=tl.int64) << lane.to(tl.int64)
    found = tl.sum(tl.where(inside & (proposal.to(tl.int64) == sample), bit, 0), axis=0)
    path = tl.load(paths_ptr + lane, mask=inside, other=0)
    accepted = inside & ((path & found) == path)
    depth = tl.where(accepted, tl.load(depths_ptr + lane, mask=inside, other=0), 0)
    deepest = tl.max(depth, axis=0)
    last = tl.max(tl.where(accepted & (depth == deepest), lane + 1, 0), axis=0)
    tl.store(tokens_ptr + depth - 1, proposal, mask=accepted)
    tl.store(tokens_ptr + deepest, tl.load(samples_ptr + last).to(tl.int32), mask=goes_on)
    tl.store(runners_up_ptr + depth - 1, second.to(tl.int32), mask=accepted)
    tl.store(runners_up_ptr + deepest, tl.load(second_samples_ptr + last).to(tl.int32), mask=goes_on)
    tl.store(window_ptr, end + deepest + 1, mask=goes_on)
    tl.store(counts_ptr, tl.load(counts_ptr) + 1, mask=goes_on)
    tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + deepest, mask=goes_on)


def _check_windows(window: torch.Tensor, *words: torch.Tensor) -> None:
    """Windows in rows, and one integer for each of them, all int32."""
    assert window.dtype == torch.int32 and window.ndim == 2 and window.is_contiguous()
    assert all(word.dtype == torch.int32 and word.shape == window.shape[:1] for word in words)


def step_rows_triton(
    window: torch.Tensor, start: torch.Tensor, layout: StepLayout, rotation: StepRotation, *, last_token: int,
    skip_committed: bool = False, place: torch.Tensor | None = None,
) -> StepRows:  # fmt: skip
    """Triton version of `step_rows`."""
    batch, words = window.shape
    count, frequencies, paths = len(layout.cache_positions), rotation.frequencies, layout.ancestors
    pairs, depth = frequencies.shape[1], 0 if paths is None else paths.shape[1]
    # Memory of their own, not views of one block: kernels further on are compiled for pointers of one alignment.
    tokens, cache_positions, following, slots = (window.new_empty(batch * count) for _ in range(4))
    positions, ahead, used = window.new_empty(batch, count), window.new_empty(batch), window.new_empty(batch)
    cos, sin = (frequencies.new_empty(batch * count, pairs) for _ in range(2))
    committed = ancestors = None
    if depth:
        committed, ancestors = window.new_empty(batch), window.new_empty(batch, count, depth)
    _step_rows_kernel[(batch * count,)](
        window, start, window if place is None else place, frequencies, rotation.scaling, layout.cache_positions,
        layout.positions, window if paths is None else paths, tokens, positions, cache_positions, following, ahead,
        slots, used, cos, sin, window if committed is None else committed, window if ancestors is None else ancestors,
        words, start.stride(0), count, layout.counted, layout.first, last_token,
        PAIRS=pairs, PAIRS_BLOCK=triton.next_power_of_2(pairs), PLACED=place is not None,
        SINCE=_COMMITTED if skip_committed else _BASE, DEPTH=depth, DEPTH_BLOCK=triton.next_power_of_2(max(1, depth)),
        num_warps=1,
    )  # fmt: skip
    return StepRows(
        tokens,
        positions,
        cache_positions,
        following,
        ahead,
        slots,
        used,
        cos,
        sin,
        layout.counted,
        committed,
        ancestors,
    )


def put_tokens_triton(
    window: torch.Tensor, start: torch.Tensor, tokens: torch.Tensor, *, offset: int = 0,
    cursor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Triton version of `put_tokens`."""
    count = tokens.shape[1]
    _put_tokens_kernel[(len(window),)](
        window, start, tokens, start if cursor is None else cursor, window.shape[1], start.stride(0), count, offset,
        LANES=triton.next_power_of_2(count), MOVES=cursor is not None, num_warps=1,
    )  # fmt: skip


def accept_triton(
    window: torch.Tensor, samples: torch.Tensor, second_samples: torch.Tensor, counts: torch.Tensor, links: TreeLinks,
    runners_up: torch.Tensor,
) -> None:  # fmt: skip
    """Triton version of `accept`."""
    count = len(links.parents)
    _accept_kernel[(len(window),)](
        window, samples, second_samples, counts, links.parents, links.paths, links.depths, runners_up, window.shape[1],
        count, samples.shape[1], runners_up.shape[1], LANES=triton.next_power_of_2(max(1, count)), num_warps=1,
    )  # fmt: skip


def step_rows(
    window: torch.Tensor, start: torch.Tensor, layout: StepLayout, rotation: StepRotation, *, last_token: int,
    skip_committed: bool = False, place: torch.Tensor | None = None,
) -> StepRows:  # fmt: skip
    """The rows of each sequence that a layout names, counted from `start`; one launch.

    Args:
        window: [B, W] int32, see above; holds all of these positions. Those before `base` are padding.
        start: [B] int32, device, of any stride. Where it is not before `last`, or `end` not before `stop`, all rows
            are padding.
        layout: Of T rows.
        rotation: Of the model that the rows go through, for at least B sequences.
        last_token: Tokens are cut to 0 .. `last_token`: -1 marks NaN logits and is no row of an embedding.
        skip_committed: Rows of tokens that are committed are padding, too: their keys stay as they are.
        place: [at least B, 2] int32, device, of caches that hold a part of the sequence: positions are so much
            smaller there, those in the cache, too, and rotated as if they were so much larger than that. None: the
            sequence's own.
    """
    _check_windows(window, start)
    batch, count, frequencies, paths = len(window), len(layout.positions), rotation.frequencies, layout.ancestors
    assert layout.cache_positions.dtype == layout.positions.dtype == torch.int32
    assert layout.cache_positions.shape == (count,) and rotation.scaling.shape == frequencies.shape[1:]
    assert frequencies.dtype == torch.float32 and frequencies.is_contiguous() and len(frequencies) >= batch
    assert rotation.scaling.dtype == torch.float32
    assert place is None or (place.dtype == torch.int32 and place.is_contiguous() and len(place) >= batch)
    assert paths is None or (paths.dtype == torch.int32 and paths.is_contiguous() and len(paths) == count)
    run = step_rows_triton if window.is_cuda else step_rows_reference
    return run(window, start, layout, rotation, last_token=last_token, skip_committed=skip_committed, place=place)


def put_tokens(
    window: torch.Tensor, start: torch.Tensor, tokens: torch.Tensor, *, offset: int = 0,
    cursor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write tokens into each sequence's window; one launch. Nothing is written for sequences that stand still.

    Args:
        window: [B, W] int32, see above.
        start: [B] int32, device, of any stride; may be `cursor` itself.
        tokens: [B, n] int64, device.
        offset: The first goes to position `start` + `offset`, the others behind it.
        cursor: [B] int32, device, which is moved behind `start` by as many; None for none.
    """
    _check_windows(window, start, *(() if cursor is None else (cursor,)))
    assert tokens.dtype == torch.int64 and tokens.is_contiguous() and len(tokens) == len(window)
    assert cursor is None or cursor.is_contiguous()
    run = put_tokens_triton if window.is_cuda else put_tokens_reference
    run(window, start, tokens, offset=offset, cursor=cursor)


def accept(
    window: torch.Tensor, samples: torch.Tensor, second_samples: torch.Tensor, counts: torch.Tensor, links: TreeLinks,
    runners_up: torch.Tensor,
) -> None:  # fmt: skip
    """Accept the longest path of proposals, from the newest known token on, each of which is what was sampled behind
    the one before it; one launch.

    The path and the sample behind it move to their places behind each window's end, which moves behind them; all other
    proposals are of no use any more. Sequences that stand still stay as they are, and so do their counts.

    Args:
        window: [B, W] int32, see above; its n nodes lie at the positions from `end` on.
        samples: [B, at least n + 1] int64, device: of the newest known token and of every node the token behind it.
        second_samples: Of the same rows the token that would have been sampled if the one in `samples` were excluded.
        counts: [at least B, 2] int64, device: steps and accepted proposals of each sequence so far.
        links: Of the nodes, fewer than 64.
        runners_up: [at least B, W - 5] int32: in place p - base, what would have been sampled instead of the token of
            position p, of those that become known here.
    """
    _check_windows(window)
    _check_windows(runners_up)
    assert len(runners_up) >= len(window) and runners_up.shape[1] == window.shape[1] - WINDOW_HEADER_WORDS
    assert second_samples.shape == samples.shape
    assert samples.dtype == second_samples.dtype == counts.dtype == torch.int64
    assert samples.is_contiguous() and second_samples.is_contiguous() and counts.is_contiguous()
    assert samples.ndim == 2 and len(samples) == len(window) and counts.shape[1] == 2 and len(counts) >= len(window)
    assert len(links.parents) < min(64, samples.shape[1]), "a bit for every node"
    run = accept_triton if window.is_cuda else accept_reference
    run(window, samples, second_samples, counts, links, runners_up)
