"""The same tokens whatever proposes them, wherever weights, keys and values are, however they are sampled: in pairs."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from offload_runtime.config import SpeculationOptions
from tests.helpers.covering import few
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)

# The first is longer than a block of keys and values, so that some of them stream.
PROMPTS = [[5 + (3 * i * i + i // 7) % 280 for i in range(300)], PROMPT, "the lazy dog"]
COUNT = 10
SMALL: dict[str, Any] = {"budget_tokens": 64, "chunk_size": 8, "recent_tokens": 64, "sink_tokens": 4}
DRAFTS: dict[str, dict[str, Any]] = {
    "n-grams": {"draft": "ngram", "gamma": 7},
    "chains": {"gamma": 5, "tree_nodes": 0},
    "trees": {"gamma": 3, "tree_nodes": 24},
    "whatever is chosen": {},
    "first and newest tokens": {"gamma": 6, "speculation": SpeculationOptions("chain", "streaming", **SMALL)},
    "retrieved chunks": {"gamma": 4, "speculation": SpeculationOptions("chain", "retrieval", **SMALL)},
    "TriForce": {"gamma": 8, "speculation": SpeculationOptions("triforce", gamma_draft=2, **SMALL)},
}  # fmt: skip
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 2**63},
}
AXES: list[list[Any]] = [list(DRAFTS), ["gpu", "host"], [0, 2, "auto"], list(SAMPLINGS)]
# TriForce needs all weights on the device.
GRID = [row for row in product(*AXES) if row[0] != "TriForce" or row[2] == "auto"]


def chosen(rows: list[tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    return [rows[at] for at in few([dict(zip("dkrs", map(list.index, AXES, row), strict=True)) for row in rows], count)]


ROWS = chosen(GRID, 22)
OFTEN = chosen(ROWS, 8)


def _pairs(rows: list[tuple[Any, ...]]) -> set[Any]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_every_pair_of_values_is_tried() -> None:
    assert _pairs(ROWS) == _pairs(GRID)
    assert {value for row in OFTEN for value in enumerate(row)} == {value for row in GRID for value in enumerate(row)}


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[list[int]]]:
    """Plain decoding with everything on the device."""
    with load(target, draft="none", max_batch=3) as runtime:
        asked = {"max_new_tokens": COUNT, "ignore_eos": True}
        tokens = {
            name: [result.tokens for result in runtime.generate_batch(PROMPTS, **asked, **sampling)]
            for name, sampling in SAMPLINGS.items()
        }
    assert len({tuple(answer) for answers in tokens.values() for answer in answers}) == 3 * len(SAMPLINGS)
    return tokens


@pytest.mark.parametrize(
    ("proposed_by", "kv", "resident", "sampling"),
    [pytest.param(*row, marks=[] if row in OFTEN else pytest.mark.slow) for row in ROWS],
)
def test_the_tokens_are_those_of_plain_decoding(
    target: Path, draft: Path, expected: dict[str, list[list[int]]], proposed_by: str, kv: str, resident: int | str,
    sampling: str,
) -> None:  # fmt: skip
    """In a batch, and alone, where the first answer draws the same noise."""
    options = {"draft": draft, "kv": kv, "resident_layers": resident, "max_batch": 3, **DRAFTS[proposed_by]}
    asked = {"max_new_tokens": COUNT, "ignore_eos": True, **SAMPLINGS[sampling]}
    with load(target, **options) as runtime:
        together = runtime.generate_batch(PROMPTS, **asked)
        alone = runtime.generate(PROMPTS[0], **asked)
    assert [result.tokens for result in (*together, alone)] == [*expected[sampling], expected[sampling][0]]
    if proposed_by not in ("n-grams", "whatever is chosen"):  # those may find nothing to propose
        assert all(sum(result.stats.accepted_by_depth) > 0 for result in together)
