"""Configuration: sizes as people write them, and values that make no sense refused at once."""

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime import Runtime
from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import CheckpointError, OptionError, StorageError
from offload_runtime.files import write_atomically
from offload_runtime.params import GenerationParams, SamplingParams, params_once
from offload_runtime.sizes import GB, format_bytes, parse_bytes, parse_sizes, size_option_down


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("24GB", 24 * 10**9), ("512MiB", 512 << 20), ("1.5 gib", 3 << 29), ("4096", 4096), (" 7 kb ", 7000),
     ("2TB", 2 * 10**12), ("4.1MB", 4_100_000), ("2.01 GB", 2_010_000_000), ("5B", 5), (12345, 12345),
     ("1.GB", 10**9)],
)  # fmt: skip
def test_sizes(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [({"vram": 24}, "vram 24 is 24 bytes: write 24GB, or 24B if that is meant"),
     ({"ram": "0.5"}, "ram must be positive"),
     ({"vram": "22GB,24"}, "vram '24' is 24 bytes"),
     ({"ram": 1}, "ram 1 is 1 byte: write 1GB"), ({"pinned": "much"}, "pinned 'much' is not a size"),
     ({"vram": []}, "vram"), ({"ram": True}, "ram")],
    ids=str,
)  # fmt: skip
def test_sizes_that_are_surely_not_meant(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Runtime.load("a model", **options)


@given(st.integers(1, 10**15))
def test_a_formatted_size_reads_back_within_its_last_digit(size_bytes: int) -> None:
    # Four digits, or one after the point: half of the last is at most 5 % (1.05 MB).
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.051)


@pytest.mark.parametrize(
    "values",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
     {"temperature": 1.0, "top_k": -1}, {"temperature": 1.0, "top_p": 1.1},
     {"temperature": 1.0, "min_p": -0.1}, {"temperature": 1.0, "min_p": 1.5}, {"seed": -1}, {"seed": 1 << 64},
     {"presence_penalty": 2.1}, {"presence_penalty": float("nan")}, {"frequency_penalty": -2.1},
     {"repetition_penalty": 0.0}, {"repetition_penalty": 11}, {"repetition_penalty": float("nan")},
     {"logit_bias": {5: 100.5}}, {"logit_bias": {5: float("nan")}}, {"logit_bias": {-1: 1.0}},
     {"logit_bias": {1.5: 1.0}}, {"logit_bias": [(1, 2.0), (1, 3.0)]}, {"logit_bias": [(1,)]},
     {"logit_bias": {"5": 1.0}}, {"logit_bias": 5}, {"logit_bias": dict.fromkeys(range(1025), 1.0)}],
    ids=lambda values: str(values)[:60],
)  # fmt: skip
def test_sampling_that_makes_no_sense(values: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="|".join(values)):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "context", ["long", [4096], 1.5, True, "1.5", "128KB", "0", "9" * 5000, float("nan"), float("inf")]
)
def test_a_context_is_a_number_or_auto(context: Any) -> None:
    with pytest.raises(OptionError, match="context must be auto or a count of at least 1, not"):
        Runtime.load("a model", context=context)


def test_a_context_may_be_typed() -> None:
    typed = ("auto", "4096", 4096, "128K", "128k", "1.5K", "1M", None)
    found = [RuntimeConfig("a model", context=context).context for context in typed]  # type: ignore[arg-type]
    assert found == [None, 4096, 4096, 131072, 128000, 1536, 1048576, None]
    with pytest.raises(CheckpointError, match="a model does not exist"):
        Runtime.load("a model", context="4096")


@pytest.mark.parametrize(
    ("options", "values", "words"),
    [(RuntimeConfig, {"max_gamma": "8"}, r"max_gamma must be of type int, not '8'"),
     (RuntimeConfig, {"gamma": 2.5}, "gamma must be auto or a count of at least 1, not 2.5"),
     (RuntimeConfig, {"context": -3}, "context must be at least 1, not -3"),
     (RuntimeConfig, {"kv": ["gpu"]}, r"kv must be auto, gpu or host, not \['gpu'\]"),
     (RuntimeConfig, {"speculation": "chain"}, "speculation must be of type SpeculationOptions, not 'chain'"),
     (RuntimeConfig, {"trace": 5}, r"trace must be of type pathlib\S*Path \| None, not 5"),
     (RuntimeConfig, {"draft": None}, "draft must be a model, mtp, self, ngram or none, not None"),
     (RuntimeConfig, {"pace": 25.0}, r"pace must be a function of a device, not 25\.0"),
     (RuntimeConfig, {"target": 5}, "target must be a directory, .* not 5"),
     (SamplingParams, {"temperature": "0.6"}, "temperature must be of type float, not '0.6'"),
     (GenerationParams, {"sampling": 0.6}, "sampling must be of type SamplingParams"),
     *((GenerationParams, {"stop": stop}, r"stop must be of type str \| Sequence\[str\], not ")
       for stop in (None, 5, b"x", ["a", 5]))],
    ids=str,
)  # fmt: skip
def test_values_of_the_wrong_type(options: Any, values: dict[str, Any], words: str) -> None:
    needed = {"target": "a model"} if options is RuntimeConfig else {}
    with pytest.raises(OptionError, match=words):
        options(**{**needed, **values})


@pytest.mark.parametrize(
    ("values", "word"),
    [({"mode": "magic"}, "none, chain or triforce"), ({"draft_cache": "small"}, "retrieval or streaming"),
     ({"chunk_size": 12}, "power of two"), ({"chunk_size": 128}, "2 to 64"),
     ({"budget_tokens": 102}, "use 100"), ({"budget_tokens": 0}, "at least 1"), ({"sink_tokens": 0}, r"\[1, 256\]"),
     ({"sink_tokens": 257}, r"\[1, 256\]"), ({"recent_tokens": 1}, "at least 2"), ({"gamma_draft": 0}, r"\[1, 24\]"),
     ({"gamma_draft": 25}, r"\[1, 24\]"),
     ({"refresh_steps": 0}, "at least 1")],
    ids=str,
)  # fmt: skip
def test_speculation_that_makes_no_sense(values: dict[str, Any], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        SpeculationOptions(**values)


@given(st.integers(1, 10**13))
def test_a_size_to_type_back_is_never_more_than_what_it_stands_for(size_bytes: int) -> None:
    option = size_option_down(size_bytes)
    assert " " not in option
    assert 0.9 * size_bytes <= parse_bytes(option) <= size_bytes


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """A FIFO stands for devices and sockets, too: as root, a file in the place of /dev/null breaks a machine."""
    fifo, target, link, dangling, loop = (tmp_path / name for name in ("fifo", "file", "link", "dangling", "loop"))
    os.mkfifo(fifo)
    target.write_text("old")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "new")
    loop.symlink_to(loop)
    to_fifo = tmp_path / "to-fifo"
    to_fifo.symlink_to(fifo)
    for path in (fifo, to_fifo, loop, tmp_path):
        with pytest.raises(StorageError, match=f"{path.name} is not a regular file, and stays as it is: elsewhere"):
            write_atomically(path, "text", remedy="elsewhere")
    assert fifo.is_fifo() and to_fifo.is_symlink() and loop.is_symlink()
    for path in (link, dangling):
        write_atomically(path, "ümlaut", remedy="elsewhere")
        assert path.is_symlink() and path.read_text(encoding="utf-8") == "ümlaut"
    assert target.read_bytes() == (tmp_path / "new").read_bytes() == "ümlaut".encode()
    assert {path.name for path in tmp_path.iterdir()} == {"fifo", "file", "link", "dangling", "loop", "to-fifo", "new"}


@pytest.mark.parametrize(("number", "stream"), [(1, "standard output"), (2, "standard error")])
def test_the_file_that_the_answer_goes_to_is_not_replaced(number: int, stream: str, tmp_path: Path) -> None:
    answer, before = tmp_path / "answer", os.dup(number)
    with answer.open("w") as file:
        os.dup2(file.fileno(), number)
        try:
            for path in (answer, Path(f"/dev/fd/{number}")):
                with pytest.raises(StorageError, match=f"{path.name} is where {stream} goes: elsewhere"):
                    write_atomically(path, "text", remedy="elsewhere")
        finally:
            os.dup2(before, number)
            os.close(before)
    write_atomically(answer, "text", remedy="elsewhere")
    assert answer.read_text() == "text"


@pytest.mark.parametrize("name", ["temperatur", "sampling"])
def test_a_name_that_no_option_of_an_answer_has_is_said_with_those_that_there_are(name: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}' is no option of an answer: there are max_new_tokens, .*top_p"):
        params_once({name: 1}, None)


def test_options_by_name_are_those_of_the_configurations() -> None:
    """As `help` lists them."""
    taken = {one.name for one in fields(RuntimeConfig)} - {"target"}
    answers = {one.name for kind in (GenerationParams, SamplingParams) for one in fields(kind)} - {"sampling"}
    for documented, names in ((Runtime.load, taken), (Runtime.stream, answers)):
        assert names <= set(re.findall(r"^ +(\w+): ", documented.__doc__ or "", flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("given", "sizes"),
    [("22GB, 24GB", (22 * GB, 24 * GB)), ("24GB", 24 * GB), (GB, GB), (["22GB", GB], (22 * GB, GB)),
     ("1kB,2kB,3kB", (1000, 2000, 3000))],
)  # fmt: skip
def test_sizes_of_one_card_or_of_each(given: Any, sizes: int | tuple[int, ...]) -> None:
    assert parse_sizes(given) == sizes


def test_devices_are_names_with_commas_between_them() -> None:
    assert RuntimeConfig("m").devices == ("auto",)
    assert RuntimeConfig("m", device="cuda:0, cuda:1,cuda:0").devices == ("cuda:0", "cuda:1", "cuda:0")
    two = RuntimeConfig("m", device="cpu,cpu", vram=(GB, 2 * GB))
    assert two.vram_of_cards(2) == (GB, 2 * GB)
    assert RuntimeConfig("m", device="cpu,cpu", vram=GB).vram_of_cards(2) == (GB, GB)
    assert RuntimeConfig("m").vram_of_cards(3) == (None, None, None)


@pytest.mark.parametrize(("options", "said"), [
    ({"device": "cuda:0,"}, "an empty name"), ({"device": ""}, "an empty name"),
    ({"device": "cuda:0,,cuda:1"}, "an empty name"), ({"device": "cpu,cuda:0"}, "mixes cpu and cuda"),
    ({"device": "auto,cuda:0"}, "auto among others"),
    ({"device": "cpu,cpu", "vram": (GB,)}, r"1 size and there are 2 cards"),
    ({"device": "cpu", "vram": (GB, GB)}, r"2 sizes and there is 1 card"),
])  # fmt: skip
def test_cards_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        RuntimeConfig("m", **options)
