"""One arithmetic: a token's keys, values and logits have the same bits however it has come through the model.

As a piece of a prompt or in a window of any width, behind what was kept or from the beginning, alone or in a batch, in
any slot, behind a path of a tree, after something was cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from offload_runtime.core import Batch, TokenTree
from offload_runtime.runners.model_runner import ModelRunner
from tests.helpers.assembly import HostKV, assemble, prefill, reset, same, verify
from tests.helpers.engine import raising
from tests.helpers.models import random_tokens

# On a GPU so many that whole prompts, and what is kept of them, are attended to split after split.
LENGTH, KEPT = (1150, 1090) if torch.cuda.is_available() else (700, 530)
TOKENS = random_tokens(LENGTH)
BEHIND = TokenTree(tuple(random_tokens(5, seed=9)))  # sees the keys and values of all that came before
MATES = [random_tokens(count, seed=count) for count in (300, 41)]
MODELS = ["llama-gqa", "mistral-window", "qwen3", "smollm3"]


@dataclass(frozen=True)
class Seen:
    """What a way to read `TOKENS` into sequence `slot` left: the logits behind the last token [1, V] and behind
    `BEHIND` [5, V], and, of a cache on the device, its keys and values."""

    last: torch.Tensor
    behind: torch.Tensor
    kv: list[torch.Tensor] | None

    @classmethod
    def of(cls, runner: ModelRunner, slot: int, last: torch.Tensor) -> Seen:
        behind = verify(runner, {slot: BEHIND})
        kv = None
        if not hasattr(runner.cache, "blocks"):  # those on the host lie in pieces
            positions = torch.arange(LENGTH, device=last.device)
            sides = [runner.cache.store(layer).at(positions.new_tensor([slot]), positions) for layer in _layers(runner)]
            kv = [side.clone() for pair in sides for side in pair]
        return cls(last.clone(), behind.clone(), kv)

    def is_as(self, other: Seen) -> bool:
        return (
            same(self.last, other.last)
            and same(self.behind, other.behind)
            and (self.kv is None or other.kv is None or all(map(same, self.kv, other.kv)))
        )


def _layers(runner: ModelRunner) -> range:
    return range(runner.decoder.config.num_layers)


def in_chunks(step: int) -> Callable[[ModelRunner, int], torch.Tensor]:
    """Read in pieces of so many tokens."""

    def read(runner: ModelRunner, slot: int) -> torch.Tensor:
        return prefill(replace(runner, chunk_tokens=step), slot, TOKENS)

    return read


def in_windows(start: int, widths: Sequence[int]) -> Callable[[ModelRunner, int], torch.Tensor]:
    """Read a prompt of `start` tokens, then windows whose widths take turns, behind which some is cut off."""

    def read(runner: ModelRunner, slot: int) -> torch.Tensor:
        last, turn = prefill(runner, slot, TOKENS[:start]), 0
        while (done := runner.cache.length(slot)) < LENGTH:
            width, turn = min(widths[turn % len(widths)], LENGTH - done), turn + 1
            last = verify(runner, {slot: TokenTree((*TOKENS[done : done + width], 7, 8))})[width - 1 : width]
            runner.cache.commit(slot, width)
        return last

    return read


def kept_and_read_on(runner: ModelRunner, slot: int) -> torch.Tensor:
    """A conversation's next turn: what was there stays, what is new is a prompt of its own."""
    prefill(runner, slot, TOKENS[:200])
    verify(runner, {slot: TokenTree(tuple(TOKENS[200:217]))})
    runner.cache.commit(slot, 17)
    prefill(runner, slot, TOKENS[217:KEPT])
    return prefill(runner, slot, TOKENS[KEPT:])


def behind_another_turn(runner: ModelRunner, slot: int) -> torch.Tensor:
    """A turn was answered, and said anew otherwise."""
    prefill(runner, slot, [*TOKENS[:KEPT], *random_tokens(120, seed=4)])
    verify(runner, {slot: TokenTree((1, 2, 3))})
    runner.cache.commit(slot, 2)
    runner.cache.truncate(slot, KEPT)
    return prefill(runner, slot, TOKENS[KEPT:])


def interrupted_and_repeated(runner: ModelRunner, slot: int) -> torch.Tensor:
    """The prompt of a turn was stopped in the middle of a pass."""
    prefill(runner, slot, TOKENS[:KEPT])
    with pytest.raises(KeyboardInterrupt):
        prefill(runner, slot, TOKENS[KEPT:], raising(KeyboardInterrupt(), after=1))
    assert runner.cache.length(slot) == KEPT
    verify(runner, {slot: BEHIND})
    return prefill(runner, slot, TOKENS[KEPT:])


def along_a_tree(runner: ModelRunner, slot: int) -> torch.Tensor:
    """The last tokens are a path through a tree of others."""
    prefill(runner, slot, TOKENS[: LENGTH - 4])
    right = TOKENS[LENGTH - 4 :]
    window = TokenTree((right[0], 5, right[1], 6, right[2], 9, right[3]), (-1, 0, 0, 1, 2, 2, 4))
    logits = verify(runner, {slot: window})
    runner.cache.commit_path(slot, [0, 2, 4, 6])
    return logits[6:7]


def beside_others(runner: ModelRunner, slot: int) -> torch.Tensor:
    """Read in a batch, every window wider or narrower than its mates'."""
    others = [other for other in range(3) if other != slot]
    for other, tokens in zip(others, MATES, strict=True):
        prefill(runner, other, tokens)
    last = prefill(runner, slot, TOKENS[: LENGTH - 30])
    for step, width in enumerate((1, 9, 20)):
        done = runner.cache.length(slot)
        windows = {slot: TokenTree(tuple(TOKENS[done : done + width]))}
        windows |= {other: TokenTree(tuple(random_tokens(1 + 8 * step + other, seed=step))) for other in others}
        rows = verify(runner, windows)
        last = rows[width - 1 : width]
        for sequence, window in windows.items():
            runner.cache.commit(sequence, len(window.tokens))
    return last


def beside_windows(runner: ModelRunner, slot: int) -> torch.Tensor:
    """Read in two turns by passes that verify windows of others, and read another prompt."""
    first, second = (other for other in range(3) if other != slot)
    prefill(runner, first, MATES[0])
    tree = TokenTree((5, 6, 7, 8), (-1, 0, 0, 1))
    runner.forward(Batch({first: tree}, {slot: TOKENS[:KEPT], second: MATES[1]}))
    runner.cache.commit_path(first, [0, 2])
    windows = {first: TokenTree((9,)), second: TokenTree(tuple(MATES[0][:12]))}
    return runner.forward(Batch(windows, {slot: TOKENS[KEPT:]})).logits[-1:]


READINGS: dict[str, Callable[[ModelRunner, int], torch.Tensor]] = {
    "in pieces of 64": in_chunks(64), "in pieces of 7": in_chunks(7), "in pieces of 611": in_chunks(611),
    "token by token": in_windows(LENGTH - 40, [1]), "in windows": in_windows(250, [17, 5, 64, 100]),
    "behind what was kept": kept_and_read_on, "behind another turn": behind_another_turn,
    "once more": interrupted_and_repeated, "along a tree": along_a_tree, "beside others": beside_others,
}  # fmt: skip


def devices() -> list[Any]:
    """Fp32 on the CPU, as bf16 takes long there, and bf16 on a GPU."""
    gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    return [pytest.param({}, id="cpu"), pytest.param(gpu, id="gpu", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=devices())
def device(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.param
    return options


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(name: str, device: dict[str, Any]) -> Seen:
    """The whole prompt in one piece."""
    made = assemble(name, chunk_tokens=LENGTH, **device)
    seen = Seen.of(made.runner, 0, prefill(made.runner, 0, TOKENS))
    made.close()
    return seen


@pytest.fixture(scope="module", params=["gpu", "host"])
def runner(name: str, device: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    """With its cache on the device, and on the host with some weights streamed too."""
    host = {"host_kv": HostKV(resident_layers=(2,), window_tokens=120), "buffers": 2, "resident": (1,)}
    made = assemble(name, **(host if request.param == "host" else {}), **device)
    yield made.runner
    made.close()


@pytest.mark.few(10)
@pytest.mark.parametrize("reading", READINGS)
def test_bits_do_not_depend_on_how_tokens_are_read(runner: ModelRunner, expected: Seen, reading: str) -> None:
    reset(runner)
    slot = len(reading) % 3
    assert Seen.of(runner, slot, READINGS[reading](runner, slot)).is_as(expected)


@pytest.mark.parametrize("runner", ["gpu"], indirect=True)
def test_bits_do_not_depend_on_who_shares_the_pass_of_a_prompt(runner: ModelRunner, expected: Seen) -> None:
    """Nor do those of the windows and of the other prompt."""
    reset(runner)
    assert Seen.of(runner, 1, beside_windows(runner, 1)).is_as(expected)
    windows = {0: TokenTree((9, 10, 11)), 2: TokenTree((4,))}
    beside = verify(runner, windows).clone()
    reset(runner)
    prefill(runner, 0, [*MATES[0], 5, 7])
    prefill(runner, 2, MATES[1])
    assert same(verify(runner, windows), beside)
