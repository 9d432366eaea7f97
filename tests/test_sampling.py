"""Sampling as its users meet it: the right distribution, independent noise, the filters of transformers."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_runtime import sampling
from offload_runtime.params import SamplingParams
from offload_runtime.sampling import SlotSampling, filter_logits
from tests.helpers.sampling import perturbed_logits, sample, slots_of, warped

NAN, INF = float("nan"), float("inf")
FILTERS = [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.9},
           {"top_k": 9, "top_p": 0.95, "min_p": 0.05}]  # fmt: skip


def chi_square_limit(freedom, z=3.7):
    """The chi-square value exceeded with probability 1e-4 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def assert_distributed(counts, probabilities):
    """Chi-square of counts [K] against probabilities [K]; what has probability 0 must not occur at all."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0] * counts.sum()
    assert expected.min() > 5, "too few samples for a chi-square test"
    statistic = ((counts[probabilities > 0] - expected).square() / expected).sum()
    assert statistic < chi_square_limit(len(expected) - 1)


def draw(logits, params, num_positions, num_sequences=1, first_position=0):
    """Sample one logits row [V] at many positions of many sequences -> [num_positions, num_sequences]."""
    positions = torch.arange(first_position, first_position + num_positions).repeat_interleave(num_sequences)
    sequences = torch.arange(num_sequences).repeat(num_positions)
    tokens = sample(logits.expand(len(positions), -1), params, positions, sequences)
    return tokens.view(num_positions, num_sequences)


def peaked_logits(vocab_size=13):
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(4)) * 0.9


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.6, 1.3])
@pytest.mark.parametrize("filters", [{}, *FILTERS], ids=str)
def test_tokens_follow_the_filtered_softmax(temperature, filters):
    logits = peaked_logits()
    counts = torch.zeros(13)
    for seed in (0, 7, 1 << 32, (1 << 64) - 1):
        params = SamplingParams(temperature=temperature, seed=seed, **filters)
        counts += draw(logits, params, 400, 7).flatten().bincount(minlength=13)
    allowed = filter_logits(logits.unsqueeze(0), params)[0].double()
    assert_distributed(counts.double(), (allowed / temperature).softmax(dim=0))


def joint_counts(first, second, size):
    return (first.flatten() * size + second.flatten()).bincount(minlength=size * size).double()


def test_tokens_are_independent_across_positions_noise_ids_and_seeds():
    logits = torch.tensor([1.0, 0.0, 0.5, -0.5])
    p = logits.double().softmax(dim=0)
    joint = (p.unsqueeze(1) * p).flatten()
    tokens = draw(logits, SamplingParams(temperature=1.0, seed=21), 300, 100)
    assert_distributed(joint_counts(tokens[0::2], tokens[1::2], 4), joint)
    assert_distributed(joint_counts(tokens[:, 0::2], tokens[:, 1::2], 4), joint)
    for other_seed in (22, 21 + (1 << 32)):
        others = draw(logits, SamplingParams(temperature=1.0, seed=other_seed), 300, 100)
        assert_distributed(joint_counts(tokens, others, 4), joint)


def test_a_token_depends_on_its_own_logits_seed_position_and_noise_id_only():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((40, 501), generator=generator)
    positions, sequences = torch.randint(0, 1 << 20, (40,), generator=generator), torch.arange(40) % 5
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=1234)
    together = sample(logits, params, positions, sequences)
    order = torch.randperm(40, generator=generator)
    assert sample(logits[order], params, positions[order], sequences[order]).tolist() == together[order].tolist()
    alone = [sample(logits[i, None], params, positions[i, None], sequences[i, None]).item() for i in range(40)]
    assert alone == together.tolist()


def test_known_tokens_do_not_change_between_releases():
    logits = torch.linspace(2, -2, 100).expand(8, 100)
    tokens = sample(logits, SamplingParams(1.0, seed=42), torch.arange(8), torch.zeros(8, dtype=torch.int64))
    assert tokens.tolist() == [2, 24, 7, 25, 34, 0, 17, 10]


@pytest.mark.parametrize("filters", [{}, *FILTERS], ids=str)
def test_broken_rows_give_minus_one_and_excluded_tokens_never_come(filters):
    logits = torch.randn((5, 64), generator=torch.Generator().manual_seed(2))
    logits[1, 40] = NAN
    logits[2] = -INF
    logits[3, 1:] = -INF
    logits[4, ::2] = -INF
    params = SamplingParams(temperature=1.5, **filters)
    for position in range(12):
        tokens = sample(logits, params, torch.full((5,), position), torch.arange(5)).tolist()
        assert tokens[0] >= 0 and tokens[1:4] == [-1, -1, 0] and tokens[4] % 2 == 1


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("filters", [
    {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.05}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.8, "min_p": 0.03},
], ids=str)  # fmt: skip
def test_allowed_tokens_are_those_of_transformers(temperature, filters):
    logits = torch.randn((8, 3001), generator=torch.Generator().manual_seed(6)) * 2.5
    params = SamplingParams(temperature=temperature, **filters)
    # float64, so that a sum of transformers' own rounding never decides a token at the boundary.
    expected, actual = warped(logits.double(), params), filter_logits(logits, params)
    assert torch.equal(actual > -INF, expected > -INF)
    assert torch.equal(actual[actual > -INF], logits[actual > -INF])


def test_each_slot_has_the_filters_of_its_own_request():
    requests = [
        SamplingParams(temperature=0.7, top_k=3, seed=4), SamplingParams(),
        SamplingParams(temperature=1.2, top_p=0.6, seed=5, noise_id=2),
        SamplingParams(temperature=0.7, top_k=3, seed=9),
    ]  # fmt: skip
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(2))
    positions, slots = torch.arange(40), torch.arange(40) % 4
    scores = perturbed_logits(logits, requests, positions, slots)
    tokens = sample(logits, requests, positions, slots)
    for row, slot in enumerate(slots.tolist()):
        own = (logits[row, None], [requests[slot]], positions[row, None], torch.zeros(1, dtype=torch.int64))
        assert torch.equal(perturbed_logits(*own)[0], scores[row])
        assert sample(*own)[0] == tokens[row]


LOGITS = st.lists(
    st.one_of(st.floats(-20, 20, width=32), st.integers(-3, 3).map(float), st.just(-INF)), min_size=1, max_size=40
).filter(lambda values: max(values) > -INF)


def test_top_p_stops_exactly_where_its_share_is_reached():
    # exp(-29) is below what the weights resolve, so the first token is the whole of them.
    filtered = filter_logits(torch.tensor([[0.0, -29.0]]), SamplingParams(temperature=1.0, top_p=1 - 2**-53))[0]
    assert (filtered > -INF).nonzero().flatten().tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.floats(0.05, 5), st.floats(0.01, 0.999))
def test_top_p_is_the_smallest_set_of_largest_tokens_that_reaches_its_share(values, temperature, top_p):
    logits = torch.tensor([values])
    result = filter_logits(logits, SamplingParams(temperature=temperature, top_p=top_p))
    p = (logits.double() / temperature).softmax(dim=1)
    kept = result > -INF
    assert p[kept].sum() >= top_p - 1e-6
    scaled = logits / temperature  # what is equal here is a tie: values too small to divide become zero
    last = scaled[kept].min()
    assert p[scaled > last].sum() < top_p + 1e-6, "the set without its last value already reached the share"


FILTER_CASES = [SamplingParams(temperature=t, seed=17, **filters) for t in (0.6, 1.0, 1.3) for filters in FILTERS]


@pytest.mark.gpu
@pytest.mark.parametrize("params", FILTER_CASES, ids=str)
def test_filters_and_tokens_are_the_same_on_the_cpu_and_the_gpu(params):
    logits = (torch.randn((9, 32_003), generator=torch.Generator().manual_seed(9)) * 3).bfloat16()
    logits[5, 77] = NAN
    logits[6] = -INF
    logits[7] = 1.0
    positions, sequences = torch.arange(9) * 4001, torch.arange(9) % 2
    on_gpu = (logits.cuda(), params, positions.cuda(), sequences.cuda())
    expected = filter_logits(logits.float(), params)
    actual = filter_logits(logits.cuda().float(), params)
    assert torch.equal(actual.cpu().view(torch.int32), expected.view(torch.int32))
    assert sample(*on_gpu).tolist() == sample(logits, params, positions, sequences).tolist()
    scores = perturbed_logits(logits, params, positions, sequences)
    good = ~scores.isnan()
    assert torch.equal(perturbed_logits(*on_gpu).cpu()[good], scores[good])


@pytest.mark.gpu
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8), *FILTER_CASES[:5]], ids=str)
def test_sampling_is_captured_in_a_cuda_graph_and_never_synchronises(params):
    generator = torch.Generator().manual_seed(10)
    logits = torch.randn((3, 32_000), generator=generator)
    logits_gpu, positions_gpu = logits.cuda(), torch.arange(3).cuda()
    slots_gpu, sampling_gpu = torch.zeros_like(positions_gpu), slots_of(params, device="cuda")
    on_gpu = (logits_gpu, sampling_gpu, positions_gpu, slots_gpu)
    sampling.sample(*on_gpu)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampling.sample(*on_gpu)
        sampling.perturbed_logits(*on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens_gpu = sampling.sample(*on_gpu)
        positions_gpu.add_(1)
    for step in range(4):
        logits = torch.randn((3, 32_000), generator=generator)
        logits_gpu.copy_(logits)
        request = replace(params, seed=100 + step, noise_id=step)  # another request takes over the slot
        sampling_gpu.assign(0, request)
        graph.replay()
        slots = torch.zeros(3, dtype=torch.int64)
        expected = sampling.sample(logits, SlotSampling.of([request], logits.device), torch.arange(3) + step, slots)
        assert tokens_gpu.tolist() == expected.tolist()
