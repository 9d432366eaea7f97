"""Attention on the CPU: right in every dtype, and the same bits whatever else is in the window."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from offload_runtime_kernels import attention as ops
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from tests.helpers import attention_cases as cases
from tests.helpers.kernel_conditions import UNIT_ROUNDOFF, assert_within, poisoned_outputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _case(
    num_queries: int, dtype: torch.dtype, *, batch: int = 1, head_dim: int = 64, group: int = 3, num_kv_heads: int = 3
) -> cases.AttentionCase:
    case = cases.AttentionCase.random(
        batch=batch, num_queries=num_queries, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, capacity=900,
        dtype=dtype,
    )  # fmt: skip
    return cases.AttentionCase(case.q.cpu(), KVBlocks(case.kv.data.cpu()))


def _rows(rows: ops.QueryRows) -> ops.QueryRows:
    moved = {name: value.cpu() for name, value in vars(rows).items() if isinstance(value, torch.Tensor)}
    return replace(rows, **moved)


def _run(case: cases.AttentionCase, rows: ops.QueryRows, window: int | None = None) -> torch.Tensor:
    with poisoned_outputs():
        return ops.attention(case.q, case.kv, _rows(rows), case.params(window))


@pytest.mark.few(4)
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype: torch.dtype, window: int | None) -> None:
    plain, chain = _case(9, dtype, batch=2, head_dim=80), cases.chain_rows((600, 3), (9, 2))
    both = (chain, cases.tree_rows(cases.TREE_PARENTS, (505, 700)))
    for case, rows in product((plain, plain.capped_with_sinks()), both):
        # Everything is fp32 until the result is rounded, by half a roundoff of at most the largest value.
        atol = case.largest_value * (1e-5 if dtype == torch.float32 else 1e-5 + UNIT_ROUNDOFF[dtype])
        assert_within(_run(case, rows, window), case.expected(_rows(rows), window), atol=atol)


@pytest.mark.few(1)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_windows(dtype: torch.dtype, window: int | None, plain: bool, num_threads: int) -> None:
    case = _case(40, dtype) if plain else _case(40, dtype).capped_with_sinks()
    for start in (0, 240, 540):  # at 240 they reach over a block, at 540 sliding windows begin in different ones
        together = _run(case, cases.chain_rows((start,), (40,)), window)
        for width in (1, 2, 7, 17):
            for first in range(0, 40 - width, 11):
                rows = cases.chain_rows((start + first,), (width,), max_length=900)
                part = _run(case.queries(slice(first, first + width)), rows, window)
                assert torch.equal(part, together[:, first : first + width]), f"{width} from {start + first} on"


@pytest.mark.parametrize(("group", "num_kv_heads"), [(1, 1), (4, 3)])
def test_bits_of_a_prompt_are_those_of_windows(group: int, num_kv_heads: int, num_threads: int) -> None:
    case = _case(600, torch.bfloat16, group=group, num_kv_heads=num_kv_heads)
    whole = _run(case, cases.chain_rows((0,), (600,)))
    for start, width in ((0, 1), (255, 2), (3, 300), (590, 10)):
        part = _run(case.queries(slice(start, start + width)), cases.chain_rows((start,), (width,)))
        assert torch.equal(part, whole[:, start : start + width]), f"{width} from {start} on"


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies as nothing that torch allocates does."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.few(3)
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_pieces_or_where_they_lie(dtype: torch.dtype, group: int, num_threads: int) -> None:
    case, rows = _case(5, dtype, group=group), _rows(cases.chain_rows((800,), (5,)))
    expected = _run(case, rows)
    shifted = cases.AttentionCase(_shifted(case.q), KVBlocks(_shifted(case.kv.data)))
    assert torch.equal(_run(shifted, rows), expected)
    for step in (1, 2, 3):
        state = ops.AttentionState.empty(case.q)
        for first in range(0, 4, step):
            blocks = range(first, min(first + step, 4))
            ops.attend_blocks(case.q, cases.piece(case.kv, blocks), rows, blocks, state, case.params())
        assert torch.equal(ops.finish_attention(case.q, state, case.params()), expected), f"step {step}"


@pytest.mark.few(6)
@pytest.mark.parametrize("gathered_bytes", [20_000, ops.GATHERED_BYTES], ids=["a few paths", "all paths"])
@pytest.mark.parametrize("window", [None, 270])
@pytest.mark.parametrize("committed", [0, 61, 254, 640])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paths_have_chains_bits(dtype: torch.dtype, committed: int, window: int | None, gathered_bytes: int) -> None:
    position_order = (3, 0, 8, 1, 7, 2, 5, 4, 6)
    case, state = _case(9, dtype), ops.AttentionState.empty(_case(9, dtype).q)
    rows = _rows(cases.tree_rows(cases.TREE_PARENTS, (committed,), position_order=position_order))
    with poisoned_outputs():
        ops.attend_blocks_cpu(
            case.q, case.kv, rows, range(-(-rows.max_length // BLOCK_TOKENS)), state, case.params(window),
            gathered_bytes=gathered_bytes,
        )  # fmt: skip
    out = ops.finish_attention(case.q, state, case.params())
    for leaf in (4, 7, 8):
        path = cases.tree_path(cases.TREE_PARENTS, leaf)
        on_device = cases.AttentionCase(case.q, case.kv)
        chain = cases.chain_of_path(on_device, path, committed, [committed + position_order[node] for node in path])
        assert torch.equal(_run(chain, cases.chain_rows((committed,), (len(path),)), window), out[:, path]), leaf


def test_blocks_of_other_sequences_and_of_the_future_are_not_read() -> None:
    case = _case(3, torch.float32, batch=2)
    rows = cases.chain_rows((500, 20), (3, 1), slots=(1, 0), max_length=768)
    expected = _run(case, rows)
    data = case.kv.data.clone()
    data[0, :, :, :, 21:] = float("nan")  # the short sequence's positions from 21 on
    data[0, 1:] = float("nan")
    data[1, 1, :, :, 503 - BLOCK_TOKENS :] = float("nan")
    data[1, 2:] = float("nan")
    assert torch.equal(_run(cases.AttentionCase(case.q, KVBlocks(data)), rows), expected)
