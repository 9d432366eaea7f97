"""What a step on the device does around its pass, each in one launch: find its rows, note a token, accept proposals.

All of it works on *windows*, the newest tokens of B sequences in one int32 tensor, a row for each:

    window[b] = [end, base, stop, last, tokens...]        token of position p = window[b, 4 + p - base]

`end` is how many tokens of the sequence are known, `base` the position of the first token here; behind `end` lie
proposals. A sequence stands still once `end` reaches `stop`, and proposes nothing at position `last` or behind it: its
rows are padding then, and nothing of it is written. One position before `base` may be asked for, and gives nonsense.

These are a handful of integers each, but as torch operations about forty launches a step, which at two microseconds is
as long as the pass of a small draft.
"""

from dataclasses import dataclass

import torch

from offload_runtime_kernels._jit import jit, tl, triton

WINDOW_HEADER_WORDS = 4
_HEADER = tl.constexpr(WINDOW_HEADER_WORDS)


@dataclass(frozen=True)
class StepRotation:
    """How the rows of a step rotate: by position times `frequencies` [B, D/2] fp32, the result times `scaling`."""

    frequencies: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, T consecutive positions of each of B sequences; tensors on the windows' device.

    `tokens` [B*T] int32. `positions` [B, T] int32, of the rows in their cache, -1 for padding. `following` [B*T] int32,
    the sequence's position behind each row, whose token its logits say, and `ahead` [B] that of the last rows.
    `sequences` [B*T] int32: 0 to B - 1, T times each. `used` [B] int32: T, or 0 for a sequence that stands still.
    `cos`, `sin` [B*T, D/2] fp32.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    following: torch.Tensor
    ahead: torch.Tensor
    sequences: torch.Tensor
    used: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def _goes_on(window: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[B] bool: which sequences a step at `start` [B] is about."""
    return (window[:, 0] < window[:, 2]) & (start < window[:, 3])


def step_rows_reference(
    window: torch.Tensor, start: torch.Tensor, count: int, rotation: StepRotation, *, offset: int, last_token: int,
    place: torch.Tensor | None = None,
) -> StepRows:  # fmt: skip
    """Plain torch version of `step_rows`."""
    batch, device = window.shape[0], window.device
    goes_on = _goes_on(window, start)
    steps = torch.arange(offset, offset + count, dtype=torch.int32, device=device)
    absolute = start[:, None] + steps  # [B, T]
    index = (absolute - window[:, 1:2] + WINDOW_HEADER_WORDS).where(goes_on[:, None], 0)
    tokens = window.gather(1, index.long()).clamp_(0, last_token).where(goes_on[:, None], 0)
    positions = absolute if place is None else absolute - place[:batch, :1]
    rotated = positions if place is None else positions + place[:batch, 1:]
    angle = rotated.where(goes_on[:, None], 0)[..., None] * rotation.frequencies[:batch, None]
    cos, sin = angle.cos() * rotation.scaling, angle.sin() * rotation.scaling
    following = (absolute + 1).where(goes_on[:, None], 0)
    return StepRows(
        tokens=tokens.flatten(),
        positions=positions.where(goes_on[:, None], -1),
        following=following.flatten(),
        ahead=following[:, -1].contiguous(),
        sequences=torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(count),
        used=goes_on.int() * count,
        cos=cos.flatten(0, 1),
        sin=sin.flatten(0, 1),
    )


def put_token_reference(
    window: torch.Tensor, position: torch.Tensor, token: torch.Tensor, cursor: torch.Tensor
) -> None:
    """Plain torch version of `put_token`."""
    goes_on = _goes_on(window, position)
    index = (position - window[:, 1] + WINDOW_HEADER_WORDS).where(goes_on, 0).long()[:, None]
    window.scatter_(1, index, token.to(torch.int32)[:, None].where(goes_on[:, None], window.gather(1, index)))
    cursor.copy_((position + 1).where(goes_on, cursor))


def accept_reference(window: torch.Tensor, samples: torch.Tensor, counts: torch.Tensor) -> None:
    """Plain torch version of `accept`."""
    end = window[:, 0].clone()
    goes_on = _goes_on(window, end)
    steps = torch.arange(samples.shape[1] - 1, dtype=torch.int32, device=window.device)
    first = (end - window[:, 1] + WINDOW_HEADER_WORDS).where(goes_on, 0)[:, None]  # [B, 1]
    matches = window.gather(1, (first + steps).long()) == samples[:, :-1]
    accepted = matches.int().cumprod(1).sum(1, keepdim=True)  # [B, 1]
    index, sample = (first + accepted).long(), samples.gather(1, accepted).to(torch.int32)
    window.scatter_(1, index, sample.where(goes_on[:, None], window.gather(1, index)))
    window[:, 0] = (end + accepted[:, 0].int() + 1).where(goes_on, end)
    counts[: len(window), 0] += goes_on
    counts[: len(window), 1] += accepted[:, 0] * goes_on


@jit
def _step_at(window_ptr, start):
    """Whether a step at `start` is about the sequence of this window."""
    return (tl.load(window_ptr) < tl.load(window_ptr + 2)) & (start < tl.load(window_ptr + 3))


@jit(do_not_specialize=("words", "start_stride", "count", "offset", "last_token"))
def _step_rows_kernel(
    window_ptr, start_ptr, place_ptr, frequencies_ptr, tokens_ptr, positions_ptr, following_ptr, ahead_ptr,
    sequences_ptr, used_ptr, cos_ptr, sin_ptr, words, start_stride, count, offset, last_token, scaling,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    sequence = row // count
    start = tl.load(start_ptr + sequence * start_stride)
    window_ptr += sequence * words
    goes_on = _step_at(window_ptr, start)
    absolute = start + offset + row % count
    token = tl.load(window_ptr + _HEADER + absolute - tl.load(window_ptr + 1), mask=goes_on, other=0)
    position = absolute
    rotated = absolute
    if PLACED:
        position = absolute - tl.load(place_ptr + sequence * 2)
        rotated = position + tl.load(place_ptr + sequence * 2 + 1)
    tl.store(tokens_ptr + row, tl.minimum(tl.maximum(token, 0), last_token))
    tl.store(positions_ptr + row, tl.where(goes_on, position, -1))
    following = tl.where(goes_on, absolute + 1, 0)
    tl.store(following_ptr + row, following)
    tl.store(sequences_ptr + row, sequence)
    tl.store(ahead_ptr + sequence, following, mask=row % count == count - 1)
    tl.store(used_ptr + sequence, tl.where(goes_on, count, 0), mask=row % count == count - 1)
    channel = tl.arange(0, HALF_BLOCK)
    frequency = tl.load(frequencies_ptr + sequence * HALF + channel, mask=channel < HALF, other=0.0)
    angle = tl.where(goes_on, rotated, 0).to(tl.float32) * frequency
    tl.store(cos_ptr + row * HALF + channel, tl.cos(angle) * scaling, mask=channel < HALF)
    tl.store(sin_ptr + row * HALF + channel, tl.sin(angle) * scaling, mask=channel < HALF)


@jit(do_not_specialize=("words", "position_stride"))
def _put_token_kernel(window_ptr, position_ptr, token_ptr, cursor_ptr, words, position_stride):
    sequence = tl.program_id(0)
    position = tl.load(position_ptr + sequence * position_stride)
    window_ptr += sequence * words
    goes_on = _step_at(window_ptr, position)
    place = window_ptr + _HEADER + position - tl.load(window_ptr + 1)
    tl.store(place, tl.load(token_ptr + sequence).to(tl.int32), mask=goes_on)
    tl.store(cursor_ptr + sequence, position + 1, mask=goes_on)


# One warp a sequence: what it reads of the window it has read before it writes there.
@jit(do_not_specialize=("words", "num_proposals"))
def _accept_kernel(window_ptr, samples_ptr, counts_ptr, words, num_proposals, LANES: tl.constexpr):
    sequence = tl.program_id(0)
    window_ptr += sequence * words
    samples_ptr += sequence * (num_proposals + 1)
    counts_ptr += sequence * 2
    end = tl.load(window_ptr)
    goes_on = _step_at(window_ptr, end)
    tokens_ptr = window_ptr + _HEADER + end - tl.load(window_ptr + 1)
    lane = tl.arange(0, LANES)
    # Compared lane by lane: the interpreter turns a broadcast truth value into an integer, which is no mask.
    inside = (lane < num_proposals) & (goes_on.to(tl.int32) + tl.zeros_like(lane) != 0)
    proposal = tl.load(tokens_ptr + lane, mask=inside, other=0).to(tl.int64)
    sample = tl.load(samples_ptr + lane, mask=inside, other=0)
    # There is a lane behind the last proposal, so this is at most their number.
    accepted = tl.min(tl.where(inside & (proposal == sample), num_proposals, lane), axis=0)
    tl.store(tokens_ptr + accepted, tl.load(samples_ptr + accepted).to(tl.int32), mask=goes_on)
    tl.store(window_ptr, end + accepted + 1, mask=goes_on)
    tl.store(counts_ptr, tl.load(counts_ptr) + 1, mask=goes_on)
    tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + accepted, mask=goes_on)


def _check_windows(window: torch.Tensor, *words: torch.Tensor) -> None:
    """Windows in rows, and one integer for each of them, all int32."""
    assert window.dtype == torch.int32 and window.ndim == 2 and window.is_contiguous()
    assert all(word.dtype == torch.int32 and word.shape == window.shape[:1] for word in words)


def step_rows_triton(
    window: torch.Tensor, start: torch.Tensor, count: int, rotation: StepRotation, *, offset: int, last_token: int,
    place: torch.Tensor | None = None,
) -> StepRows:  # fmt: skip
    """Triton version of `step_rows`."""
    batch, words = window.shape
    frequencies = rotation.frequencies
    _check_windows(window, start)
    half = frequencies.shape[1]
    assert frequencies.dtype == torch.float32 and frequencies.is_contiguous() and len(frequencies) >= batch
    assert place is None or (place.dtype == torch.int32 and place.is_contiguous() and len(place) >= batch)
    # Memory of their own, not views of one block: kernels further on are compiled for pointers of one alignment.
    tokens, following, sequences = (window.new_empty(batch * count) for _ in range(3))
    positions, ahead, used = window.new_empty(batch, count), window.new_empty(batch), window.new_empty(batch)
    cos, sin = (frequencies.new_empty(batch * count, half) for _ in range(2))
    _step_rows_kernel[(batch * count,)](
        window, start, window if place is None else place, frequencies, tokens, positions, following, ahead, sequences,
        used, cos, sin, words, start.stride(0), count, offset, last_token, rotation.scaling,
        HALF=half, HALF_BLOCK=triton.next_power_of_2(half), PLACED=place is not None, num_warps=1,
    )  # fmt: skip
    return StepRows(tokens, positions, following, ahead, sequences, used, cos, sin)


def put_token_triton(window: torch.Tensor, position: torch.Tensor, token: torch.Tensor, cursor: torch.Tensor) -> None:
    """Triton version of `put_token`."""
    _check_windows(window, position, cursor)
    assert cursor.is_contiguous() and token.dtype == torch.int64 and token.is_contiguous()
    _put_token_kernel[(len(window),)](
        window, position, token, cursor, window.shape[1], position.stride(0), num_warps=1
    )  # fmt: skip


def accept_triton(window: torch.Tensor, samples: torch.Tensor, counts: torch.Tensor) -> None:
    """Triton version of `accept`."""
    _check_windows(window)
    assert samples.dtype == counts.dtype == torch.int64 and samples.is_contiguous() and counts.is_contiguous()
    assert samples.ndim == 2 and len(samples) == len(window) and counts.shape[1] == 2 and len(counts) >= len(window)
    count = samples.shape[1]
    lanes = triton.next_power_of_2(count)
    _accept_kernel[(len(window),)](window, samples, counts, window.shape[1], count - 1, LANES=lanes, num_warps=1)


def step_rows(
    window: torch.Tensor, start: torch.Tensor, count: int, rotation: StepRotation, *, offset: int, last_token: int,
    place: torch.Tensor | None = None,
) -> StepRows:  # fmt: skip
    """The rows of each sequence's positions start + offset to start + offset + count - 1; one launch.

    Args:
        window: [B, W] int32, see above; holds all of these positions.
        start: [B] int32, device, of any stride. Where it is not before `last`, or `end` not before `stop`, the rows
            are padding.
        count: T, at least 1.
        rotation: Of the model that the rows go through, for at least B sequences.
        offset: Of the first row, usually negative.
        last_token: Tokens are cut to 0 .. `last_token`: -1 marks NaN logits and is no row of an embedding.
        place: [at least B, 2] int32, device, of caches that hold a part of the sequence: positions are so much smaller
            there, and rotated as if they were so much larger than that. None: the sequence's own positions.
    """
    run = step_rows_triton if window.is_cuda else step_rows_reference
    return run(window, start, count, rotation, offset=offset, last_token=last_token, place=place)


def put_token(window: torch.Tensor, position: torch.Tensor, token: torch.Tensor, cursor: torch.Tensor) -> None:
    """Write each sequence's token into its window, and the position behind it into `cursor`; one launch.

    Nothing is written for sequences that stand still.

    Args:
        window: [B, W] int32, see above.
        position: [B] int32, device, of any stride, of the tokens; may be `cursor` itself.
        token: [B] int64, device.
        cursor: [B] int32, device.
    """
    run = put_token_triton if window.is_cuda else put_token_reference
    run(window, position, token, cursor)


def accept(window: torch.Tensor, samples: torch.Tensor, counts: torch.Tensor) -> None:
    """Accept the proposals behind each window's end up to the first that is not what was sampled; one launch.

    That one is replaced by the sample, behind the last proposal comes the sample that follows it, and `end` moves
    behind either. Sequences that stand still stay as they are, and so do their counts.

    Args:
        window: [B, W] int32, see above.
        samples: [B, n + 1] int64, device: the tokens of positions end to end + n, of which the window has n proposed.
        counts: [at least B, 2] int64, device: steps and accepted proposals of each sequence so far.
    """
    run = accept_triton if window.is_cuda else accept_reference
    run(window, samples, counts)
