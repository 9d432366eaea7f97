"""Shared noise: Philox against its published answers, the logarithm against float64, Triton against torch bit by bit.

The Triton kernels run compiled where there is a GPU, in Triton's interpreter elsewhere; the other side is always torch
on the CPU, so on a GPU these tests are the equality of devices that lossless speculation rests on.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch
from offload_runtime_kernels import gumbel_argmax as ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = (0, 1, 0x80000000, (1 << 63) + 12345, (1 << 64) - 1)
NAN, INF = float("nan"), float("inf")


def rows(num_rows):
    """Positions and slots [R] that differ from row to row, on the CPU."""
    return torch.arange(num_rows) * 977 + 3, torch.arange(num_rows) % 3


def keys(seed=0, *, temperature=1.0, noise_ids=(0, 1, 2), device="cpu"):
    """Slots whose requests differ in nothing but their noise ids."""
    return ops.noise_keys([(temperature, seed, noise_id) for noise_id in noise_ids]).to(device)


def assert_same_bits(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(actual.cpu().view(torch.int32), expected.cpu().view(torch.int32), rtol=0, atol=0)


def philox_words(counter, key):
    """Philox4x32-10 for one counter in Python integers, written from the paper and independent of the torch one."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
])  # fmt: skip
def test_philox_gives_the_known_answers_of_random123(counter, key, answer):
    words = tuple(torch.tensor([int(word, 16)]) for word in counter.split())
    low, high = (int(word, 16) for word in key.split())
    output = ops.philox4x32_reference(words, (torch.tensor([low]), torch.tensor([high])))
    assert [f"{int(word):08x}" for word in output] == answer.split()
    assert [f"{word:08x}" for word in philox_words([int(w) for w in words], (low, high))] == answer.split()


def test_noise_takes_its_words_where_the_contract_says():
    seed, position, noise_id = 0xFEDCBA9876543210, 123_456, 7
    slot_keys = ops.noise_keys([(0.0, 0, 0), (0.5, seed, noise_id)])
    noise = ops.gumbel_noise_reference(torch.tensor([position]), torch.tensor([1]), slot_keys, vocab_size=11)
    words = [philox_words((v // 4, position, noise_id, 0), (seed & 0xFFFFFFFF, seed >> 32))[v % 4] for v in range(11)]
    assert_same_bits(noise[0], ops.gumbel_from_words_reference(torch.tensor(words)))


def test_noise_is_accurate_over_the_whole_range_of_words():
    ends = torch.arange(1 << 17)
    powers = 1 << torch.arange(32)
    middle = torch.arange(0, 1 << 32, 104_729)
    words = torch.cat([ends, (1 << 32) - 1 - ends, powers, powers - 1, middle])
    noise = ops.gumbel_from_words_reference(words).double()
    w = np.minimum((words.numpy().astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    exact = -torch.log(-torch.log1p(-torch.from_numpy(w).double()))
    error = (noise - exact).abs()
    assert noise.isfinite().all()
    assert torch.minimum(error, error / exact.abs()).max() < 2e-7
    # The rarest winners: the 2^-32 tail is resolved word by word, not rounded away in 1 - w.
    tail = -torch.log(-torch.log1p(-(torch.arange(4096).double() + 0.5) / 2**32))
    assert ((noise[:4096] - tail).abs() / tail).max() < 2e-7
    assert (noise[:4096].diff() < 0).all()


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("vocab_size", [1, 5, 1023, 1024, 2050])
def test_triton_noise_has_the_bits_of_the_reference(seed, vocab_size, monkeypatch):
    positions, slots = torch.tensor([0, 131_072, (1 << 31) + 7]), torch.tensor([0, 2, 1])
    slot_keys = keys(seed, noise_ids=(0, (1 << 32) - 1, 1 << 20))
    expected = ops.gumbel_noise_reference(positions, slots, slot_keys, vocab_size=vocab_size)
    on_device = (positions.to(DEVICE), slots.to(DEVICE), slot_keys.to(DEVICE))
    poison_new_tensors(monkeypatch)
    assert_same_bits(ops.gumbel_noise_triton(*on_device, vocab_size=vocab_size), expected)


def poison_new_tensors(monkeypatch):
    """Fill what `torch.empty` returns with NaN or -77, so that an element nobody writes is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(NAN if out.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "temperature"), [
    (torch.float32, 0.0), (torch.float32, 0.6), (torch.float32, 1.3), (torch.bfloat16, 0.0), (torch.float16, 0.6),
])  # fmt: skip
@pytest.mark.parametrize("vocab_size", [3, 1022, 3077])
def test_triton_chooses_the_tokens_of_the_reference(dtype, temperature, vocab_size, monkeypatch):
    generator = torch.Generator().manual_seed(vocab_size)
    positions, slots = rows(5)
    # Rows of a wider matrix whose rest is NaN: a read past the vocabulary would show.
    wide = torch.full((5, vocab_size + 9), NAN, dtype=dtype)
    logits = wide[:, :vocab_size]
    logits.copy_(torch.randn((5, vocab_size), generator=generator) * 2)
    logits[:, ::3] = -INF
    slot_keys = keys(11, temperature=temperature)
    expected = ops.gumbel_argmax_reference(logits, positions, slots, slot_keys)
    perturbed = ops.gumbel_perturb_reference(logits, positions, slots, slot_keys)
    on_device = (wide.to(DEVICE)[:, :vocab_size], positions.to(DEVICE), slots.to(DEVICE), slot_keys.to(DEVICE))
    poison_new_tensors(monkeypatch)
    tokens = ops.gumbel_argmax_triton(*on_device)
    assert tokens.tolist() == expected.tolist()
    assert all(token % 3 for token in tokens.tolist()), "a token at -inf was chosen"
    assert_same_bits(ops.gumbel_perturb_triton(*on_device), perturbed)
    assert_same_bits(perturbed.amax(dim=1), perturbed.gather(1, expected.unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize("run", [ops.gumbel_perturb_reference, ops.gumbel_perturb_triton])
def test_requests_of_different_options_share_a_launch(run):
    """Each row is what it is alone: its own temperature, seed and noise id, wherever its slot is."""
    device = DEVICE if run is ops.gumbel_perturb_triton else "cpu"
    requests = [(0.6, 5, 0), (0.0, 5, 1), (1.3, 1 << 40, 2), (0.6, 5, 1)]
    positions, slots = torch.full((6,), 9), torch.tensor([3, 0, 1, 2, 0, 3])
    logits = torch.randn((6, 1500), generator=torch.Generator().manual_seed(7))
    mixed = run(logits.to(device), positions.to(device), slots.to(device), ops.noise_keys(requests).to(device))
    for row, slot in enumerate(slots.tolist()):
        alone = ops.gumbel_perturb_reference(
            logits[row, None], positions[row, None], torch.tensor([0]), ops.noise_keys([requests[slot]])
        )
        assert_same_bits(mixed[row], alone[0])
    assert_same_bits(mixed[2], logits[2])


@pytest.mark.parametrize("run", [ops.gumbel_argmax_reference, ops.gumbel_argmax_triton])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_broken_rows_are_marked_and_leave_the_others_alone(run, temperature):
    device = DEVICE if run is ops.gumbel_argmax_triton else "cpu"
    positions, slots = rows(6)
    logits = torch.randn((6, 2500), generator=torch.Generator().manual_seed(0))
    slot_keys = keys(3, temperature=temperature)
    clean = ops.gumbel_argmax_reference(logits, positions, slots, slot_keys)
    broken = logits.clone()
    broken[1, 0] = NAN  # a NaN in the first block of the kernel, before the maximum
    broken[2, 2499] = NAN  # and in the last
    broken[3] = -INF
    broken[4, :] = -INF
    broken[4, 1700] = -50.0  # one token left: it is chosen, however unlikely
    tokens = run(broken.to(device), positions.to(device), slots.to(device), slot_keys.to(device)).tolist()
    assert tokens == [clean[0].item(), -1, -1, -1, 1700, clean[5].item()]


@pytest.mark.parametrize("run", [ops.gumbel_argmax_reference, ops.gumbel_argmax_triton])
def test_greedy_takes_the_lowest_index_of_equal_logits(run):
    device = DEVICE if run is ops.gumbel_argmax_triton else "cpu"
    positions, slots = (tensor.to(device) for tensor in rows(4))
    logits = torch.zeros((4, 4100))
    logits[1, [4099, 1024, 2047]] = 1.0  # ties in different blocks of the kernel
    logits[2, [700, 699]] = 1.0
    logits[3, 0] = -0.0  # equal to the zeros
    tokens = run(logits.to(device), positions, slots, keys(temperature=0.0, device=device))
    assert tokens.tolist() == [0, 1024, 699, 0]


@pytest.mark.slow
def test_everything_imports_and_samples_on_the_cpu_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from offload_runtime_kernels import gumbel_argmax as ops
rows = torch.arange(2)
keys = ops.noise_keys([(0.0, 0, 0)] * 2)
print(ops.gumbel_argmax(torch.eye(2), rows, rows, keys).tolist())
try:
    ops.gumbel_argmax_triton(torch.eye(2), rows, rows, keys)
except RuntimeError as error:
    print(error)
"""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0, 1]\n") and "triton" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_torch_on_cuda_has_the_bits_of_torch_on_the_cpu(seed):
    tensors = (torch.randn((8, 50_001), generator=torch.Generator().manual_seed(1)).bfloat16(), *rows(8))
    tensors += (keys(seed, temperature=0.7),)
    expected = ops.gumbel_perturb_reference(*tensors)
    assert_same_bits(ops.gumbel_perturb_reference(*(tensor.cuda() for tensor in tensors)), expected)


@pytest.mark.gpu
def test_all_words_give_the_same_noise_on_cuda():
    words = torch.cat([torch.arange(1 << 20), (1 << 32) - 1 - torch.arange(1 << 20), torch.arange(0, 1 << 32, 1009)])
    assert_same_bits(ops.gumbel_from_words_reference(words.cuda()), ops.gumbel_from_words_reference(words))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [32_000, 151_936, 257_001])
def test_compiled_kernel_at_real_vocabularies(vocab_size):
    positions, slots = (tensor.cuda() for tensor in rows(17))
    logits = (torch.randn((17, vocab_size), generator=torch.Generator().manual_seed(2)) * 3).bfloat16().cuda()
    for temperature in (0.0, 0.6, 1.0, 1.3):
        slot_keys = keys(1 << 40, temperature=temperature, device="cuda")
        # Of torch on CUDA, which another test holds to the bits of torch on the CPU: that takes a minute here.
        expected = ops.gumbel_argmax_reference(logits, positions, slots, slot_keys)
        assert torch.equal(ops.gumbel_argmax(logits, positions, slots, slot_keys), expected)
        expected = ops.gumbel_perturb_reference(logits, positions, slots, slot_keys)
        assert_same_bits(ops.gumbel_perturb(logits, positions, slots, slot_keys), expected)
