"""What surrounds the pass of a step: the Triton kernels against plain torch and against lists of tokens."""

from collections.abc import Callable, Sequence

import pytest
import torch
from offload_runtime_kernels import window_steps as ops

from tests.helpers.attention_cases import TREE_PARENTS, int32, tree_path
from tests.helpers.kernel_conditions import KERNEL_DEVICE, assert_within, poisoned_outputs

BASE = 1000
FAR = 1 << 30  # where nothing stops


def _window(tokens: list[int], end: int, base: int = BASE, *, stop: int = FAR, last: int = FAR) -> torch.Tensor:
    return int32([[end, base, stop, last, end - 1, *tokens]])


def _chain(first: int, count: int) -> ops.StepLayout:
    return ops.StepLayout.chain(first, count, KERNEL_DEVICE)


def _links(parents: Sequence[int]) -> ops.TreeLinks:
    """Of nodes whose parents are given as nodes, -1 for the newest known token."""
    paths = [tree_path(parents, node) for node in range(len(parents))]
    bits = torch.tensor([sum(1 << node for node in path) for path in paths], dtype=torch.int64, device=KERNEL_DEVICE)
    return ops.TreeLinks(int32([parent + 1 for parent in parents]), bits, int32([len(path) for path in paths]))


def _chained(count: int) -> ops.TreeLinks:
    return _links(range(-1, count - 1))


def _tokens(window: torch.Tensor, sequence: int = 0) -> list[int]:
    return window[sequence, ops.WINDOW_HEADER_WORDS :].tolist()


def _frequencies(half: int, batch: int = 1) -> torch.Tensor:
    """Other ones for each sequence."""
    bases = 10000.0 * (1 + torch.arange(batch))[:, None]
    return (bases ** -(torch.arange(half) / half)).to(KERNEL_DEVICE)


def _rotation(frequencies: torch.Tensor, scaling: float = 1.0) -> ops.StepRotation:
    """Of a model with two rotations, the second of which is not scaled."""
    scalings = torch.full(frequencies.shape[1:], scaling, device=KERNEL_DEVICE)
    scalings[len(scalings) // 2 :] = 1.0
    return ops.StepRotation(frequencies, scalings)


versions = pytest.mark.parametrize("run", [ops.step_rows, ops.step_rows_triton], ids=["public", "triton"])


def _check_angles(rows: ops.StepRows, rotated: list[int], rotation: ops.StepRotation) -> None:
    positions = torch.tensor(rotated, device=KERNEL_DEVICE).view(len(rotation.frequencies), -1)
    # The angle is rounded to fp32, then its cosine taken: that angle is the reference's too.
    angle = (positions.float()[..., None] * rotation.frequencies[:, None]).double().flatten(0, 1)
    assert rows.cos.shape == rows.sin.shape == angle.shape and rows.cos.dtype == torch.float32
    assert_within(rows.cos, angle.cos() * rotation.scaling, atol=5e-7 * float(rotation.scaling.max()))
    assert_within(rows.sin, angle.sin() * rotation.scaling, atol=5e-7 * float(rotation.scaling.max()))


@versions
@pytest.mark.parametrize("half", [1, 5, 32, 48, 64])
@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_rows_before_and_behind_the_end(run: Callable[..., ops.StepRows], half: int, scaling: float) -> None:
    window = _window([7, -1, 9, 40, 3, 5, 6], BASE + 3)
    before, rotation = window.clone(), _rotation(_frequencies(half), scaling)
    with poisoned_outputs():
        rows = run(window, window[:, 0], _chain(-1, 5), rotation, last_token=39)
    assert rows.tokens.tolist() == [9, 39, 3, 5, 6]
    assert rows.positions.tolist() == [[1002, 1003, 1004, 1005, 1006]]
    assert rows.following.tolist() == [1003, 1004, 1005, 1006, 1007]
    assert (rows.ahead.tolist(), rows.used.tolist(), rows.slots.tolist()) == ([1007], [5], [0] * 5)
    words = (rows.tokens, rows.positions, rows.following, rows.ahead, rows.used, rows.slots)
    assert {tensor.dtype for tensor in words} == {torch.int32}
    _check_angles(rows, [1002, 1003, 1004, 1005, 1006], rotation)
    assert torch.equal(window, before)
    again = run(window, int32([BASE + 2]), _chain(-1, 1), rotation, last_token=39)
    assert (again.tokens.tolist(), again.positions.tolist(), again.following.tolist()) == ([0], [[1001]], [1002])


def _trunk_and_tree(known: int, parents: Sequence[int]) -> ops.StepLayout:
    """The newest known token, the nodes of a tree, and before them all the known tokens before the newest."""
    paths = [tree_path(parents, node) for node in range(len(parents))]
    trunk = list(range(-known, 0))
    ways = [trunk, *(trunk + path for path in paths), *(trunk[: index + 1] for index in range(known - 1))]
    depth = max(map(len, ways))
    return ops.StepLayout(
        int32([way[-1] for way in ways]), int32([len(way) - 1 - known for way in ways]), 1 + len(parents), -known,
        int32([way + way[-1:] * (depth - len(way)) for way in ways]),
    )  # fmt: skip


@versions
@pytest.mark.parametrize("placed", [False, True])
def test_rows_of_a_tree(run: Callable[..., ops.StepRows], placed: bool) -> None:
    """Siblings stand at the same position, in slots of their own; what has its keys for good is padding."""
    window, place = _window([7, 8, 9, 20, 21, 22, 23], BASE + 3), int32([[256, 5]]) if placed else None
    layout, rotation = _trunk_and_tree(4, (-1, -1, 0, 2)), _rotation(_frequencies(8))
    with poisoned_outputs():
        rows = run(window, window[:, 0], layout, rotation, last_token=99, skip_committed=True, place=place)
    moved = 256 if placed else 0
    positions = [1002, 1003, 1003, 1004, 1005]
    padding = [-1, -1, -1]
    assert rows.positions.tolist() == [[*(position - moved for position in positions), *padding]]
    assert rows.cache_positions.tolist() == [*(position - moved for position in range(1002, 1007)), *padding]
    assert rows.tokens.tolist() == [9, 20, 21, 22, 23, 0, 0, 0]
    assert rows.following.tolist()[:5] == [position + 1 for position in positions] and rows.used.tolist() == [5]
    assert rows.committed is not None and rows.committed.tolist() == [999 - moved]
    trunk = [999, 1000, 1001, 1002]
    ways = [trunk, [*trunk, 1003], [*trunk, 1004], [*trunk, 1003, 1005], [*trunk, 1003, 1005, 1006]]
    ways += [trunk[:1], trunk[:2], trunk[:3]]
    filled = [[cache_position - moved for cache_position in way + way[-1:] * (7 - len(way))] for way in ways]
    assert rows.ancestors is not None and rows.ancestors.tolist() == [filled]
    turned = [position - moved + (5 if placed else 0) for position in positions]
    _check_angles(rows, [*turned, 0, 0, 0], rotation)
    known = run(window, window[:, 0], layout, rotation, last_token=99, place=place)
    assert known.positions[0, 5:].tolist() == [-1, 1000 - moved, 1001 - moved], "whose keys may be written anew"
    assert known.tokens.tolist()[5:] == [0, 7, 8]


@pytest.mark.parametrize("run", [ops.put_tokens, ops.put_tokens_triton], ids=["public", "triton"])
def test_a_token_is_put_and_the_cursor_moves_behind_it(run: Callable[..., None]) -> None:
    window, cursor = _window([7, 8, 0, 0, 0], BASE + 2), int32([0])
    run(window, window[:, 0], torch.tensor([[-1]], device=KERNEL_DEVICE), cursor=cursor)
    assert cursor.tolist() == [1003] and window[0, 0].item() == 1002
    run(window, cursor, torch.tensor([[31999]], device=KERNEL_DEVICE), cursor=cursor)
    assert cursor.tolist() == [1004]
    assert _tokens(window) == [7, 8, -1, 31999, 0] and window[0, :5].tolist() == [1002, 1000, FAR, FAR, 1001]


def _with_runners_up(run: Callable[..., None]) -> Callable[..., None]:
    """`run`, where what would have been sampled instead of a token is a thousand more, so that it must lie where the
    token does, and nowhere else."""

    def checked(window: torch.Tensor, samples: torch.Tensor, counts: torch.Tensor, links: ops.TreeLinks) -> None:
        runners_up = torch.full((len(window), window.shape[1] - ops.WINDOW_HEADER_WORDS), -7).int().to(KERNEL_DEVICE)
        expected, begins = runners_up.clone(), (window[:, 0] - window[:, 1]).tolist()
        run(window, samples, samples + 1000, counts, links, runners_up)
        for b, (begin, stop) in enumerate(zip(begins, (window[:, 0] - window[:, 1]).tolist(), strict=True)):
            tokens = slice(ops.WINDOW_HEADER_WORDS + begin, ops.WINDOW_HEADER_WORDS + stop)
            expected[b, begin:stop] = window[b, tokens] + 1000
        assert torch.equal(runners_up, expected)

    return checked


accepting = pytest.mark.parametrize(
    "run", [_with_runners_up(ops.accept), _with_runners_up(ops.accept_triton)], ids=["public", "triton"]
)


@accepting
@pytest.mark.parametrize("num_proposals", [0, 1, 2, 6, 16])
def test_proposals_are_accepted_up_to_the_first_that_differs(run: Callable[..., None], num_proposals: int) -> None:
    known, proposals = [7, 8, 9], [20 + index for index in range(num_proposals)]
    for wrong in range(num_proposals + 1):
        samples = [*proposals, 77]
        if wrong < num_proposals:
            samples[wrong] = -1 if wrong % 2 else 500
        window, counts = _window([*known, *proposals, 99, 98], BASE + 3), torch.tensor([[10, 40]], device=KERNEL_DEVICE)
        run(window, torch.tensor([samples], device=KERNEL_DEVICE), counts, _chained(num_proposals))
        said = known + proposals[:wrong] + [samples[wrong]]
        assert window[0, :5].tolist() == [BASE + len(said), BASE, FAR, FAR, BASE + 2]
        # What was rejected stays where it is, behind the end.
        rest = [*known, *proposals, 99, 98][len(said) :]
        assert _tokens(window) == said + rest
        assert counts.tolist() == [[11, 40 + wrong]]


@accepting
def test_what_agrees_behind_a_difference_is_not_accepted(run: Callable[..., None]) -> None:
    window, counts = _window([7, 1, 2, 3, 4, 0], BASE + 1), torch.zeros(1, 2, dtype=torch.int64, device=KERNEL_DEVICE)
    run(window, torch.tensor([[1, 5, 3, 4, 6]], device=KERNEL_DEVICE), counts, _chained(4))
    assert _tokens(window) == [7, 1, 5, 3, 4, 0] and window[0, 0].item() == BASE + 3 and counts.tolist() == [[1, 1]]


@accepting
def test_a_path_of_a_tree_is_accepted(run: Callable[..., None]) -> None:
    """To its end, up to a node none of whose children was sampled, or not at all; and it moves to its places."""
    parents, known, proposals = TREE_PARENTS, [7, 8], [20 + node for node in range(len(TREE_PARENTS))]
    for end in range(-1, len(parents)):
        path = tree_path(parents, end) if end >= 0 else []
        samples = [400 + row for row in range(len(parents) + 3)]  # three rows that nothing depends on
        for above, node in zip([-1, *path], path, strict=False):
            samples[1 + above] = proposals[node]
        window, counts = _window([*known, *proposals, 0], BASE + 2), torch.zeros(1, 2, dtype=torch.int64)
        counts = counts.to(KERNEL_DEVICE)
        run(window, torch.tensor([samples], device=KERNEL_DEVICE), counts, _links(parents))
        said = [*known, *(proposals[node] for node in path), samples[1 + end]]
        assert window[0, :2].tolist() == [BASE + len(said), BASE] and _tokens(window)[: len(said)] == said
        assert counts.tolist() == [[1, len(path)]]


# Of sequences 0 to 4: one goes on, one has enough, one may not propose behind its end, one stands nowhere, one goes on.
_HEADERS = [[1003, 1000, 1010, 1012, 1002], [2005, 2002, 2005, 2009, 2004], [53, 50, 60, 53, 52], [0, 0, 0, 0, 0],
            [7, 5, 8, 8, 6]]  # fmt: skip


def _windows() -> torch.Tensor:
    return int32([[*header, *range(100 * b + 1, 100 * b + 13)] for b, header in enumerate(_HEADERS)])


@accepting
def test_each_sequence_accepts_its_own(run: Callable[..., None]) -> None:
    window, counts = _windows(), torch.tensor([[b, 10 * b] for b in range(6)], device=KERNEL_DEVICE)
    # Behind the ends of 0 and 4 lie 4, 5, 6 and 403, 404, 405.
    samples = [[4, 5, 9, 8], [204, 205, 206, 1], [0, 0, 0, 0], [301, 302, 303, 1], [403, 404, 405, 77]]
    expected = window.clone()
    expected[0, 0], expected[0, ops.WINDOW_HEADER_WORDS + 5] = 1006, 9
    expected[4, 0], expected[4, ops.WINDOW_HEADER_WORDS + 5] = 11, 77
    samples_gpu = torch.tensor(samples, device=KERNEL_DEVICE)
    run(window, samples_gpu, counts, _chained(3))
    assert torch.equal(window, expected)
    assert counts.tolist() == [[1, 2], [1, 10], [2, 20], [3, 30], [5, 43], [5, 50]]
    run(window, samples_gpu, counts, _chained(3))
    assert window[:, 0].tolist() == [1007, 2005, 53, 0, 11], "sequence 4 has enough"
    assert counts[:, 0].tolist() == [2, 1, 2, 3, 5, 5]
