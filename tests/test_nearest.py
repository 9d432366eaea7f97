"""What a refusal says: nearest settings that can be typed and fit, ways out that are there, figures that suffice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offload_runtime.cli.app import app
from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.hardware import load_profile
from offload_runtime.hardware.profile import shipped_directory
from offload_runtime.plan import Refusal, machine_figures, plan_or_refuse
from offload_runtime.sizes import GB, parse_bytes
from offload_runtime.weights import describe_model
from tests.helpers.planning import CONFIGS, plan_or_none

DRAFT = str(CONFIGS / "llama-3.2-1b")
REFUSED = {
    "a draft that retrieves": {"--draft": DRAFT, "--draft-cache": "retrieval", "--context": "2048"},
    "TriForce": {"--draft": DRAFT, "--speculation": "triforce", "--gamma-draft": "2", "--context": "2048"},
    "TriForce whose draft is full": {
        "--draft": DRAFT, "--speculation": "triforce", "--draft-cache": "full", "--budget-tokens": "8192",
        "--context": "20000", "--vram": "20GB",
    },
    "TriForce by itself": {"--draft": "none", "--speculation": "triforce", "--context": "2048", "--gamma": "3"},
    "a draft's chain": {"--draft": DRAFT, "--speculation": "chain", "--sink-tokens": "4", "--vram": "6.3GB"},
    "several at once": {
        "--draft": DRAFT, "--speculation": "triforce", "--draft-cache": "retrieval", "--context": "131072",
        "--kv": "gpu", "--batch": "3", "--vram": "12GB",
    },
    "more than the card has": {
        "--draft": DRAFT, "--speculation": "triforce", "--context": "131072", "--kv": "gpu", "--batch": "2",
        "--vram": "40GB",
    },
    "more of both than there is": {"--ram": "500GB", "--vram": "40GB", "--context": "8192"},
    "more host memory than there is": {"--ram": "500GB", "--context": "131072", "--kv": "gpu", "--batch": "2"},
    "less host memory than is needed": {"--ram": "10GB", "--context": "8192", "--resident-layers": "4"},
    "less of all than is needed": {
        "--ram": "5GB", "--vram": "4GB", "--pinned": "1MB", "--context": "8192", "--resident-layers": "4",
    },
    "less than a larger machine needs": {"--ram": "20GB", "--context": "131072", "--kv": "host", "--batch": "8"},
}  # fmt: skip
CHANGES = {
    "a draft that retrieves": "--draft ngram --draft-cache auto",
    "TriForce": "--speculation auto --draft ngram --gamma-draft auto",
    "TriForce whose draft is full": "--speculation chain --budget-tokens auto",
    "TriForce by itself": "--speculation none --gamma auto",
    "a draft's chain": "--draft ngram --sink-tokens auto",
    "several at once": "--batch 1 --kv auto --speculation auto --draft ngram --draft-cache auto",
    "more than the card has": "--vram 25.7GB --context 14848",
    "more of both than there is": "--vram 25.7GB --ram 68.7GB",
    "more host memory than there is": "--ram 68.7GB --context 72448",
    "less host memory than is needed": "--ram 13.9GB",
    "less of all than is needed": "--vram 6.3GB --ram 15.0GB --pinned 75.5MB",
    "less than a larger machine needs": "--ram 137.4GB on a machine with 137.4 GB of host memory",
}


@pytest.fixture(autouse=True)
def no_profiles_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG_DIR", str(tmp_path))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_proposed_can_be_typed(name: str, tmp_path: Path) -> None:
    refused = plan(REFUSED[name])
    assert refused.exit_code == 2, refused.stdout
    changes = [proposal["change"] for proposal in json.loads(refused.stdout)["nearest"]]
    assert CHANGES[name] in changes
    for change in changes:
        typed, _, larger = change.partition("a machine with ")
        profile = machine_with(larger, tmp_path / "larger.toml") if larger else "rtx4090"
        fits = plan(REFUSED[name], *typed.removesuffix(" on ").split(), "--profile", profile)
        assert fits.exit_code == 0, (change, fits.stderr)


def machine_with(words: str, path: Path) -> str:
    """The card with the memories that are listed in words, saved as a profile."""
    text = (shipped_directory() / "rtx4090.toml").read_text()
    for size, memory in re.findall(r"([0-9.]+ [GT]B) of (device|host) memory", words):
        key = {"device": "vram_bytes", "host": "ram_bytes"}[memory]
        text, changed = re.subn(rf"^{key} = .*$", f"{key} = {parse_bytes(size)}", text, flags=re.MULTILINE)
        assert changed == 1
    path.write_text(text)
    return str(path)


def plan(options: dict[str, str], *more: str) -> Result:
    """With `more` behind the options, as somebody types it who is told to."""
    arguments = [word for option in options.items() for word in option]
    target = str(CONFIGS / "llama-3.1-8b")
    return CliRunner().invoke(app, ["plan", "--json", "--target", target, "--profile", "rtx4090", *arguments, *more])


def test_the_context_is_the_longest_though_a_short_one_cannot_be_retrieved_from() -> None:
    machine = replace(machine_figures(load_profile("rtx4090")), ram_bytes=400 * GB, pinnable_bytes=None)
    request = RuntimeConfig(
        describe_model(CONFIGS / "llama-3.1-8b"), describe_model(CONFIGS / "llama-3.2-1b"), context=100_000,
        kv="gpu", speculation=SpeculationOptions("triforce", "retrieval"), vram=22_700_000_000,
    )  # fmt: skip
    outcome = plan_or_refuse(request, machine)
    assert isinstance(outcome, Refusal)
    fitting = [tokens for tokens in range(256, 100_000, 256) if plan_or_none(replace(request, context=tokens), machine)]
    assert fitting[0] == 4096 and fitting[-1] < 12000
    assert f"--context {fitting[-1]}" in {proposal.change for proposal in outcome.suggestions}
