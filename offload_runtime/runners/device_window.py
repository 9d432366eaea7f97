"""The newest tokens of a sequence as the device knows them: what the levels of a hierarchy read and write between
two visits of the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from offload_runtime_kernels.window_steps import (
    WINDOW_HEADER_WORDS,
    StepRotation,
    StepRows,
    accept,
    put_token,
    step_rows,
)

# A window of the target and what a draft says beyond it.
WINDOW_CAPACITY_TOKENS = 2048


class DeviceWindow:
    """Tokens of one sequence on the compute device. Its tensors never move, so that CUDA graphs may hold them.

    `end` int32 [1]: how many tokens of the sequence are known, their absolute positions being 0 to end - 1.
    `tokens` int32 [capacity]: the token of absolute position p at index p - base; from `end` on they are proposals.
    `base` int32 [1]. Only whoever verifies proposals moves `end`.

    Args:
        device: The compute device.
        capacity: Most tokens, known and proposed.
    """

    def __init__(self, device: torch.device, capacity: int = WINDOW_CAPACITY_TOKENS) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.base_host = 0  # as of the last upload
        self._state = torch.zeros(WINDOW_HEADER_WORDS + capacity, dtype=torch.int32, device=device)
        self.end, self.base = self._state[0:1], self._state[1:2]
        self.tokens = self._state[WINDOW_HEADER_WORDS:]

    def upload(self, known: Sequence[int], end: int) -> None:
        """Begin anew with the sequence's last known tokens, in one copy on the current stream; never waits.

        Args:
            known: The tokens of positions end - len(known) to end - 1.
            end: Tokens of the whole sequence.
        """
        assert 0 < len(known) <= min(end, self.capacity)
        self.base_host = base = end - len(known)
        host = torch.tensor([end, base, base - WINDOW_HEADER_WORDS, 0, *known], dtype=torch.int32)
        if self._state.is_cuda:
            host = host.pin_memory()  # the allocator keeps it until the copy is done
        self._state[: len(host)].copy_(host, non_blocking=True)

    def read(self, start: int, count: int) -> list[int]:
        """The tokens of `count` absolute positions from `start` on. Waits for what the current stream has to do."""
        first = start - self.base_host
        assert first >= 0 and first + count <= self.capacity
        tokens: list[int] = self.tokens[first : first + count].tolist()
        return tokens

    def read_all(self) -> tuple[int, list[int]]:
        """`end`, and all tokens from `base` to it, in one copy. Waits for what the current stream has to do."""
        state: list[int] = self._state.tolist()
        end, base = state[0], state[1]
        return end, state[WINDOW_HEADER_WORDS : WINDOW_HEADER_WORDS + end - base]

    def rows(
        self, start: torch.Tensor, count: int, rotation: StepRotation, *, offset: int, last_token: int,
        place: torch.Tensor | None = None,
    ) -> StepRows:  # fmt: skip
        """The rows of `count` positions from `start` ([1] int32, device) + `offset` on: see `step_rows`. One position
        before `base` may be asked for, and gives nonsense: the padding row of a sequence of one token."""
        return step_rows(self._state, start, count, rotation, offset=offset, last_token=last_token, place=place)

    def put(self, position: torch.Tensor, token: torch.Tensor, cursor: torch.Tensor) -> None:
        """Write `token` ([1] int64, device) at the absolute `position` ([1] int32, device), and the position behind it
        into `cursor` ([1] int32, device), which may be `position` itself."""
        put_token(self._state, position, token, cursor)

    def accept(self, samples: torch.Tensor, counts: torch.Tensor) -> None:
        """Move `end` behind the proposals that `samples` ([n + 1] int64, device, of positions from `end` on) confirm
        and the first sample that was not proposed; `counts` [2] int64 gains a step and what it accepted."""
        accept(self._state, samples, counts)


def device_window_bytes(capacity: int = WINDOW_CAPACITY_TOKENS) -> int:
    """Bytes of a `DeviceWindow`."""
    return 4 * (WINDOW_HEADER_WORDS + capacity)
