"""The same tokens as plain decoding on one device that holds everything: whatever proposes them, wherever weights, keys
and values are, on however many devices, however long the prompt, wherever windows slide, however they are sampled."""

import json
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from offload_runtime import Runtime
from offload_runtime.config import SpeculationOptions
from tests.helpers.covering import few
from tests.helpers.engine import write_checkpoint, write_noisy_copy

pytestmark = pytest.mark.no_cover  # what it runs others run
COUNT = 7
# Shorter than everything that is cut, longer than a piece of a prompt and a block of keys and values, and than two.
PROMPTS = [[5 + (3 * i * i + i // 7) % 280 for i in range(length)] for length in (11, 260, 520)]
# The first of four layers that slides, and how far it reaches: less than what a device holds anyway, and more.
WINDOWS: dict[str, tuple[int, int] | None] = {
    "full attention": None, "all layers slide": (0, 37), "some layers slide": (2, 37), "long windows": (1, 400),
}  # fmt: skip
SMALL: dict[str, Any] = {"budget_tokens": 64, "chunk_size": 8, "recent_tokens": 64, "sink_tokens": 4}
DRAFTS: dict[str, dict[str, Any]] = {
    "nothing": {"draft": "none"},
    "n-grams": {"draft": "ngram", "gamma": 7},
    "chains": {"gamma": 5, "tree_nodes": 0},
    "trees": {"gamma": 3, "tree_nodes": 24},
    "whatever is chosen": {},
    "first and newest tokens": {"gamma": 6, "speculation": SpeculationOptions("chain", "streaming", **SMALL)},
    "retrieved chunks": {"gamma": 4, "speculation": SpeculationOptions("chain", "retrieval", **SMALL)},
    "TriForce": {"gamma": 8, "speculation": SpeculationOptions("triforce", gamma_draft=2, **SMALL)},
    "a copy": {"draft": "self", "gamma": 3, "tree_nodes": 24},
}  # fmt: skip
SAMPLING = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 2**63, "presence_penalty": 0.5}


def _rows(cards: tuple[int, ...], resident: tuple[int | str, ...]) -> list[tuple[int, str, str, str, int | str]]:
    """All combinations of devices, places of keys and values, windows and layers that stay, with what drafts in turn;
    TriForce, which needs all layers on the devices and full attention, and a copy of layers that are streamed, which
    needs keys and values on the devices, with each number of devices."""
    turn = cycle(name for name in DRAFTS if name not in ("TriForce", "a copy"))
    rows = [(*row, next(turn), stay) for *row, stay in product(cards, ("gpu", "host"), WINDOWS, resident)]
    rows += [(number, kv, "full attention", "TriForce", "auto") for number, kv in product(cards, ("gpu", "host"))]
    return rows + [(number, "gpu", "some layers slide", "a copy", 0) for number in cards]


NEAR, FAR = _rows((1, 2), ("auto", 0)), _rows((3,), ("auto", 2))
OFTEN = [NEAR[at] for at in few([dict(zip("abcde", row, strict=True)) for row in NEAR], 7)]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint for each kind of windows, all of the same weights."""
    base = tmp_path_factory.mktemp("windows")

    def made(windows: str) -> Path:
        path, slides = base / windows.replace(" ", "-"), WINDOWS[windows]
        if not path.exists():
            write_checkpoint(path, num_layers=4, context=2048, window=37)
            fields = json.loads((path / "config.json").read_text())
            del fields["layer_types"]
            first, reach = slides or (0, None)
            fields |= {"use_sliding_window": bool(slides), "max_window_layers": first, "sliding_window": reach}
            (path / "config.json").write_text(json.dumps(fields))
        return path

    return made


@pytest.fixture(scope="module")
def noisy(targets: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is often right."""
    return write_noisy_copy(targets("full attention"), tmp_path_factory.mktemp("draft") / "noisy", noise=0.03)


def answers(target: Path, **options: Any) -> list[list[int]]:
    """All prompts at once, sampled, and a longer one without, of which much is kept."""
    asked = {"max_new_tokens": COUNT, "ignore_eos": True}
    with Runtime.load(target, context=1024, max_batch=len(PROMPTS), **options) as runtime:
        found = runtime.generate_batch(PROMPTS, **asked, **SAMPLING)
        found.append(runtime.generate(PROMPTS[2] + [7, 8, 9], **asked, temperature=0.0))
        if options["draft"] not in ("none", "ngram") and "gamma" in options:
            assert sum(map(sum, (result.stats.accepted_by_depth for result in found)))
        return [result.tokens for result in found]


@pytest.fixture(scope="module")
def expected(targets: Callable[[str], Path]) -> Callable[..., list[list[int]]]:
    """Those of plain decoding on one device, which are computed once."""
    known: dict[tuple[Any, ...], list[list[int]]] = {}

    def found(windows: str, device: str, **options: Any) -> list[list[int]]:
        key = (windows, device)
        if key not in known:
            known[key] = answers(targets(windows), device=device, draft="none", kv="gpu", **options)
            assert len(set(map(tuple, known[key]))) == len(known[key]), "answers that differ show more"
        return known[key]

    return found


@pytest.mark.parametrize(
    ("cards", "kv", "windows", "drafts", "resident"),
    [pytest.param(*row, marks=[] if row in OFTEN else pytest.mark.slow) for row in NEAR + FAR[::4]],
)
def test_tokens_are_those_of_plain_decoding(
    targets: Callable[[str], Path], noisy: Path, expected: Callable[..., list[list[int]]], cards: int, kv: str,
    windows: str, drafts: str, resident: int | str,
) -> None:  # fmt: skip
    options = {"draft": noisy, "kv": kv, "resident_layers": resident, "dtype": "fp32", **DRAFTS[drafts]}
    found = answers(targets(windows), device=",".join(["cpu"] * cards), **options)
    assert found == expected(windows, "cpu", dtype="fp32")


@pytest.mark.gpu
@pytest.mark.parametrize(("cards", "kv", "windows", "drafts", "resident"), NEAR)
def test_on_a_gpu_tokens_are_those_of_plain_decoding(
    targets: Callable[[str], Path], noisy: Path, expected: Callable[..., list[list[int]]], cards: int, kv: str,
    windows: str, drafts: str, resident: int | str,
) -> None:  # fmt: skip
    options = {"draft": noisy, "kv": kv, "resident_layers": resident, "vram": ",".join(["8GB"] * cards)}
    found = answers(targets(windows), device=",".join(["cuda:0"] * cards), **options | DRAFTS[drafts])
    assert found == expected(windows, "cuda:0", vram="8GB")
