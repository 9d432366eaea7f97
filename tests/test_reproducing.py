"""Every result has one documented command, and was measured by it as far as the file says."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import bench_long_context
import bench_trees
import compare
import pytest
import typer
from harness import settings_of

from offload_runtime.cli.app import app
from offload_runtime.verify.report import VerificationPlan

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "results"
PAGES = [ROOT / "docs" / "reproducing.md", ROOT / "docs" / "sweeps.md"]
# Of local files, which nobody else has under that name.
LOCAL = {"text"}


def commands(page: Path) -> list[list[str]]:
    """The words of every command of a page, as a shell would hand them on."""
    document = page.read_text(encoding="utf-8").replace("\\\n", " ")
    # The last first, as values name variables that are above them.
    for name, value in reversed(re.findall(r"^    ([A-Z]+)=['\"]?(.+?)['\"]?$", document, re.MULTILINE)):
        document = document.replace(f"${name}", value)
    found = re.findall(r"^    (?:python (?=tools/))?((?:tools/|offload-runtime ).+)$", document, re.MULTILINE)
    return [shlex.split(command) for command in found]


def written(words: list[str]) -> list[str]:
    """The results that a command writes; several sweeps share one."""
    names = [Path(word).name for word in words if word.startswith("tools/results/") and word.endswith(".json")]
    return [name.replace("{sweep}", sweep) for name in names for sweep in (words[1:7] if "{sweep}" in name else [""])]


COMMANDS = [words for page in PAGES for words in commands(page) if "draw" not in words]
TREES = [words for words in COMMANDS if words[0] == "tools/bench_trees.py"]
COMPARISONS = [words for words in COMMANDS if words[0] == "tools/compare.py"]
LONG = [words for words in COMMANDS if words[0] == "tools/bench_long_context.py"]
VERIFIED = [words for words in COMMANDS if words[:2] == ["offload-runtime", "verify"]]


def result(name: str) -> dict[str, Any]:
    """A result file."""
    loaded: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return loaded


def test_every_result_has_one_command() -> None:
    named = Counter(name for words in COMMANDS for name in written(words))
    there = {path.name for path in RESULTS.glob("*.json")}
    assert there <= set(named), "results without a command"
    assert {name for name, count in named.items() if count > 1} == set()
    # A curve is documented before it is measured.
    assert all(name.startswith("sweep-") for name in set(named) - there)


def test_every_command_is_there() -> None:
    assert VERIFIED and all((ROOT / words[0]).exists() for words in COMMANDS if words not in VERIFIED)


def assert_same(said: dict[str, str], measured: dict[str, str]) -> None:
    """The settings of a command, beside those of its result."""
    shared = (said.keys() & measured.keys()) - LOCAL
    assert len(shared) > 10
    assert {key: said[key] for key in shared} == {key: measured[key] for key in shared}


@pytest.mark.parametrize("words", TREES, ids=lambda words: written(words)[0])
def test_trees_were_measured_by_their_command(words: list[str]) -> None:
    options = bench_trees.parse(words[1:])
    assert (ROOT / options.code).exists() or options.code.name == "stdlib.txt"  # of docs/sweeps.md
    said = {key: str(value) for key, value in vars(options).items()}
    said |= {key: Path(said[key]).name for key in ("source", "code")}
    assert_same(said, result(written(words)[0])["settings"])


@pytest.mark.parametrize("words", LONG, ids=lambda words: written(words)[0])
def test_long_contexts_were_measured_by_their_command(words: list[str]) -> None:
    said = settings_of(bench_long_context.make_parser().parse_args(words[1:]), without=("out", "commit"))
    assert_same(said, result(written(words)[0])["settings"])


@pytest.mark.parametrize("words", COMPARISONS, ids=lambda words: written(words)[0])
def test_comparisons_were_measured_by_their_command(words: list[str]) -> None:
    arguments = compare.make_parser().parse_args(words[1:])
    asked = result(written(words)[0])["configuration"]
    assert [path.name for path in arguments.prompt_file] == asked["prompt_file"]
    said = {
        key: str(value)
        for key, value in vars(arguments).items()
        if key not in ("prompt_file", "out", "commit", "title")
    }
    assert_same(said, {key: str(value) for key, value in asked.items()})


@pytest.mark.parametrize("words", VERIFIED, ids=lambda words: written(words)[0])
def test_what_was_verified_was_by_its_command(words: list[str]) -> None:
    verify = typer.main.get_command(app).commands["verify"]  # type: ignore[attr-defined]
    said, measured = verify.make_context("verify", words[2 : words.index(">")]).params, result(written(words)[0])
    plan = VerificationPlan.built_in(quick=said["quick"], tokens=said["tokens"], seeds=said["seeds"])
    assert said["as_json"] and (plan.tokens, plan.seeds) == (measured["tokens"], measured["seeds"])
    assert [said[key] for key in ("target", "draft", "quick")] == [
        measured[key] for key in ("target", "draft", "quick")
    ]
    resident = 32 if said["resident_layers"] is None else said["resident_layers"]
    assert measured["placement"].startswith(f"{resident} of 32 layers resident") and said["vram_bytes"] == 24 * 10**9


def test_plans_and_exactness_were_measured_by_their_commands() -> None:
    """With the defaults of those tools, but for the model."""
    assert result("exactness-7b-h200.json")["model"] == "random llama2-7b"
    assert all(
        row["tokens"] == 1000 for name in ("7b", "smollm2") for row in result(f"exactness-{name}-h200.json")["rows"]
    )
    assert result("plan-h200.json")["configuration"]["shape"] == "llama2-7b"
