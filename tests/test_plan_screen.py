"""The first screen of `plan`: the answer, what would bring more, what would fit; and what a run says that cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offload_runtime import Runtime
from offload_runtime.cli.app import app
from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import BudgetError
from offload_runtime.hardware import load_profile
from offload_runtime.plan import Refusal, RunPlan, describe_models, forecast, machine_figures, plan_or_refuse, plan_run
from offload_runtime.plan.offers import formats_that_fit, smaller_formats, upgrades
from offload_runtime.sizes import GB

CONFIGS = Path(__file__).parent / "data" / "configs"
CARD = machine_figures(load_profile("rtx4090"))


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
    gains = {gain.what: gain for gain in upgrades(found, forecast(found, CARD), CARD)}
    assert all(gain.after_tok_per_s >= 1.1 * gain.before_tok_per_s for gain in gains.values())
    draft = next(gain for what, gain in gains.items() if what.startswith("--draft MODEL, 1B "))
    small = replace(request("llama-3.2-1b", "Q8_0")).target
    with_draft = plan_run(replace(asked, draft=small), CARD)
    assert forecast(with_draft, CARD).usual.tok_per_s == pytest.approx(draft.after_tok_per_s, rel=0.02)
    assert 5 < draft.after_tok_per_s / draft.before_tok_per_s < 10
    drafted = upgrades(with_draft, forecast(with_draft, CARD), CARD)
    assert not any("--draft" in gain.what for gain in drafted)
    declined = plan_run(replace(asked, draft="none"), CARD)
    assert not any("--draft" in gain.what for gain in upgrades(declined, forecast(declined, CARD), CARD))


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        (
            "llama-3.1-70b",
            (),
            (
                r"as Q4_K_M \(about 43 GB\) it fits: 1\.1 tokens/s plain, about 8 with a 1B draft such",
                r"with 1\d\d\.\d GB of RAM it fits: ",
            ),
        ),
        ("llama-3.1-70b", ("--ram", "12GB"), (r"with --ram \d+",)),
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


def test_formats_that_are_named_fit_and_smaller_ones_than_ones_own_only() -> None:
    refused = plan_or_refuse(request("llama-3.1-70b"), CARD)
    assert isinstance(refused, Refusal) and [offer.mix for offer in refused.formats] == ["Q8_0", "Q4_K_M"]
    for offer in refused.formats:
        again = plan_run(request("llama-3.1-70b", offer.mix), CARD)
        assert again == offer.plan and again.target.layout.total_bytes == offer.nbytes
    slow = plan_or_refuse(request("llama-3.1-70b"), replace(CARD, ram_bytes=103 * GB, pinnable_bytes=None))
    assert isinstance(slow, Refusal)  # where only an option that leaves it slow makes it fit, too
    assert [way.split()[1] for way in slow.remedies[:3]] == ["Q8_0", "Q4_K_M", "--encode"]
    little = replace(CARD, ram_bytes=20 * GB, pinnable_bytes=None)
    assert [mix for mix, *_ in smaller_formats(request("llama-3.1-70b", "Q6_K").target)] == ["Q4_K_M"]
    assert not list(formats_that_fit(request("llama-3.1-70b", "Q4_K_M"), little))


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
