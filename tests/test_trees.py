"""Trees verified in one pass: tokens, logits and committed keys and values are those of plain decoding, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime import speculation
from offload_runtime.kv import DeviceKVCache, HostKVCache
from offload_runtime.kv.device import compact_path
from offload_runtime.model import Window
from offload_runtime.params import SamplingParams
from offload_runtime.runners import ModelRunner
from offload_runtime.speculation import DraftRequest, NgramProposer, Proposal, Proposer
from tests.helpers.assembly import HostKV, make_runner
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.models import random_model, random_tokens
from tests.helpers.sampling import run_step, slots_for
from tests.helpers.trees import BlockRecorder, TreeScript, begin, committed_kv, decode, plain

CAPACITY, WINDOW, COUNT = 1024, 80, 32
PARAMS = [SamplingParams(), SamplingParams(temperature=0.6, seed=3), SamplingParams(temperature=1.0, seed=4)]
# Ragged: at the beginning of a block, right before the end of one, and of the second one.
PROMPTS = {0: random_tokens(21, seed=1), 1: random_tokens(BLOCK_TOKENS - 20, seed=2), 2: random_tokens(490, seed=3)}
SETUPS: dict[str, dict[str, Any]] = {
    "device": {"name": "llama-gqa"},
    "weights streamed": {"name": "qwen3", "slots": 2, "resident": (1,)},
    "KV on the host": {
        "name": "llama-gqa", "slots": 2, "resident": (0, 2),
        "host_kv": HostKV(resident_layers=(2,), window_tokens=WINDOW),
    },
    "sliding windows": {"name": "mistral-window"},
    "sliding windows, KV on the host": {"name": "qwen2-window", "host_kv": HostKV(window_tokens=WINDOW)},
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A runner, and plain decoding's texts and keys and values, in the order of `PARAMS`; `resident` layers keep theirs
    on the device."""

    runner: ModelRunner
    truth: list[dict[int, list[int]]]
    kv: list[dict[int, torch.Tensor]]
    blocks: list[dict[tuple[int, int, int], torch.Tensor]]
    resident: tuple[int, ...] = ()


def cache_of(runner: ModelRunner) -> DeviceKVCache | HostKVCache:
    assert isinstance(runner.cache, DeviceKVCache | HostKVCache)
    return runner.cache


def all_kv(runner: ModelRunner, resident: tuple[int, ...]) -> dict[int, torch.Tensor]:
    cache, layers = cache_of(runner), runner.decoder.config.num_layers
    return {sequence: committed_kv(cache, layers, sequence, resident=resident) for sequence in PROMPTS}


def resident_of(options: dict[str, Any]) -> tuple[int, ...]:
    """Layers of a setup that keep their keys on the device, where others do not."""
    return options["host_kv"].resident_layers if "host_kv" in options else ()


def observed(runner: ModelRunner) -> BlockRecorder:
    recorder = BlockRecorder()
    runner.cache.observers[:] = [recorder]
    return recorder


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    options = dict(SETUPS[request.param])
    model = random_model(options.pop("name"))
    made = make_runner(model, capacity_tokens=CAPACITY, **options)
    truth, kv, blocks = [], [], []
    for params in PARAMS:
        recorder = observed(made.runner)
        truth.append(plain(made.runner, PROMPTS, params, count=COUNT))
        kv.append(all_kv(made.runner, resident_of(options)))
        blocks.append(recorder.seen)
    yield Setup(made.runner, truth, kv, blocks, resident_of(options))
    made.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("index", range(len(PARAMS)))
@pytest.mark.parametrize(("gamma", "nodes", "seed"), [(1, 5, 1), (4, 40, 2), (7, 60, 3)])
def test_any_tree_gives_plain_decodings_tokens_and_keys(
    setup: Setup, index: int, gamma: int, nodes: int, seed: int
) -> None:
    params, truth = PARAMS[index], setup.truth[index]
    script, recorder = TreeScript(truth, seed=seed), observed(setup.runner)
    texts, history = decode(setup.runner, PROMPTS, params, script, count=COUNT, gamma=gamma, nodes=nodes)
    assert texts == truth
    accepted = {len(played.path) for rounds in history for played in rounds.values()}
    assert accepted == set(range(gamma + 1)), "every length, none and all"
    shapes = {played.proposal.is_chain for rounds in history for played in rounds.values()}
    moved = [played.path != tuple(range(len(played.path))) for rounds in history for played in rounds.values()]
    assert False in shapes and any(moved) and not all(moved)
    for sequence, kv in all_kv(setup.runner, setup.resident).items():
        assert torch.equal(kv, setup.kv[index][sequence]), f"keys and values of sequence {sequence}"
    assert recorder.seen.keys() == setup.blocks[index].keys() and recorder.seen
    for place, block in recorder.seen.items():
        assert torch.equal(block, setup.blocks[index][place]), f"what an observer saw of {place}"


@pytest.mark.few(1)
def test_each_tree_is_accepted_as_far_as_it_is_right(setup: Setup) -> None:
    """No branch is taken for another's, at any temperature."""
    for params, truth in zip(PARAMS, setup.truth, strict=True):
        script = TreeScript(truth, seed=9)
        texts = begin(setup.runner, PROMPTS, params, script)
        for _ in range(5):
            requests = [DraftRequest(sequence, text, 5, 60) for sequence, text in texts.items()]
            for request, played in zip(requests, run_step(setup.runner, params, script, requests), strict=True):
                assert len(played.path) == script.agreeing[request.slot]
                texts[request.slot] += played.tokens


@pytest.mark.few(1)
def test_logits_of_a_path_are_those_of_a_chain(setup: Setup) -> None:
    """Rows of the pass that verified a tree, beside rows of plain decoding's, bit for bit."""
    runner, prompt, truth = setup.runner, PROMPTS[1], setup.truth[1][1]
    right = truth[len(prompt) : len(prompt) + 6]
    tokens = (right[0], 5, right[1], 6, 7, right[2], 8, right[3], 9)
    parents = (-1, 0, 0, 1, 2, 2, 5, 5, 6)
    runner.cache.truncate(1, 0)
    runner.prefill(1, prompt)
    tree = runner.verify([Window(tokens, parents)], [1])[[0, 2, 5, 7]].clone()
    for row, token in enumerate(right[:4]):
        assert torch.equal(runner.verify([Window((token,))], [1])[0], tree[row])
        runner.cache.commit(1, 1)


def test_a_chain_moves_nothing() -> None:
    with torch.inference_mode():  # outside of it torch refuses to write to this
        data = torch.randn(2, 1, 2, 2, BLOCK_TOKENS, 4, generator=torch.Generator().manual_seed(1))
        before = data.clone()
    for rows in ([], [0], [0, 1, 2]):
        compact_path((data,), 3, rows)
    for rows in ([1, 2], [0, 2, 2], [0, 3, 1]):
        with pytest.raises(AssertionError, match="a path from the root"):
            compact_path((data,), 3, rows)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        compact_path((data,), 3, [0, 2])
    with torch.inference_mode():
        compact_path((data,), 3, [0, 2])
    assert torch.equal(data[..., 4, :], before[..., 5, :]) and torch.equal(data[..., :4, :], before[..., :4, :])


@pytest.mark.few(1)
def test_branches_fill_what_is_left_of_a_context(setup: Setup) -> None:
    """A tree is cut to the room there is, down to none, and decoding goes on to the last token."""
    runner, params = setup.runner, PARAMS[1]
    prompts = {0: random_tokens(CAPACITY - 12, seed=5)}
    truth = plain(runner, prompts, params, count=13)
    script = TreeScript(truth, seed=1, most_branches=20)
    texts, history = decode(runner, prompts, params, script, count=13, gamma=4, nodes=60)
    assert texts == truth and len(truth[0]) == CAPACITY + 1
    sizes = [len(rounds[0].proposal) for rounds in history]
    assert 0 < sizes[0] <= 11 and sizes[-1] <= 1


@pytest.mark.few(1)
def test_trees_of_n_grams(setup: Setup) -> None:
    """Texts with several continuations of their own endings."""
    runner, proposer, params = setup.runner, NgramProposer(), PARAMS[1]
    base = [7, 8, 9, 7, 8, 10, 11, 7, 8, 12, 7, 8]
    accepted = []
    for other in range(60, 75):
        text = [7, 8, other, 30, *base]
        runner.cache.truncate(0, 0)
        runner.prefill(0, text[:-1])
        proposer.join(0, params)
        played = run_step(runner, params, proposer, [DraftRequest(0, text, 4, 24)])[0]
        assert not played.proposal.is_chain and len(played.proposal) <= 24 and max(played.proposal.depths) == 4
        accepted.append(len(played.path))
        runner.cache.truncate(0, len(text) - 1)
        for token in played.tokens:
            assert run_step(runner, params, Proposer(), [DraftRequest(0, text, 0)])[0].tokens == [token]
            text.append(token)
    assert 0 in accepted


@pytest.mark.few(1)
def test_what_no_row_stands_for_is_not_in_the_cache_afterwards(setup: Setup) -> None:
    """What comes behind a tree overwrites what it left."""
    runner, params, truth = setup.runner, PARAMS[0], setup.truth[0]
    script = TreeScript(truth, seed=4)
    texts = begin(runner, PROMPTS, params, script)
    play = [DraftRequest(sequence, text, 6, 70) for sequence, text in texts.items()]
    for request, played in zip(play, run_step(runner, params, script, play), strict=True):
        texts[request.slot] += played.tokens
    while any(len(text) < len(truth[sequence]) for sequence, text in texts.items()):
        requests = [DraftRequest(s, text, 0) for s, text in texts.items() if len(text) < len(truth[s])]
        for request, played in zip(requests, run_step(runner, params, Proposer(), requests), strict=True):
            texts[request.slot] += played.tokens
    assert texts == truth
    for sequence, kv in all_kv(runner, setup.resident).items():
        assert torch.equal(kv, setup.kv[0][sequence])


GPU = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "chunk_tokens": 256}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETUPS)
def test_bits_on_the_gpu(name: str) -> None:
    """In bf16: tokens, logits of paths, and keys and values."""
    options = dict(SETUPS[name])
    model = random_model(options.pop("name"))
    made = make_runner(model, capacity_tokens=CAPACITY, **GPU, **options)
    runner, resident = made.runner, resident_of(options)
    for index, params in enumerate(PARAMS):
        recorder = observed(runner)
        truth = plain(runner, PROMPTS, params, count=COUNT)
        expected, blocks = all_kv(runner, resident), recorder.seen
        for gamma, nodes in ((1, 5), (4, 40), (7, 60)):
            recorder, script = observed(runner), TreeScript(truth, seed=index)
            texts, history = decode(runner, PROMPTS, params, script, count=COUNT, gamma=gamma, nodes=nodes)
            assert texts == truth
            assert {len(played.path) for rounds in history for played in rounds.values()} == set(range(gamma + 1))
            assert all(torch.equal(kv, expected[sequence]) for sequence, kv in all_kv(runner, resident).items())
            assert recorder.seen.keys() == blocks.keys()
            assert all(torch.equal(block, blocks[place]) for place, block in recorder.seen.items())
        test_logits_of_a_path_are_those_of_a_chain(Setup(runner, [truth, truth], [], []))
    made.close()


@pytest.mark.gpu
def test_a_tree_makes_the_host_wait_once() -> None:
    """Nothing on the way to the tokens, or back into the cache, but the reading of the tokens."""
    made = make_runner(random_model("llama-gqa"), capacity_tokens=CAPACITY, **GPU)
    runner, params = made.runner, PARAMS[1]
    truth = plain(runner, PROMPTS, params, count=COUNT)

    class SecondChild(TreeScript):
        """Two siblings of which the second is right."""

        def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
            right = [truth[request.slot][len(request.tokens)] for request in requests]
            return [Proposal(((token + 1) % 90, token), (-1, -1), ("x", "x")) for token in right]

    script, read = SecondChild(truth, seed=1), torch.Tensor.tolist

    def allowed(tensor: torch.Tensor) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(tensor)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    sampling = slots_for(runner, params)
    for mode in ("default", "error"):  # the first time kernels are compiled and memory is found
        texts = begin(runner, PROMPTS, params, script)
        requests = [DraftRequest(sequence, text, 1, 2) for sequence, text in texts.items()]
        torch.cuda.synchronize()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", allowed)
            torch.cuda.set_sync_debug_mode(mode)
            try:
                rounds = speculation.run_step(runner, sampling, script, requests)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert [len(played.path) for played in rounds] == [1, 1, 1]
    made.close()
