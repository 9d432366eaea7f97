"""The newest tokens of sequences as the device knows them: what the levels of a hierarchy read and write between two
visits of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from offload_runtime_kernels import window_steps
from offload_runtime_kernels.window_steps import WINDOW_HEADER_WORDS, StepLayout, StepRotation, StepRows, TreeLinks

from offload_runtime.memory import overwrite

# A window of the target and what a draft says beyond it.
WINDOW_CAPACITY_TOKENS = 2048


@dataclass(frozen=True)
class WindowInput:
    """What the host tells the device about a sequence.

    Attributes:
        tokens: The last known ones, of positions end - len(tokens) to end - 1.
        end: Tokens of the whole sequence.
        stop: Once so many are known the sequence stands still.
        last: Nothing is proposed at this position or behind it; at least `stop`.
    """

    tokens: Sequence[int]
    end: int
    stop: int
    last: int

    def __post_init__(self) -> None:
        assert 0 < len(self.tokens) <= self.end < self.stop <= self.last

    @property
    def base(self) -> int:
        """Position of the first of the tokens."""
        return self.end - len(self.tokens)


@dataclass(frozen=True)
class WindowOutput:
    """What the device has said of a sequence: `end` tokens are known, proposals lie behind."""

    end: int
    base: int
    tokens: Sequence[int]  # from position `base` on
    runners_up: Sequence[int]  # the next best of each that was sampled here; -1 for none, undefined before

    def between(self, start: int, stop: int) -> list[int]:
        """The tokens of positions `start` to `stop` - 1."""
        return self._part(self.tokens, start, stop)

    def runners_up_between(self, start: int, stop: int) -> list[int]:
        """The runners-up of the tokens of positions `start` to `stop` - 1."""
        return self._part(self.runners_up, start, stop)

    def _part(self, values: Sequence[int], start: int, stop: int) -> list[int]:
        assert self.base <= start and stop <= self.base + len(values)
        return list(values[start - self.base : stop - self.base])


class DeviceWindow:
    """Tokens of several sequences on the compute device. Its tensors never move, so that CUDA graphs may hold them.

    Each sequence's are a row of one tensor, as `window_steps` describes them. Only whoever verifies proposals moves
    `end`.

    Args:
        device: The compute device.
        capacity: Most tokens of a sequence, known and proposed.
        batch: Most sequences.

    Attributes:
        device: Where it is.
        num_rows: Sequences 0 to num_rows - 1 take part in steps: all up to the last that has joined, at least one.
        end: [num_rows] int32, strided: how many tokens of each sequence are known.
        inputs: As of the last upload.
    """

    def __init__(self, device: torch.device, capacity: int = WINDOW_CAPACITY_TOKENS, *, batch: int = 1) -> None:
        assert capacity > 0 and batch > 0
        self.capacity = capacity
        self.inputs: Mapping[int, WindowInput] = {}
        self._state = torch.zeros(batch, WINDOW_HEADER_WORDS + capacity, dtype=torch.int32, device=device)
        self._runners_up = torch.full((batch, capacity), -1, dtype=torch.int32, device=device)
        self.device = self._state.device
        self._joined = set[int]()
        self._fit_rows()

    def join(self, slot: int) -> None:
        """Let a sequence take part in steps; the window must be uploaded before the next one."""
        assert 0 <= slot < len(self._state)
        self._joined.add(slot)
        self._fit_rows()

    def leave(self, slot: int) -> None:
        """A sequence, if it did, takes part in no more steps; the window must be uploaded before the next one."""
        self._joined.discard(slot)
        self._fit_rows()

    def _fit_rows(self) -> None:
        self.num_rows = 1 + max(self._joined, default=0)
        self._rows = self._state[: self.num_rows]
        self.end = self._rows[:, 0]

    def upload(self, inputs: Mapping[int, WindowInput]) -> None:
        """Begin anew with the last known tokens of some sequences, on the current stream; never waits.

        Args:
            inputs: By sequence; the others stand still.
        """
        assert inputs and all(slot < self.num_rows for slot in inputs)
        assert all(one.last - one.base <= self.capacity for one in inputs.values())
        width = max(len(one.tokens) for one in inputs.values())
        rows = [[0] * (WINDOW_HEADER_WORDS + width) for _ in range(self.num_rows)]
        for slot, one in inputs.items():
            header = [one.end, one.base, one.stop, one.last, one.end - 1]
            rows[slot][: WINDOW_HEADER_WORDS + len(one.tokens)] = [*header, *one.tokens]
        host = torch.tensor(rows, dtype=torch.int32)
        overwrite(self._rows[:, : host.shape[1]], host)
        self.inputs = dict(inputs)

    def read(self) -> dict[int, WindowOutput]:
        """What there is of every uploaded sequence, in one copy. Waits for what the current stream has to do."""
        width = max(one.last - one.base for one in self.inputs.values())
        count = WINDOW_HEADER_WORDS + width
        parts = self._rows[:, :count], self._runners_up[: self.num_rows, :width]
        rows: list[list[int]] = torch.cat(parts, dim=1).tolist()
        return {
            slot: WindowOutput(row[0], row[1], row[WINDOW_HEADER_WORDS:count], row[count:])
            for slot, row in ((slot, rows[slot]) for slot in self.inputs)
        }

    def rows(
        self, start: torch.Tensor, layout: StepLayout, rotation: StepRotation, *, last_token: int,
        skip_committed: bool = False, place: torch.Tensor | None = None,
    ) -> StepRows:  # fmt: skip
        """The rows that a layout names, counted from `start` ([num_rows] int32, device): see `step_rows`."""
        return window_steps.step_rows(
            self._rows, start, layout, rotation, last_token=last_token, skip_committed=skip_committed, place=place
        )

    def put(
        self, start: torch.Tensor, tokens: torch.Tensor, *, offset: int = 0, cursor: torch.Tensor | None = None
    ) -> None:
        """Write `tokens` ([num_rows, n] int64, device) into the slots from `start` ([num_rows] int32, device) +
        `offset` on, and move `cursor` ([num_rows] int32, device), which may be `start`, behind `start` by as many."""
        window_steps.put_tokens(self._rows, start, tokens, offset=offset, cursor=cursor)

    def accept(
        self, samples: torch.Tensor, second_samples: torch.Tensor, counts: torch.Tensor, links: TreeLinks
    ) -> None:
        """Move every `end` behind the path of proposals, linked so and in the slots from `end` on, that `samples`
        ([num_rows, at least n + 1] int64, device, behind the newest known token and behind each of them) confirm, and
        behind the sample that follows it; `second_samples` are what would have been sampled if not that. `counts` [at
        least num_rows, 2] int64 gains a step and what it accepted."""
        window_steps.accept(self._rows, samples, second_samples, counts, links, self._runners_up)


def device_window_bytes(capacity: int = WINDOW_CAPACITY_TOKENS, *, batch: int = 1) -> int:
    """Bytes of a `DeviceWindow`."""
    return 4 * batch * (WINDOW_HEADER_WORDS + 2 * capacity)
