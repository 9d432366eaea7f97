"""`plan`: the answer first, what would bring more and what would fit; tables, JSON and a picture; a draft to get, files
as they lie; and what a run says that cannot be."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import OlmoHybridConfig
from typer.testing import CliRunner, Result

from offload_runtime import Runtime
from offload_runtime.cli.app import app
from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import BudgetError
from offload_runtime.hardware import MachineProfile, load_profile, profile_toml, save_profile
from offload_runtime.plan.cost import USUAL_ACCEPTANCE
from offload_runtime.plan.report import Refusal, forecast, plan_or_refuse, smaller_formats, upgrades
from offload_runtime.plan.search import plan_run
from offload_runtime.plan.sizes import RunPlan, describe_models
from offload_runtime.sizes import GB, parse_bytes
from offload_runtime.weights.neighbours import usual_draft
from offload_runtime.weights.sources import describe_model
from tests.test_planning import QWEN3_30B

CONFIGS = Path(__file__).parent / "data" / "configs"
CARD = load_profile("rtx4090")


def plan(target: str | Path, *arguments: str) -> Result:
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


@pytest.mark.parametrize(("target", "options", "said"), [
    ("llama-3.1-70b", (), (r"as Q4_K_M \(about 43 GB\) it fits: 1\.2 tokens/s", r"with 1\d\d\.\d GB of RAM it fits: ")),
    ("llama-3.1-70b", ("--ram", "12GB"), (r"with 128.7 GB of RAM it fits",)),
    (
        "llama-3.1-8b",
        ("--kv", "gpu", "--context", "131072", "--batch", "2"),
        (r"with --kv host it fits: ", r"with --context \d+ it fits: "),
    ),
])  # fmt: skip
def test_a_refusal_says_what_would_fit(target: str, options: tuple[str, ...], said: tuple[str, ...]) -> None:
    result = plan(target, *options)
    assert result.exit_code == 2 and result.stdout.startswith("Does not fit: ")
    for line in said:
        assert re.search(rf"^  {line}", result.stdout, flags=re.MULTILINE), result.stdout
    for word in ("--dtype", "16-bit", "smaller model", "raise --vram"):
        assert word not in result.output


def test_formats_that_are_named_fit_and_are_smaller_than_ones_own() -> None:
    refused = plan_or_refuse(request("llama-3.1-70b"), CARD)
    assert isinstance(refused, Refusal)
    assert [change.what.split()[1] for change in refused.changes[:2]] == ["Q8_0", "Q4_K_M"]
    for mix, change in zip(("Q8_0", "Q4_K_M"), refused.changes, strict=False):
        assert plan_run(request("llama-3.1-70b", mix), CARD) == change.plan
    assert [mix for mix, *_ in smaller_formats(request("llama-3.1-70b", "Q6_K").target)] == ["Q4_K_M"]


def test_formats_of_llama_cpp_are_not_named_of_families_that_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(OlmoHybridConfig().to_json_string())
    answer = plan(str(tmp_path), "--vram", "12GB", "--draft", "ngram").output
    assert "--encode auto" in answer and "as Q" not in answer


def test_machines_that_share_a_model() -> None:
    """What neither holds alone, and faster where together they hold all of it; a slower network costs what it says."""
    two = ("--profile", "rtx4090", "--profile", "rtx3090", "--network")
    options = ("llama-3.1-8b", "--context", "8192", "--batch", "8", "--json")
    fast, slow = (json.loads(plan_for(*options, *two, network).stdout) for network in ("10Gb", "100Mb"))
    assert fast["plain_tok_per_s"] > 1.8 * fast["alone_tok_per_s"]
    assert slow["pass_s"] - fast["pass_s"] == pytest.approx(slow["network_s"] - fast["network_s"])
    assert slow["network_s"] > 8 * 4096 * 2 * 2 / 12.5e6
    assert [one["model_layers"] for one in fast["machines"]] == [[[0, 15]], [[15, 32]]]
    large = plan_for("llama-3.1-70b", *two, "2.5Gb", "--draft", "ngram")
    assert "Fits on 2 machines" in large.stdout and "alone it does not fit" in large.stdout
    assert re.search(r"dealt out in \d strides", large.stdout)


def test_layers_are_dealt_out_in_strides_where_links_idle_otherwise() -> None:
    """As long as the rows are faster on their way than layers over a link."""
    options = ("llama-3.1-70b", "--draft", "ngram", "--profile", "rtx4090", "--profile", "rtx4090", "--json")
    fast, slow = (json.loads(plan_for(*options, "--network", network).stdout) for network in ("10Gb", "0.1Mb"))
    assert fast["pass_s"] < 0.65 * fast["pass_in_one_stride_s"] and slow["strides"] == 1
    first, second = (one["model_layers"] for one in fast["machines"])
    assert len(first) == len(second) == fast["strides"] and first[0][0] == 0 and second[-1][1] == 80
    assert [end for one in zip(first, second, strict=True) for _, end in one][:-1] == [
        start for one in zip(first, second, strict=True) for start, _ in one
    ][1:]
    assert max(one["pass"]["link_s"] for one in fast["machines"]) == pytest.approx(fast["pass_s"])
    # Pieces of so many requests fill the ring of KV, behind which weights wait: less comes while rows are elsewhere.
    many = (*options, "--network", "10Gb", "--batch", "8", "--context", "2048", "--kv")
    on_card, on_host = (json.loads(plan_for(*many, kv).stdout)["strides"] for kv in ("gpu", "host"))
    assert on_host > on_card


def test_copies_of_machines_end_together_unless_ram_is_short(tmp_path: Path) -> None:
    """What the smaller card has no room for lies in RAM, a machine with half the link streams half as much, and what
    its RAM has no room for the other one has."""
    machine = replace(load_profile("rtx4090"), pinnable_bytes=None, ram_bytes=160 * GB, link_gbps=25.0)
    slow = {"link_gbps": 12.5}
    kinds: dict[str, dict[str, Any]] = {
        "first": {}, "small card": {"vram_bytes": 12 * GB}, "small RAM": {"ram_bytes": 50 * GB}, "slow link": slow,
        "both": {**slow, "ram_bytes": 30 * GB},
    }  # fmt: skip
    files = {name: tmp_path / f"{name}.toml" for name in kinds}
    for name, changes in kinds.items():
        files[name].write_text(profile_toml(replace(machine, **changes)))
    options = ("llama-3.1-70b", "--draft", "ngram", "--network", "10Gb", "--json", "--context", "4096")
    streamed_gb, seconds = dict[str, list[float]](), dict[str, list[float]]()
    for name in kinds:
        two = ("--profile", str(files["first"]), "--profile", str(files[name]))
        passes = [one["pass"] for one in json.loads(plan_for(*options, *two).stdout)["machines"]]
        streamed_gb[name] = [one["weight_bytes"] / 1e9 for one in passes]
        seconds[name] = [one["link_s"] for one in passes]
    for name in ("first", "small card", "slow link"):  # but for a layer
        assert seconds[name][0] == pytest.approx(seconds[name][1], rel=0.1), name
    for name, most_gb in (("small RAM", 50), ("both", 30)):
        assert 0.8 * most_gb < streamed_gb[name][1] < most_gb < streamed_gb[name][0], name


@pytest.mark.parametrize(("options", "said"), [
    (("--profile", "rtx4090", "--network", "1Gb"), "--network does nothing for one machine"),
    (("--profile", "rtx4090", "--profile", "rtx4090"), "how fast --network"),
    (("--profile", "rtx4090", "--profile", "rtx4090", "--network", "fast"), "2.5Gb or 100Mb"),
    (("--profile", "rtx4090", "--profile", "rtx4090", "--network", "1Gb", "--ram", "9GB"), "machine 1 .rtx4090"),
])  # fmt: skip
def test_machines_that_cannot_share_a_model_are_refused(options: tuple[str, ...], said: str) -> None:
    assert re.search(said, " ".join(plan_for("llama-3.1-70b", *options).stderr.split()))


REFUSED = {
    "a draft that retrieves": ("--draft", "llama-3.2-1b", "--draft-cache", "retrieval", "--context", "2048"),
    "a draft's chain": ("--draft", "llama-3.2-1b", "--speculation", "chain", "--vram", "5.2GB"),
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
    typed = [change["change"] for change in record["nearest"] if change["change"].startswith("--")]
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
    with pytest.raises(BudgetError, match=r"--ram of 1\.6 GB is too small by .*\. What would do: with --ram") as caught:
        Runtime.load(target, device="cpu", ram="1.601GB")
    assert "tokens/s" not in str(caught.value) and "dtype" not in str(caught.value)
    size = re.search(r"with --ram ([0-9.]+GB)", str(caught.value))
    assert size is not None
    Runtime.load(target, device="cpu", ram=size[1]).close()


def changed(tmp_path: Path, name: str, **settings: object) -> Path:
    """A configuration with other settings."""
    (tmp_path / "model").mkdir()
    stated = json.loads((CONFIGS / name / "config.json").read_text()) | settings
    (tmp_path / "model" / "config.json").write_text(json.dumps(stated))
    return tmp_path / "model"


QWEN_3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("base", "settings", "size", "name"),
    [
        ("llama-3.1-70b", {}, "1B", "Llama-3.2-1B-Instruct"),
        ("qwen2.5-32b", {}, "0.5B", "Qwen2.5-0.5B-Instruct"),
        ("qwen2.5-32b", QWEN_3, "0.6B", "Qwen3-0.6B"),
        ("llama-2-13b", {}, "1B", "TinyLlama-1.1B-Chat-v1.0"),
        ("llama-3.1-8b", {"vocab_size": 49152}, "0.1B", "SmolLM2-135M-Instruct"),
        ("llama-3.1-70b", {"vocab_size": 32768, **MISTRAL}, "7B", "Mistral-7B-Instruct-v0.3"),
        ("llama-3.1-8b", {"vocab_size": 32000}, "1B", None),  # Mistral-7B as GGUF, whose tokens are not Llama 2's
        ("qwen2.5-32b", {"vocab_size": 131072, **MISTRAL}, "1B", None),
    ],
)
def test_usual_drafts(tmp_path: Path, base: str, settings: dict[str, object], size: str, name: str | None) -> None:
    draft = usual_draft(describe_model(changed(tmp_path, base, **settings)))
    assert draft is not None and (draft.size, draft.name) == (size, name)
    assert usual_draft(describe_model(CONFIGS / "llama-3.2-1b")) is None  # no draft pays for a model that is small


def cut(path: Path, content: bytes, *names: str) -> None:
    """Write a file as pieces of these names, with no header each."""
    size = -(-len(content) // len(names))
    for number, name in enumerate(names):
        path.with_name(name).write_bytes(content[number * size : (number + 1) * size])


@pytest.mark.parametrize(("names", "given"), [
    (["m.gguf.part1of2", "m.gguf.part2of2"], "m.gguf.part1of2"),
    (["m.gguf.part1of2", "m.gguf.part2of2"], "m.gguf.part2of2"), (["m.gguf-split-a", "m.gguf-split-b"], "m.gguf"),
    (["m.gguf.aa", "m.gguf.ab", "m.gguf.ac"], "m.gguf.ab"), ([f"m.gguf.{number}" for number in range(8, 12)], "."),
])  # fmt: skip
def test_pieces_of_a_file_are_put_together_first(tmp_path: Path, names: list[str], given: str) -> None:
    cut(tmp_path / "m.gguf", b"GGUF" + bytes(range(200)), *names)
    result = plan(tmp_path / given)
    assert result.exit_code == 2 and f"`cd {tmp_path} && cat {' '.join(names)} > m.gguf`" in result.stderr


def test_pieces_that_are_not_there_are_counted(tmp_path: Path) -> None:
    (tmp_path / "m.gguf.part1of3").write_bytes(b"GGUF\3")
    assert "of which 2 are not there: finish the download" in plan(tmp_path / "m.gguf.part1of3").stderr
    (tmp_path / "n.gguf.1").write_bytes(b"GGUF\3")  # as wget calls what it fetches again
    assert "is damaged" in plan(tmp_path / "n.gguf.1").stderr


@pytest.mark.parametrize(
    "given", ["", "models", "models/blobs", "models/manifests/registry.ollama.ai/library/llama3.2/1b"]
)
def test_a_directory_of_ollama_says_which_file_is_a_model(tmp_path: Path, given: str) -> None:
    manifests, blobs = tmp_path / "models" / "manifests", tmp_path / "models" / "blobs"
    blobs.mkdir(parents=True)
    for maker, model, tag in (("library", "llama3.2", "1b"), ("someone", "mine", "latest")):
        directory = manifests / "registry.ollama.ai" / maker / model
        directory.mkdir(parents=True)
        layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{kind}{tag}"}
                  for kind in ("template", "model")]  # fmt: skip
        (directory / tag).write_text(json.dumps({"layers": layers}))
    for name, content in (("broken", "{"), ("without a model", '{"layers": []}')):
        (manifests / name).write_text(content)
    result = plan(tmp_path / given)
    assert result.exit_code == 2 and f"llama3.2:1b is {blobs / 'sha256-model1b'}" in result.stderr
    assert ("mine:latest is " in result.stderr) == (not given.endswith("1b"))


def test_what_a_draft_costs_is_compared_with_none(tmp_path: Path) -> None:
    """One that takes the layers' room makes a run slower than it would be by itself."""
    large, small = CONFIGS / "llama-3.1-8b", changed(tmp_path, "llama-3.2-1b", vocab_size=151936)
    result = plan(large, "--draft", str(large), "--context", "2048")
    assert result.exit_code == 0 and re.search(r"; (4\d|5\d) tokens/s without a draft\.", result.stdout), result.stdout
    assert re.search(r"^ ?--draft ngram +(4|5)\d ", result.stdout, flags=re.MULTILINE)
    assert "the draft's tokens are the target's is taken for granted" in result.stdout
    other = plan(large, "--draft", str(small))
    assert other.exit_code == 2 and "151936 logits and the target 128256" in other.stderr


@pytest.fixture(autouse=True)
def no_profiles_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))


def plan_for(target: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--target", str(CONFIGS / target), *arguments])


def planned(target: str, *arguments: str) -> dict[str, Any]:
    result = plan_for(target, "--json", "--profile", "rtx4090", *arguments)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_json_has_the_same_in_bytes_and_seconds() -> None:
    record = planned("llama-2-13b", "--context", "4096")
    memory, layers = record["device_memory"], record["layers"]
    assert record["fits"] and record["profile"] == "rtx4090" and record["context_tokens"] == 4096
    assert sum(part["nbytes"] for part in memory["parts"]) == memory["peak_bytes"] <= memory["limit_bytes"]
    assert sorted(layers["weights_resident"] + layers["weights_streamed"]) == list(range(40))
    assert sorted(layers["kv_resident"] + layers["kv_streamed"]) == list(range(40))
    verify = record["pass"]["verify"]
    assert verify["bound_by"] == "link" and verify["seconds"] == pytest.approx(verify["bytes_streamed"] / 25e9)
    assert [row["acceptance"] for row in record["by_acceptance"]] == [0.7, 0.8, 0.85, 0.9, 0.95, 0.98]
    assert record["usual"]["acceptance"] == USUAL_ACCEPTANCE["n-grams"]
    assert record["upgrades"]
    assert all(gain["after_tok_per_s"] > 1.1 * gain["before_tok_per_s"] for gain in record["upgrades"])


def test_a_mixture_that_does_not_fit_is_as_fast_as_its_hits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    says = r"expected hits 5\d %\.\nPlain decoding by hits: 11 at 50 %, 15 at 65 %, .* in tokens/s\."
    assert re.search(says, plan(tmp_path, "--context", "4096", "--draft", "none").stdout)


def test_options_reach_the_plan() -> None:
    plain = planned("llama-3.1-8b", "--draft", "none", "--context", "8192", "--resident-layers", "8", "--kv", "gpu")
    assert len(plain["layers"]["weights_resident"]) == 8 and plain["by_acceptance"] == [] and plain["gamma"] == 0
    batch = planned("llama-3.1-8b", "--batch", "3", "--context", "8192", "--gamma", "7", "--vram", "23GB")
    assert (batch["batch"], batch["gamma"], batch["device_memory"]["limit_bytes"]) == (3, 7, 23 * 10**9)
    wide = planned("llama-3.1-8b", "--dtype", "fp32", "--context", "4096")
    assert wide["pass"]["verify"]["bytes_streamed"] > plain["pass"]["verify"]["bytes_streamed"]


@pytest.mark.parametrize(("arguments", "message"), [
    (("--profile", "rtx9999"), "rtx9999"), (("--ram", "much"), "--ram 'much' is not a size"),
    (("--ram", "1GB"), "--ram of 1.0 GB is too small"),
    (("--ram", "500GB", "--dtype", "fp32", "--context", "131072", "--batch", "4"), "the 68.7 GB of rtx4090: lower"),
    pytest.param(
        ("--pinned", "1MB", "--vram", "9GB", "--context", "2048"),
        "--pinned page-locks 1.0 MB at most",
        marks=pytest.mark.slow,
    ),
    (("--vram", "90GB"), "more than the 25.8 GB of a card of rtx4090: lower it to 25.7GB"),
    (("--speculation", "triforce"), "does not draft with n-grams"),
    (("--draft", "none", "--gamma", "4"), "--gamma 4 does nothing with --draft none"),
])  # fmt: skip
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    profile = () if "--profile" in arguments else ("--profile", "rtx4090")
    result = plan_for("llama-3.1-8b", *profile, *arguments)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]


@pytest.mark.slow
def test_staging_and_what_it_costs_are_said() -> None:
    arguments = ("llama-3.1-8b", "--profile", "rtx4090", "--vram", "8GB", "--context", "2048", "--pinned", "4GB")
    result = plan_for(*arguments, "--explain")
    assert result.exit_code == 0, result.stderr
    said = re.search(r"(\d+) of (\d+) streamed layers are staged from pageable memory", result.stdout)
    assert said is not None and 0 < int(said[1]) < int(said[2])
    assert "staging ring" in result.stdout
    record = json.loads(plan_for(*arguments, "--json").stdout)
    assert len(record["layers"]["weights_staged"]) == int(said[1])
    assert record["host_memory"]["pinned_bytes"] <= 4 * 10**9
    predicted = record["pass"]["plain"]
    assert predicted["bound_by"] == "staging" and predicted["seconds"] == predicted["staging_s"] > predicted["link_s"]


def test_without_a_profile_the_users_own_or_a_common_card() -> None:
    common = plan_for("llama-3.1-8b", "--context", "4096")
    assert common.stderr == "" and common.stdout.startswith("Fits.")  # the answer comes first
    assert "for NVIDIA GeForce RTX 4090 with 25.8 GB" in common.stdout and "by the profile rtx4090; " in common.stdout
    refused = plan_for("llama-3.1-70b")
    assert refused.stdout.startswith("Does not fit") and "by the profile rtx4090; " in refused.stdout
    save_profile(load_profile("h200"), "mine")
    own = plan_for("llama-3.1-8b", "--context", "4096")
    assert "by the profile mine; " in own.stdout and "for NVIDIA H200 with" in own.stdout
    assert "by the profile" not in plan_for("llama-3.1-8b", "--context", "4096", "--profile", "mine").stdout
    save_profile(MachineProfile("bare", "measured", 0, 10**9), "mine")
    assert "by the profile rtx4090; " in plan_for("llama-3.1-8b", "--context", "4096").stdout


def test_generate_explains_before_it_loads(target: Path, tmp_path: Path) -> None:
    arguments = ["generate", "--target", str(target), "--prompt", "the quick", "--max-new-tokens", "2"]
    options = ["--device", "cpu", "--context", "256", "--resident-layers", "2", "--draft", "none", "--json"]
    result = CliRunner().invoke(app, [*arguments, *options, "--explain"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"]
    for text in ("2 of 5 layers resident, 3 streamed (", "ring of layers", "workspace"):
        assert text in result.stderr
    assert "\nmemory, in MB" in result.stderr and "device memory" not in result.stderr  # a CPU has only one
    assert result.stderr.index("ring of layers") < result.stderr.rindex("2 of 5 layers resident")
    assert "ring of layers" not in CliRunner().invoke(app, [*arguments, *options]).stderr
    assert "nothing is predicted: no figures of this machine are known" in result.stderr
    assert "rtx4090" not in result.stderr
    toy = tmp_path / "toy.toml"
    toy.write_text(
        'name = "toy"\nsource = "made up"\ngpus = 1\nram_bytes = 1000000000\ngpu_name = "toy"\n'
        "vram_bytes = 400000000\nlink_gbps = 0.0001\nhbm_gbps = 10.0\ntflops = {fp32 = 0.05}\n"
    )
    known = CliRunner().invoke(app, [*arguments, *options, "--explain", "--profile", str(toy)])
    assert "by the figures of toy:" in known.stderr and "predicted at 256 tokens of context" in known.stderr
    said = re.search(r"pass, 1 token +([0-9]+) .* link *\n", known.stderr)
    streamed = re.search(r"a pass behind 255 tokens streams ([0-9.]+ kB)", known.stderr)
    assert said is not None and streamed is not None
    assert float(said[1]) == pytest.approx(parse_bytes(streamed[1]) / 100, rel=0.01)


@pytest.mark.parametrize(("options", "said"), [
    (("--devices", "cuda:0,cuda:1,cuda:2"), "--devices names 3 cards and rtx4090-x2 has 2"),
    (("--vram", "20GB,20GB,20GB"), "--vram has 3 sizes and there are 2 cards"),
    (("--device", "cpu"), "nothing predicts how fast a CPU is"),
])  # fmt: skip
def test_cards_that_cannot_be_planned_for(options: tuple[str, ...], said: str) -> None:
    result = plan_for("llama-3.1-70b", *options, "--profile", "rtx4090-x2")
    assert result.exit_code == 2 and said in result.stderr


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    result = plan_for("llama-2-13b", "--context", "4096", "--profile", "rtx4090", "--plot", str(path))
    drawn = path.read_text()
    assert result.exit_code == 0 and drawn.startswith("<?xml")
    for text in ("resident layers", "workspace", "device memory", "streamed layers"):
        assert f"<!-- {text}" in drawn  # matplotlib writes each label as a comment beside its outlines


def test_a_picture_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("--context", "4096", "--profile", "rtx4090", "--plot")
    assert "must end in one of" in plan_for("llama-3.1-8b", *arguments, str(tmp_path / "plan.doc")).stderr
    nowhere = plan_for("llama-3.1-8b", *arguments, str(tmp_path / "no" / "plan.png"))
    assert nowhere.exit_code == 2 and "cannot be written (No such file" in nowhere.stderr
    fifo = tmp_path / "fifo.png"
    os.mkfifo(fifo)
    assert "fifo.png is not a regular file" in plan_for("llama-3.1-8b", *arguments, str(fifo)).stderr
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert "pip install 'offload-runtime[plots]'" in plan_for("llama-3.1-8b", *arguments, "x.png").stderr
