"""`gated_delta`: against transformers, and the same bits however a text comes: in pieces, windows or a tree."""

import copy
import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from offload_runtime_kernels import gated_delta as ops
from offload_runtime_kernels.gated_delta_triton import gated_delta_triton

SMALL, LARGE = ops.DeltaShape(2, 4, 16, 32, 4), ops.DeltaShape(4, 12, 128, 128, 4)
MEMORY_TOKENS = 512  # an open chunk and the longest window
# [start of a tree, its parents]; the second goes over a chunk's end on one path and branches behind it.
TREES = [
    (20, [-1, 0, 0, 1, 1, 2, 3, 5, 6, 6, 8, 4]),
    (60, [-1, 0, 0, 1, 3, 4, 5, 5, 6, 7]),
    (70, [-1, *(random.Random(2).randrange(node) for node in range(1, 20))]),
]


class _Layer:
    """A layer of random weights and so many rows to give it."""

    def __init__(self, shape: ops.DeltaShape, count: int, dtype: torch.dtype, device: str) -> None:
        make = torch.Generator().manual_seed(count)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=make).to(device, dtype)

        self.shape, self.dtype, self.device = shape, dtype, device
        self.inputs, self.gates = normal(count, shape.channels), normal(count, 2 * shape.value_heads)
        rate = torch.rand(shape.value_heads, generator=make).log().to(device)
        self.weights = ops.DeltaWeights(normal(shape.channels, shape.taps) / 2, rate, normal(shape.value_heads).float())

    def memory(self) -> ops.DeltaMemory:
        return ops.DeltaMemory.empty(self.shape, 1, MEMORY_TOKENS, self.dtype, self.device)

    def run(self, memory: ops.DeltaMemory, at: Sequence[int], rows: ops.DeltaRows, keeps: bool = False) -> torch.Tensor:
        own = torch.tensor(at, device=self.device)
        parts = self.inputs[own].contiguous(), self.gates[own].contiguous()
        return ops.gated_delta(*parts, self.weights, memory, rows, self.shape, keeps=keeps)

    def read(self, cuts: Sequence[int], *, as_prompts: bool) -> tuple[torch.Tensor, ops.DeltaMemory]:
        """All rows in pieces, of which each is committed before the next: results, and what is left."""
        memory, outs, at, base = self.memory(), list[torch.Tensor](), 0, 0
        for count in cuts:
            rows = _rows(at, base, count, self.device)
            outs.append(self.run(memory, range(at, at + count), rows, keeps=as_prompts))
            at += count
            for chunk in () if as_prompts else range(base, at // ops.CHUNK_TOKENS):
                ops.fold(memory, _rows((chunk + 1) * ops.CHUNK_TOKENS, chunk, 0, self.device), self.shape)
            base = at // ops.CHUNK_TOKENS
        return torch.cat(outs), memory


def _rows(
    start: int, base: int, count: int, device: str, positions: Sequence[int] = (),
    ancestors: torch.Tensor | None = None,
) -> ops.DeltaRows:  # fmt: skip
    def one(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    where = one(*(positions or range(start, start + count))).view(1, count)
    return ops.DeltaRows(one(0), one(start), one(base), one(count), where, ancestors)


def _paths(parents: Sequence[int]) -> list[list[int]]:
    paths = [[0]]
    for node, parent in enumerate(parents[1:], 1):
        paths.append([*paths[parent], node])
    return paths


def _check_cuts(layer: _Layer, count: int, *cuts: Sequence[int]) -> None:
    expected, memory = layer.read([count], as_prompts=True)
    for few in ([64, 64], [30, 40, 1, 1], [63, 1, 1], [100], *cuts):
        for as_prompts in (True, False):
            out, left = layer.read([*few, count - sum(few)], as_prompts=as_prompts)
            assert torch.equal(out, expected), (few[:5], as_prompts)
            assert torch.equal(left.states, memory.states)


def _check_lag(layer: _Layer, count: int, *windows: Sequence[int]) -> None:
    """Windows of these widths behind a state that stays where it is, as of a draft's steps, and two of each over one
    memory row."""
    expected, _ = layer.read([count], as_prompts=True)
    for widths in windows:
        memory, at = layer.memory(), 62
        layer.run(memory, range(at), _rows(0, 0, at, layer.device), keeps=True)
        for width in widths:
            rows = replace(_rows(at, 0, width, layer.device), lag=(at + width - 1) // ops.CHUNK_TOKENS)
            each = {field.name: getattr(rows, field.name) for field in fields(rows)}
            twice = {name: torch.cat((one, one)) for name, one in each.items() if isinstance(one, torch.Tensor)}
            out = layer.run(memory, [*range(at, at + width)] * 2, replace(rows, **twice))
            assert torch.equal(out[:width], expected[at : at + width]), (width, at)
            assert torch.equal(out[width:], out[:width])
            at += width


def _check_tree(layer: _Layer, start: int, parents: Sequence[int]) -> None:
    paths = _paths(parents)
    depth = max(map(len, paths))
    ancestors = torch.tensor([[[start + one for one in path] + [0] * (depth - len(path)) for path in paths]])
    tree = _rows(
        start, start // ops.CHUNK_TOKENS, len(parents), layer.device, [start + len(path) - 1 for path in paths],
        ancestors.int().to(layer.device),
    )  # fmt: skip
    memory = layer.memory()
    layer.run(memory, range(start), _rows(0, 0, start, layer.device), keeps=True)
    before, nodes = copy.deepcopy(memory), range(start, start + len(parents))
    out = layer.run(memory, nodes, tree)
    for node, path in enumerate(paths):
        rows = _rows(start, start // ops.CHUNK_TOKENS, len(path), layer.device)
        chain = layer.run(copy.deepcopy(before), [start + one for one in path], rows)
        assert torch.equal(out[node], chain[-1]), (start, node)


def test_it_is_the_recurrence_of_transformers() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    layer = _Layer(SMALL, 150, torch.float32, "cpu")
    mixed = theirs.causal_conv1d_fn(layer.inputs.T[None], layer.weights.taps, activation="silu").transpose(1, 2)
    q, k, v = mixed.split((32, 32, 128), dim=-1)
    beta, alpha = layer.gates.chunk(2, dim=1)
    g = -layer.weights.log_rates.exp() * torch.nn.functional.softplus(alpha + layer.weights.time_steps)
    q, k, v = q.view(1, 150, 2, 16).double(), k.view(1, 150, 2, 16).double(), v.view(1, 150, 4, 32).double()
    expected, state = theirs.torch_recurrent_gated_delta_rule(
        q, k, v, g[None].double(), beta.sigmoid()[None].double(), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out, memory = layer.read([150], as_prompts=True)
    assert (out - expected.view(150, -1)).abs().max() < 1e-6
    assert state.shape == memory.states.shape and memory.states.abs().max() > 0


def test_prompts_windows_and_single_tokens_have_the_same_bits() -> None:
    layer = _Layer(SMALL, 132, torch.float32, "cpu")
    _check_cuts(layer, 132, [*[1] * 3, 58, *[1] * 6, 58, *[1] * 4])  # single tokens at the beginning and over both ends
    _check_lag(layer, 132, [*[1] * 5, 58, *[1] * 5], [2, 2, 2, 58, 2, 2])


@pytest.mark.parametrize(("start", "parents"), TREES)
def test_a_branch_of_a_tree_has_the_bits_of_a_chain(start: int, parents: list[int]) -> None:
    _check_tree(_Layer(SMALL, start + len(parents), torch.float32, "cpu"), start, parents)


def test_sequences_of_one_pass_do_not_know_of_each_other() -> None:
    layer = _Layer(SMALL, 40, torch.float32, "cpu")
    memory = ops.DeltaMemory.empty(SMALL, 3, MEMORY_TOKENS, torch.float32, "cpu")
    first = _rows(0, 0, 30, "cpu")
    alone = ops.gated_delta(layer.inputs[:30], layer.gates[:30], layer.weights, memory, first, SMALL, keeps=True)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    # Row 2 of memory reads the last ten, row 0 nothing but padding behind its first.
    both = ops.DeltaRows(ints(2, 0), ints(0, 30), ints(0, 0), ints(10, 1), ints(*range(10), 30, *[-1] * 9).view(2, 10))
    inputs = torch.cat((layer.inputs[:10], layer.inputs[30:31].expand(10, -1)))
    gates = torch.cat((layer.gates[:10], layer.gates[30:31].expand(10, -1)))
    out = ops.gated_delta(inputs, gates, layer.weights, memory, both, SMALL)
    assert torch.equal(out[:10], alone[:10])
    expected, _ = layer.read([31, 9], as_prompts=True)
    assert torch.equal(out[10], expected[30])


@pytest.mark.slow
def test_kernels_agree_with_plain_torch() -> None:
    if torch.cuda.is_available():
        pytest.skip("the tests of a GPU compare more")
    shape = ops.DeltaShape(1, 2, 32, 32, 4, tiled=True)
    layer = _Layer(shape, 70, torch.float32, "cpu")
    for rows, index in ((_rows(0, 0, 66, "cpu"), range(66)),):
        parts = layer.inputs[index], layer.gates[index], layer.weights
        memories = layer.memory(), layer.memory()
        outs = [
            run(*parts, memory, rows, shape, keeps=True)
            for run, memory in zip((ops.gated_delta_reference, gated_delta_triton), memories, strict=True)
        ]
        torch.testing.assert_close(outs[1], outs[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(memories[1].states, memories[0].states, atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_same_bits_however_a_text_comes(dtype: torch.dtype) -> None:
    layer = _Layer(LARGE, 330, dtype, "cuda")
    _check_cuts(layer, 330, [1] * 329)
    _check_lag(layer, 196, [1] * 134, [2] * 67)
    for start, parents in TREES:
        _check_tree(layer, start, parents)
    wide = [-1, *(random.Random(3).randrange(max(0, node - 20), node) for node in range(1, 180))]
    _check_tree(layer, 66, wide)
    atol = 1e-6 if dtype == torch.float32 else 2e-3
    for shape in (LARGE, LARGE._replace(tiled=True)):
        found, expected = (_Layer(shape, 330, dtype, one).read([330], as_prompts=True)[0] for one in ("cuda", "cpu"))
        torch.testing.assert_close(found.cpu(), expected, atol=atol, rtol=1e-2)
