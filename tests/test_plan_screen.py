"""The first screen of `plan`: the answer, what would bring more, what would fit; and what a run says that cannot be."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import OlmoHybridConfig
from typer.testing import CliRunner, Result

from offload_runtime import Runtime
from offload_runtime.cli.app import app
from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import BudgetError
from offload_runtime.hardware import load_profile
from offload_runtime.plan import Refusal, RunPlan, describe_models, forecast, plan_or_refuse, plan_run
from offload_runtime.plan.report import smaller_formats, upgrades
from offload_runtime.sizes import GB

CONFIGS = Path(__file__).parent / "data" / "configs"
CARD = load_profile("rtx4090")


def plan(target: str, *arguments: str) -> Result:
    command = ["plan", "--target", str(CONFIGS / target), "--profile", "rtx4090", *arguments]
    return CliRunner().invoke(app, command)


def request(target: str, mix: str | None = None, **options: object) -> RuntimeConfig:
    described = describe_models(RuntimeConfig(str(CONFIGS / target), **options))  # type: ignore[arg-type]
    if mix is None:
        return described
    return replace(described, target=next(so for name, _, so in smaller_formats(described.target) if name == mix))


def test_the_answer_comes_first_and_details_only_when_asked_for() -> None:
    draft = ("--draft", str(CONFIGS / "llama-3.2-1b"))
    short, explained = plan("llama-3.1-8b", *draft), plan("llama-3.1-8b", *draft, "--explain")
    assert short.exit_code == explained.exit_code == 0
    first, second = short.stdout.splitlines()[:2]
    assert re.fullmatch(r"Fits\. About \d+ tokens/s; first token after 0\.\d\d s at 8K\.", first)
    assert "80% of what the draft proposes" in second and "48 tokens/s without a draft" in second
    assert explained.stdout.startswith(short.stdout.rstrip())
    for word in ("embedding and head", "verifier", "acceptance of", "arithmetic"):
        assert word not in short.stdout
    for word in ("embedding and head", "acceptance of", "arithmetic", "published figures"):
        assert word in explained.stdout
    assert "for more" not in short.stdout  # nothing would bring a tenth more


@pytest.mark.slow
def test_what_is_offered_for_more_brings_at_least_a_tenth() -> None:
    """Told to take it, somebody gets what was promised."""
    asked = request("llama-3.1-70b", "Q4_K_M")
    found = plan_run(asked, CARD)
    before = max(forecast(found, CARD).usual.tok_per_s, forecast(found, CARD).plain_tok_per_s)
    gains = {gain.what: gain.tok_per_s for gain in upgrades(found, CARD)}
    assert all(speed >= 1.1 * before for speed in gains.values())
    draft = next(speed for what, speed in gains.items() if what.startswith("--draft MODEL, 1B "))
    small = replace(request("llama-3.2-1b", "Q8_0")).target
    with_draft = plan_run(replace(asked, draft=small), CARD)
    assert forecast(with_draft, CARD).usual.tok_per_s == pytest.approx(draft, rel=0.02)
    assert 5 < draft / before < 10
    assert not any("--draft" in gain.what for gain in upgrades(with_draft, CARD))
    declined = plan_run(replace(asked, draft="none"), CARD)
    assert not any("--draft" in gain.what for gain in upgrades(declined, CARD))


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        (
            "llama-3.1-70b",
            (),
            (r"as Q4_K_M \(about 43 GB\) it fits: 1\.2 tokens/s", r"with 1\d\d\.\d GB of RAM it fits: "),
        ),
        ("llama-3.1-70b", ("--ram", "12GB"), (r"with 128.7 GB of RAM it fits",)),
        (
            "llama-3.1-8b",
            ("--kv", "gpu", "--context", "131072", "--batch", "2"),
            (r"with --kv host it fits: ", r"with --context \d+ it fits: "),
        ),
    ],
)
def test_a_refusal_says_what_would_fit(target: str, options: tuple[str, ...], said: tuple[str, ...]) -> None:
    result = plan(target, *options)
    assert result.exit_code == 2 and result.stdout.startswith("Does not fit: ")
    for line in said:
        assert re.search(rf"^  {line}", result.stdout, flags=re.MULTILINE), result.stdout
    for word in ("--dtype", "16-bit", "smaller model", "raise --vram"):
        assert word not in result.output


def test_formats_that_are_named_fit_and_are_smaller_than_ones_own() -> None:
    refused = plan_or_refuse(request("llama-3.1-70b"), CARD)
    assert isinstance(refused, Refusal) and [way.what.split()[1] for way in refused.changes[:2]] == ["Q8_0", "Q4_K_M"]
    for mix, way in zip(("Q8_0", "Q4_K_M"), refused.changes, strict=False):
        assert plan_run(request("llama-3.1-70b", mix), CARD) == way.plan
    assert [mix for mix, *_ in smaller_formats(request("llama-3.1-70b", "Q6_K").target)] == ["Q4_K_M"]


def test_formats_of_llama_cpp_are_not_named_of_families_that_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(OlmoHybridConfig().to_json_string())
    answer = plan(str(tmp_path), "--vram", "12GB").output
    assert "--encode auto" in answer and "as Q" not in answer


REFUSED = {
    "a draft that retrieves": ("--draft", "llama-3.2-1b", "--draft-cache", "retrieval", "--context", "2048"),
    "a draft's chain": ("--draft", "llama-3.2-1b", "--speculation", "chain", "--vram", "5.2GB"),
    "several at once": ("--context", "131072", "--kv", "gpu", "--batch", "3", "--vram", "12GB"),
    "more of both than there is": ("--ram", "500GB", "--vram", "40GB", "--context", "8192"),
    "less host memory than is needed": ("--ram", "10GB", "--context", "8192", "--resident-layers", "4"),
    "little of all": ("--ram", "12GB", "--vram", "9GB", "--pinned", "1MB", "--context", "8192"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_proposed_can_be_typed(name: str) -> None:
    options = [str(CONFIGS / word) if word.startswith("llama") else word for word in REFUSED[name]]
    refused = plan("llama-3.1-8b", *options, "--json")
    assert refused.exit_code == 2, refused.stdout
    if not refused.stdout:  # an option makes no sense, or none is more than there is
        assert re.search(r"(lower|raise|drop|take) ", refused.stderr)
        return
    record = json.loads(refused.stdout)
    typed = [way["change"] for way in record["nearest"] if way["change"].startswith("--")]
    assert record["nearest"] or "lower it to" in record["problem"]
    for change in typed:
        words = re.sub(r" (without|\().*", "", change).split()
        assert plan("llama-3.1-8b", *options, *words).exit_code == 0, change


def test_a_desktop_keeps_its_memory_unless_the_user_says_what_a_run_may_take() -> None:
    free, whole = plan_run(request("llama-3.1-70b", "Q4_K_M"), CARD), CARD.vram_bytes
    assert free.device_bytes <= whole - 1_500_000_000
    more = plan_run(request("llama-3.1-70b", "Q4_K_M", vram=25 * GB), CARD)
    assert isinstance(more, RunPlan) and more.device_bytes > whole - 1_500_000_000
    assert "1.9 GB are left to the desktop" in plan("llama-3.1-8b").stdout
    assert "desktop" not in plan("llama-3.1-8b", "--vram", "24GB").stdout


def test_loading_refuses_with_the_same_advice_and_promises_nothing_on_a_cpu(target: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"--ram of 1\.6 GB is too small by .*\. What would do: with --ram"
    ) as refused:
        Runtime.load(target, device="cpu", ram="1.601GB")
    assert "tokens/s" not in str(refused.value) and "dtype" not in str(refused.value)
    size = re.search(r"with --ram ([0-9.]+GB)", str(refused.value))
    assert size is not None
    Runtime.load(target, device="cpu", ram=size[1]).close()
