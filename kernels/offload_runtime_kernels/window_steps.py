"""What a step on the device does around its pass, each in one launch: find its rows, note a token, accept proposals.

All of it works on a *window*, the newest tokens of one sequence in one int32 tensor:

    window = [end, base, origin, 0, tokens...]        token of position p = window[p - origin]

`end` is how many tokens of the sequence are known, `base` the position of the first token here, and `origin` is
base - 4. Behind `end` lie proposals. One position before `base` may be asked for, and gives nonsense.

These are a handful of integers each, but as torch operations about forty launches a step, which at two microseconds is
as long as the pass of a small draft.
"""

from dataclasses import dataclass

import torch

from offload_runtime_kernels._jit import jit, tl, triton

WINDOW_HEADER_WORDS = 4


@dataclass(frozen=True)
class StepRotation:
    """How the rows of a step rotate: by position times `frequencies` [D/2] fp32, the result times `scaling`."""

    frequencies: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, T consecutive positions of one sequence; tensors on the window's device.

    `tokens` [T] int32. `positions` [T] int32, of the rows in their cache. `following` [T] int32, the sequence's
    position behind each row, whose token its logits say. `cos`, `sin` [T, D/2] fp32.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    following: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def step_rows_reference(
    window: torch.Tensor, start: torch.Tensor, count: int, rotation: StepRotation, *, offset: int, last_token: int,
    place: torch.Tensor | None = None,
) -> StepRows:  # fmt: skip
    """Plain torch version of `step_rows`."""
    steps = torch.arange(offset, offset + count, dtype=torch.int32, device=window.device)
    absolute = start + steps
    tokens = window.index_select(0, absolute - window[2]).clamp_(0, last_token)
    positions = absolute if place is None else absolute - place[0]
    rotated = positions if place is None else positions + place[1]
    angle = rotated[:, None] * rotation.frequencies
    return StepRows(tokens, positions, absolute + 1, angle.cos() * rotation.scaling, angle.sin() * rotation.scaling)


def put_token_reference(
    window: torch.Tensor, position: torch.Tensor, token: torch.Tensor, cursor: torch.Tensor
) -> None:
    """Plain torch version of `put_token`."""
    window.scatter_(0, (position - window[2]).long(), token.to(torch.int32))
    cursor.copy_(position + 1)


def accept_reference(window: torch.Tensor, samples: torch.Tensor, counts: torch.Tensor) -> None:
    """Plain torch version of `accept`."""
    end, origin = window[0:1].clone(), window[2:3]
    steps = torch.arange(samples.shape[0] - 1, dtype=torch.int32, device=window.device)
    matches = window.index_select(0, end + steps - origin) == samples[:-1]
    accepted = matches.int().cumprod(0).sum(0, keepdim=True)  # [1]
    window.scatter_(0, (end - origin + accepted).long(), samples.gather(0, accepted).to(torch.int32))
    window[0:1] = (end + accepted + 1).to(torch.int32)
    counts[:1].add_(1)
    counts[1:].add_(accepted)


@jit(do_not_specialize=("offset", "last_token"))
def _step_rows_kernel(
    window_ptr, start_ptr, place_ptr, frequencies_ptr, tokens_ptr, positions_ptr, following_ptr, cos_ptr, sin_ptr,
    offset, last_token, scaling, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    absolute = tl.load(start_ptr) + offset + row
    token = tl.load(window_ptr + absolute - tl.load(window_ptr + 2))
    position = absolute
    rotated = absolute
    if PLACED:
        position = absolute - tl.load(place_ptr)
        rotated = position + tl.load(place_ptr + 1)
    tl.store(tokens_ptr + row, tl.minimum(tl.maximum(token, 0), last_token))
    tl.store(positions_ptr + row, position)
    tl.store(following_ptr + row, absolute + 1)
    channel = tl.arange(0, HALF_BLOCK)
    angle = rotated.to(tl.float32) * tl.load(frequencies_ptr + channel, mask=channel < HALF, other=0.0)
    tl.store(cos_ptr + row * HALF + channel, tl.cos(angle) * scaling, mask=channel < HALF)
    tl.store(sin_ptr + row * HALF + channel, tl.sin(angle) * scaling, mask=channel < HALF)


@jit
def _put_token_kernel(window_ptr, position_ptr, token_ptr, cursor_ptr):
    position = tl.load(position_ptr)
    tl.store(window_ptr + position - tl.load(window_ptr + 2), tl.load(token_ptr).to(tl.int32))
    tl.store(cursor_ptr, position + 1)


# One warp: what it reads of the window it has read before it writes there.
@jit(do_not_specialize=("num_proposals",))
def _accept_kernel(window_ptr, samples_ptr, counts_ptr, num_proposals, LANES: tl.constexpr):
    end = tl.load(window_ptr)
    tokens_ptr = window_ptr + end - tl.load(window_ptr + 2)
    lane = tl.arange(0, LANES)
    inside = lane < num_proposals
    proposal = tl.load(tokens_ptr + lane, mask=inside, other=0).to(tl.int64)
    sample = tl.load(samples_ptr + lane, mask=inside, other=0)
    # There is a lane behind the last proposal, so this is at most their number.
    accepted = tl.min(tl.where(inside & (proposal == sample), num_proposals, lane), axis=0)
    tl.store(tokens_ptr + accepted, tl.load(samples_ptr + accepted).to(tl.int32))
    tl.store(window_ptr, end + accepted + 1)
    tl.store(counts_ptr, tl.load(counts_ptr) + 1)
    tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + accepted)


def _check_words(*words: torch.Tensor) -> None:
    """All of them int32 in one row."""
    assert all(word.dtype == torch.int32 and word.ndim == 1 and word.is_contiguous() for word in words)


def step_rows_triton(
    window: torch.Tensor, start: torch.Tensor, count: int, rotation: StepRotation, *, offset: int, last_token: int,
    place: torch.Tensor | None = None,
) -> StepRows:  # fmt: skip
    """Triton version of `step_rows`."""
    frequencies = rotation.frequencies
    _check_words(window, start, *(() if place is None else (place,)))
    assert frequencies.dtype == torch.float32 and frequencies.is_contiguous()
    half = frequencies.shape[0]
    # Memory of their own, not views of one block: kernels further on are compiled for pointers of one alignment.
    tokens, positions, following = (window.new_empty(count) for _ in range(3))
    cos, sin = (frequencies.new_empty(count, half) for _ in range(2))
    _step_rows_kernel[(count,)](
        window, start, window if place is None else place, frequencies, tokens, positions, following, cos, sin,
        offset, last_token, rotation.scaling,
        HALF=half, HALF_BLOCK=triton.next_power_of_2(half), PLACED=place is not None, num_warps=1,
    )  # fmt: skip
    return StepRows(tokens, positions, following, cos, sin)


def put_token_triton(window: torch.Tensor, position: torch.Tensor, token: torch.Tensor, cursor: torch.Tensor) -> None:
    """Triton version of `put_token`."""
    _check_words(window, position, cursor)
    assert token.dtype == torch.int64
    _put_token_kernel[(1,)](window, position, token, cursor, num_warps=1)


def accept_triton(window: torch.Tensor, samples: torch.Tensor, counts: torch.Tensor) -> None:
    """Triton version of `accept`."""
    _check_words(window)
    assert samples.dtype == counts.dtype == torch.int64 and samples.is_contiguous() and samples.ndim == 1
    lanes = triton.next_power_of_2(samples.shape[0])
    _accept_kernel[(1,)](window, samples, counts, samples.shape[0] - 1, LANES=lanes, num_warps=1)


def step_rows(
    window: torch.Tensor, start: torch.Tensor, count: int, rotation: StepRotation, *, offset: int, last_token: int,
    place: torch.Tensor | None = None,
) -> StepRows:  # fmt: skip
    """The rows of positions start + offset to start + offset + count - 1; one launch.

    Args:
        window: [W] int32, see above; holds all of these positions.
        start: [1] int32, device.
        count: T, at least 1.
        rotation: Of the model that the rows go through.
        offset: Of the first row, usually negative.
        last_token: Tokens are cut to 0 .. `last_token`: -1 marks NaN logits and is no row of an embedding.
        place: [2] int32, device, of a cache that holds a part of the sequence: positions are so much smaller there,
            and rotated as if they were so much larger than that. None: the sequence's own positions.
    """
    run = step_rows_triton if window.is_cuda else step_rows_reference
    return run(window, start, count, rotation, offset=offset, last_token=last_token, place=place)


def put_token(window: torch.Tensor, position: torch.Tensor, token: torch.Tensor, cursor: torch.Tensor) -> None:
    """Write a token into the window, and the position behind it into `cursor`; one launch.

    Args:
        window: [W] int32, see above.
        position: [1] int32, device, of the token; may be `cursor` itself.
        token: [1] int64, device.
        cursor: [1] int32, device.
    """
    run = put_token_triton if window.is_cuda else put_token_reference
    run(window, position, token, cursor)


def accept(window: torch.Tensor, samples: torch.Tensor, counts: torch.Tensor) -> None:
    """Accept the proposals behind the window's end up to the first that is not what was sampled; one launch.

    That one is replaced by the sample, behind the last proposal comes the sample that follows it, and `end` moves
    behind either.

    Args:
        window: [W] int32, see above.
        samples: [n + 1] int64, device: the tokens of positions end to end + n, of which the window has n proposed.
        counts: [2] int64, device: steps and accepted proposals so far.
    """
    run = accept_triton if window.is_cuda else accept_reference
    run(window, samples, counts)
