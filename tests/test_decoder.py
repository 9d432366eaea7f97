"""Our decoder against transformers, every family in fp32; then the bits that must not depend on company, on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from offload_runtime_kernels.attention_cpu import attention_reference
from offload_runtime_kernels.attention_triton import attention_triton
from offload_runtime_kernels.kv_blocks import KVBlocks

from offload_runtime.errors import ContextLengthError
from offload_runtime.model import RopeTable, RowBuilder, Window
from offload_runtime.runners import ModelRunner
from offload_runtime.weights import open_checkpoint
from tests.helpers.assembly import make_runner
from tests.helpers.kernel_conditions import KERNEL_DEVICE, random_tensor
from tests.helpers.models import (
    BUILDERS,
    LENGTH_DEPENDENT_BUILDERS,
    SHORT_LENGTH,
    all_logits,
    cached_logits,
    model_config_from_transformers,
    random_model,
    random_tokens,
    tree_logits,
)

BF16 = torch.bfloat16
CUDA = torch.device("cuda")
# The oracle computes on the CPU: sums in another order, and the GPU's exponential is good to 2 units in the last place.
GPU_ERROR = 5e-5
# Two roots, a bushy and a deep branch, listed so that no path is a contiguous run.
PARENTS = (-1, -1, 0, 1, 0, 2, 5, 3, 6)


def _assert_logits(actual: torch.Tensor, expected: torch.Tensor, *, most: float = 1e-5) -> None:
    """Raise unless the largest difference, relative to the largest logit, is below `most`."""
    assert actual.shape == expected.shape
    error = float((actual.cpu() - expected).abs().max() / expected.abs().max())
    assert error < most, f"relative error {error:.1e}"


def _window_logits(runner: ModelRunner, tokens: Sequence[int], sequence: int = 0) -> torch.Tensor:
    return runner.verify([Window(tuple(tokens))], [sequence])


def _step_logits(runner: ModelRunner, tokens: Sequence[int], sequence: int = 0) -> torch.Tensor:
    """Logits of tokens decoded one by one, each committed: [T, V]."""
    logits = []
    for token in tokens:
        logits.append(_window_logits(runner, [token], sequence)[0])
        runner.cache.commit(sequence, 1)
    return torch.stack(logits)


@pytest.mark.parametrize("name", BUILDERS)
def test_matches_transformers(name: str, tmp_path: Path) -> None:
    """From files: one window over everything, then prefill, single steps, windows of several tokens, rollback."""
    model, tokens = random_model(name), random_tokens(50)
    expected = all_logits(model, tokens)
    model.save_pretrained(tmp_path)
    made = make_runner(open_checkpoint(tmp_path), slots=2)
    runner = made.runner
    _assert_logits(_window_logits(runner, tokens), expected)
    _assert_logits(runner.prefill(0, tokens[:37]), expected[36:37])
    _assert_logits(_step_logits(runner, tokens[37:40]), expected[37:40])
    _assert_logits(_window_logits(runner, tokens[40:]), expected[40:])
    # Rejected: other tokens were tried, then the last committed ones are taken back and come again.
    _window_logits(runner, random_tokens(9, seed=5))
    runner.cache.truncate(0, 33)
    _assert_logits(_window_logits(runner, tokens[33:45]), expected[33:45])
    runner.cache.commit(0, 4)
    _assert_logits(runner.prefill(0, tokens[37:50]), expected[49:50])
    made.close()


@pytest.mark.parametrize("prompt_length", [SHORT_LENGTH - 4, SHORT_LENGTH, SHORT_LENGTH + 11])
@pytest.mark.parametrize("name", LENGTH_DEPENDENT_BUILDERS)
def test_length_dependent_rope_matches_transformers_across_the_boundary(name: str, prompt_length: int) -> None:
    model, tokens = random_model(name), random_tokens(prompt_length + 9)
    expected = cached_logits(model, [tokens[:prompt_length], *([token] for token in tokens[prompt_length:])])
    made = make_runner(model)
    _assert_logits(made.runner.prefill(0, tokens[:prompt_length]), expected[:1])
    _assert_logits(_step_logits(made.runner, tokens[prompt_length:]), expected[1:])
    made.runner.cache.truncate(0, prompt_length)  # the same steps as one window
    _assert_logits(_window_logits(made.runner, tokens[prompt_length:]), expected[1:])
    made.close()


@pytest.mark.parametrize("name", LENGTH_DEPENDENT_BUILDERS)
def test_a_prompt_in_two_parts_matches_transformers_across_the_boundary(name: str) -> None:
    model, tokens = random_model(name), random_tokens(SHORT_LENGTH + 16)
    first, second = tokens[: SHORT_LENGTH - 4], tokens[SHORT_LENGTH - 4 :]
    expected = cached_logits(model, [first, second])
    made = make_runner(model, chunk_tokens=8)
    _assert_logits(made.runner.prefill(0, first), expected[:1])
    _assert_logits(made.runner.prefill(0, second), expected[1:])
    made.close()


@pytest.mark.parametrize("name", ["llama-gqa3-wide-heads", "mistral-window", "qwen3", "smollm3"])
def test_ragged_batch_matches_single_runs(name: str) -> None:
    model = random_model(name)
    texts = [random_tokens(length, seed=length) for length in (31, 12, 20)]
    starts = (25, 1, 17)  # windows of 6, 11 and 3 tokens
    made = make_runner(model, slots=1)
    runner = made.runner
    for sequence, (text, start) in enumerate(zip(texts, starts, strict=True)):
        runner.prefill(sequence, text[:start])
    windows = [Window(tuple(text[start:])) for text, start in zip(texts, starts, strict=True)]
    for order in ([0, 1, 2], [2, 0], [1]):
        together = runner.verify([windows[sequence] for sequence in order], order)
        counts = [len(windows[sequence].tokens) for sequence in order]
        for logits, sequence in zip(together.split(counts), order, strict=True):
            _assert_logits(logits, runner.verify([windows[sequence]], [sequence]).cpu())
            _assert_logits(logits, all_logits(model, texts[sequence])[starts[sequence] :])
    made.close()


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen3", "smollm3"])
def test_tree_matches_transformers_with_a_dense_mask(name: str) -> None:
    model = random_model(name)
    prompts = [random_tokens(23), random_tokens(6, seed=1)]
    nodes = random_tokens(len(PARENTS), seed=2)
    made = make_runner(model)
    for sequence, prompt in enumerate(prompts):
        made.runner.prefill(sequence, prompt)
    window = getattr(model.config, "sliding_window", None) if name == "mistral-window" else None
    # Beside the tree a shorter chain: rows of one pass may differ in kind.
    logits = made.runner.verify([Window(tuple(nodes), PARENTS), Window(tuple(nodes[:4]))], [0, 1])
    _assert_logits(logits[: len(nodes)], tree_logits(model, prompts[0], nodes, PARENTS, window=window))
    _assert_logits(logits[len(nodes) :], all_logits(model, prompts[1] + nodes[:4])[-4:])
    made.close()


@pytest.mark.slow
def test_the_kernel_reads_the_rows_of_a_ragged_tree_as_the_reference_does() -> None:
    """The decoder takes the reference on the CPU, and only the kernel knows splits: the rows have to suit both."""
    config = model_config_from_transformers(random_model("llama-gqa").config)
    builder = RowBuilder(RopeTable(config, KERNEL_DEVICE))
    tokens = tuple(range(len(PARENTS)))
    for committed in ((300, 20), (20, 300)):
        rows = builder.build([Window(tokens, PARENTS), Window(tokens[:3])], committed, [1, 0]).query
        q = random_tensor(2, len(PARENTS), 4, 16, seed=1)
        kv = KVBlocks(random_tensor(2, 2, 2, 2, 256, 16, seed=2))
        expected = attention_reference(q, kv, rows, scale=0.5)
        torch.testing.assert_close(attention_triton(q, kv, rows, scale=0.5), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_chunks_do_not_matter(chunk_tokens: int) -> None:
    model, tokens = random_model("mistral-window"), random_tokens(45)
    expected = all_logits(model, tokens)
    made = make_runner(model, slots=1, chunk_tokens=chunk_tokens)
    done: list[tuple[int, int]] = []
    logits = made.runner.prefill(0, tokens[:40], on_layer=lambda layer, layers: done.append((layer, layers)))
    _assert_logits(logits, expected[39:40])
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    _assert_logits(_window_logits(made.runner, tokens[40:]), expected[40:])
    made.engine.drain()  # every layer once per pass, however many chunks, and one ahead
    assert made.engine.bytes_copied == (2 * 4 + 1) * made.weights.layout.layer_bytes[0]
    made.close()


def test_where_the_weights_are_does_not_change_a_bit() -> None:
    model, tokens = random_model("qwen3"), random_tokens(40)

    def run(slots: int, resident: tuple[int, ...] | None) -> torch.Tensor:
        made = make_runner(model, slots=slots, resident=resident)
        logits = [made.runner.prefill(0, tokens[:30])]
        logits += [_step_logits(made.runner, tokens[30:33]), _window_logits(made.runner, tokens[33:])]
        made.close()
        return torch.cat(logits)

    expected = run(0, None)
    for slots, resident in ((1, ()), (2, ()), (3, ()), (1, (0, 2)), (2, (3,))):
        assert torch.equal(run(slots, resident), expected), f"{slots} slots, resident {resident}"


def test_a_full_cache_refuses_and_stays_usable() -> None:
    model, tokens = random_model("llama"), random_tokens(30)
    made = make_runner(model, slots=1, capacity_tokens=24)
    with pytest.raises(ContextLengthError, match="30 tokens do not fit the 24"):
        made.runner.prefill(0, tokens)
    assert made.runner.cache.length(0) == 0
    made.runner.prefill(0, tokens[:20])
    with pytest.raises(ContextLengthError, match="257 tokens"):  # the block that holds the context is full
        made.runner.verify([Window(tuple(random_tokens(237)))], [0])
    _assert_logits(_window_logits(made.runner, tokens[20:24]), all_logits(model, tokens[:24])[20:])
    made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILDERS)
def test_matches_transformers_on_the_gpu(name: str) -> None:
    model, tokens = random_model(name), random_tokens(50)
    expected = all_logits(model, tokens)
    made = make_runner(model, slots=2, device=CUDA)
    _assert_logits(made.runner.prefill(0, tokens[:37]), expected[36:37], most=GPU_ERROR)
    _assert_logits(_window_logits(made.runner, tokens[37:]), expected[37:], most=GPU_ERROR)
    tree = made.runner.verify([Window(tuple(tokens[37:46]), (-1, 0, 1, 2, 3, 4, 5, 6, 7))], [0])
    _assert_logits(tree, expected[37:46], most=GPU_ERROR)
    made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-gqa", "llama-biases", "mistral-window", "qwen3", "smollm3"])
def test_window_tree_and_residency_do_not_change_a_bit_on_the_gpu(name: str) -> None:
    model, tokens = random_model(name), random_tokens(300)

    def make(slots: int) -> ModelRunner:
        runner = make_runner(model, slots=slots, chunk_tokens=128, capacity_tokens=512, device=CUDA, dtype=BF16).runner
        runner.prefill(0, tokens[:250])
        return runner

    stepped = _step_logits(make(0), tokens[250:])
    runner = make(2)
    assert torch.equal(_window_logits(runner, tokens[250:]), stepped)
    # The same tokens as one path of a tree, between wrong guesses: wrong, right, wrong, right, ...
    parents = [-1, -1]
    for depth in range(1, 30):
        parents += [2 * depth - 1, 2 * depth - 1]
    nodes = [tokens[250 + index // 2] if index % 2 else 5 for index in range(60)]
    tree = runner.verify([Window(tuple(nodes), tuple(parents))], [0])
    assert torch.equal(tree[1::2], stepped[:30])
