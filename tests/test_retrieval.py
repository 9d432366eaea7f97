"""The retrieval verifier's cache: what the policies choose, and that the cache holds just that."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from long_context.policies import TopKPolicy
from offload_runtime_kernels.chunk_scores import SPREAD_WEIGHT
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import ModelConfig, chunks_of_budget
from offload_runtime.errors import OptionError
from offload_runtime.kv.retrieval import (
    RetrievalPolicy,
    RetrievedChunks,
)
from offload_runtime.memory import DeviceBudget, HostArena
from tests.helpers.score_bins import score_bin

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_LAYERS, NUM_BLOCKS, SCALE = 2, 3, 0.4


def _config(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=32, intermediate_size=48, num_layers=NUM_LAYERS,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, vocab_size=50, max_position_embeddings=4096,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _context(config: ModelConfig, *, batch: int = 2) -> torch.Tensor:
    """Keys and values of every layer and sequence, [L, B, NUM_BLOCKS, 2, H_kv, 256, D]."""
    return _random(NUM_LAYERS, batch, NUM_BLOCKS, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim, seed=1)


def _keys(context: torch.Tensor, layer: int, sequence: int, head: int, count: int) -> torch.Tensor:
    """[count, D], the first keys of a head in fp64."""
    return context[layer, sequence, :, 0, head].flatten(0, 1)[:count].double().cpu()


def _tell(policy: RetrievalPolicy, context: torch.Tensor) -> None:
    """All blocks, through a ring of two that lies beside another sequence's, as a cache passes them on."""
    for layer in range(NUM_LAYERS):
        for sequence in range(context.shape[1]):
            ring = torch.full((2, 2, *context.shape[3:]), float("nan"), device=DEVICE)
            ring[1, 1] = context[layer, sequence, 0]
            policy.on_blocks(layer, sequence, KVBlocks(ring, first_block=1), 1, range(1))
            ring[1] = context[layer, sequence, 1:]
            policy.on_blocks(layer, sequence, KVBlocks(ring, first_block=1), 1, range(1, 3))


def _policy(
    kind: Callable[..., RetrievalPolicy], config: ModelConfig, *, budget_tokens: int = 96, chunk_size: int = 8,
    budget: DeviceBudget | None = None,
) -> RetrievalPolicy:  # fmt: skip
    return kind(
        config, torch.float32, budget_tokens=budget_tokens, chunk_size=chunk_size,
        capacity_tokens=NUM_BLOCKS * BLOCK_TOKENS - 5, batch=2, budget=budget or DeviceBudget(DEVICE, None),
    )  # fmt: skip


def _best(scores: torch.Tensor, budget: int) -> list[int]:
    """Chunk 0 and the highest scores, then -1."""
    count = len(scores)
    others = sorted(range(1, count), key=lambda chunk: (-score_bin(float(scores[chunk])), chunk))
    chosen = sorted([*range(min(1, count)), *others[: budget - 1]])
    return chosen + [-1] * (budget - len(chosen))


def _summary_scores(keys: torch.Tensor, queries: torch.Tensor, chunk_size: int) -> torch.Tensor:
    chunks = keys.unflatten(0, (-1, chunk_size))
    mean, spread = chunks.mean(1), chunks.var(1, unbiased=False).mean(-1).half().double()
    unit = (mean.abs().amax(-1, keepdim=True) / 127).half().double()
    decoded = (mean / unit + 0.5).floor().clamp(-127, 127) * unit
    above = SPREAD_WEIGHT * SCALE**2 * queries.square().sum(-1, keepdim=True) * spread
    return (queries @ decoded.T * SCALE + above).softmax(-1).mean(0)


def _attention_masses(keys: torch.Tensor, queries: torch.Tensor, chunk_size: int) -> torch.Tensor:
    attention = (queries @ keys.T * SCALE).softmax(-1)
    return attention.unflatten(1, (-1, chunk_size)).sum(-1).mean(0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 80), (7, 1, 96)])
@pytest.mark.parametrize("kind", [RetrievalPolicy, TopKPolicy])
def test_the_choice_of_a_policy(
    kind: type[RetrievalPolicy] | type[TopKPolicy], num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    config = _config(num_heads, num_kv_heads, head_dim)
    context, policy = _context(config), _policy(kind, config)
    _tell(policy, context)
    q = _random(2, 5, num_heads, head_dim, seed=2)
    available, used = [90, 7], [3, 5]
    for layer in range(NUM_LAYERS):
        selected = policy.select(
            layer, q, available, scale=SCALE, rows_used=torch.tensor(used, dtype=torch.int32, device=DEVICE)
        )
        assert selected.shape == (2, num_kv_heads, 12) and selected.dtype == torch.int32
        for b in range(2):
            for head in range(num_kv_heads):
                heads = slice(head * num_heads // num_kv_heads, (head + 1) * num_heads // num_kv_heads)
                queries = q[b, : used[b], heads].flatten(0, 1).double().cpu()
                keys = _keys(context, layer, b, head, available[b] * 8)
                score = _summary_scores if kind is RetrievalPolicy else _attention_masses
                assert selected[b, head].tolist() == _best(score(keys, queries, 8), 12)


HostTable = Callable[[torch.Tensor, int], BlockTable]


@pytest.fixture
def host_table() -> Iterator[HostTable]:
    """Makes tables of a layer's blocks in host memory, one run a sequence, page-locked until the test ends."""
    arenas: list[HostArena] = []

    def make(context: torch.Tensor, layer: int) -> BlockTable:
        table = BlockTable.empty(context.shape[1], NUM_BLOCKS, DEVICE)
        for sequence in range(context.shape[1]):
            blocks = context[layer, sequence]
            arenas.append(HostArena(blocks.nbytes, name="blocks"))
            if DEVICE.type == "cuda":
                arenas[-1].pin()
            run = arenas[-1].buffer[: blocks.nbytes].view(blocks.dtype).view(blocks.shape)
            table.put(sequence, 0, run.copy_(blocks))
        return table

    yield make
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for arena in arenas:
        arena.close()


def _check_held(
    chunks: RetrievedChunks, context: torch.Tensor, layer: int, sequence: int, selected: torch.Tensor, count: int
) -> None:
    """The places of a sequence hold the selected chunks [H_kv, K], every one of them once, as a gather would."""
    size, kv = chunks.chunk_size, chunks.blocks(layer)
    for head in range(selected.shape[0]):
        order = chunks.resident[layer, sequence, head].tolist()
        assert sorted(order[:count]) == selected[head].tolist()[:count] and set(order[count:]) <= {-1}
        for kind in range(2):
            held = kv.data[sequence, :, kind, head].flatten(0, 1).unflatten(0, (-1, size))  # [places, size, D]
            full = context[layer, sequence, :, kind, head].flatten(0, 1).unflatten(0, (-1, size))
            assert torch.equal(held[:count], full[order[:count]])


def _retrieved(config: ModelConfig, *, budget_tokens: int = 96, chunk_size: int = 8) -> RetrievedChunks:
    return RetrievedChunks(
        config, torch.float32, budget_tokens=budget_tokens, chunk_size=chunk_size, batch=2,
        budget=DeviceBudget(DEVICE, None),
    )  # fmt: skip


@pytest.mark.parametrize("chunk_size", [2, 8, 32])
def test_the_cache_follows_a_policy_over_a_growing_context(chunk_size: int, host_table: HostTable) -> None:
    config = _config()
    context = _context(config)
    budget_tokens = 10 * chunk_size
    policy = _policy(RetrievalPolicy, config, budget_tokens=budget_tokens, chunk_size=chunk_size)
    _tell(policy, context)
    chunks = _retrieved(config, budget_tokens=budget_tokens, chunk_size=chunk_size)
    tables = [host_table(context, layer) for layer in range(NUM_LAYERS)]
    q = _random(2, 3, 4, 16, seed=5)
    moved = []
    for step, available in enumerate(([3, 0], [9, 5], [20, 10], [24, 11], [24, 24])):
        q = q + 0.2 * _random(2, 3, 4, 16, seed=6 + step)  # most of the choice stays
        for layer in range(NUM_LAYERS):
            selected = policy.select(layer, q, available, scale=SCALE)
            before = chunks.resident[layer].clone()
            fetched = chunks.update(layer, selected, tables[layer])
            new = (selected >= 0) & ~(selected[..., :, None] == before[..., None, :]).any(-1)
            assert torch.equal(fetched, new.sum(-1, dtype=torch.int32))
            moved.append(int(fetched.sum()))
            for sequence in range(2):
                count = min(10, available[sequence])
                _check_held(chunks, context, layer, sequence, selected[sequence], count)
    assert 0 < moved[-1] < 2 * 2 * 10, "the updates were no updates"


def test_after_a_sequence_was_cut_its_rewritten_chunks_are_fetched_again(host_table: HostTable) -> None:
    config = _config()
    context, chunks = _context(config), _retrieved(config)
    one = torch.tensor([*range(6), *range(34, 40)], dtype=torch.int32, device=DEVICE)
    selected = one.expand(2, 2, 12).contiguous()
    chunks.update(0, selected, host_table(context, 0))
    context[0, :, 1:] += 1.0  # both sequences go on differently behind token 256 + 3 * 8 + 1
    context[0, :, 0] += 5.0  # and this must not be looked at: it was not cut
    for length in (36 * 8 + 1, 35 * 8 + 1):  # twice without an update in between
        chunks.forget(0, length)
    assert (chunks.resident[0] >= 0).sum(-1).tolist() == [[7, 7], [12, 12]]
    fetched = chunks.update(0, selected, host_table(context, 0))
    assert fetched.tolist() == [[5, 5], [0, 0]]  # 35 to 39
    chunks.forget(0, 40 * 8)  # nothing that is held reaches so far
    assert (chunks.resident[0] >= 0).all()
    chunks.forget(0)
    assert chunks.resident[0, 0].unique().tolist() == [-1]
    fetched = chunks.update(0, selected, host_table(context, 0))
    assert fetched.tolist() == [[12, 12], [0, 0]]
    _check_held(chunks, context, 0, 0, selected[0], 12)


def test_options_that_make_no_sense_are_refused() -> None:
    assert chunks_of_budget(96, 8) == 12
    for budget_tokens, chunk_size, message in (
        (96, 1, "power of two from 2 to 64"), (96, 12, "chunk of 12 tokens"), (256, 128, "from 2 to 64"),
        (100, 8, "100 tokens is not made of whole chunks of 8: use 96"), (0, 8, "use 8"), (4, 8, "use 8"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            chunks_of_budget(budget_tokens, chunk_size)
