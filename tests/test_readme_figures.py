"""The figures of README.md and docs/results.md are those of the result files that they name."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from plot_rtx4090 import emulated_speeds, plain_speed
from systems import agreements

from offload_runtime.hardware import load_profile

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "results"
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def result(name: str) -> dict[str, Any]:
    """A result file."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def percent(share: float, digits: int = 1) -> str:
    """As the pages write it, with a space."""
    return f"{100 * share:.{digits}f} %"


def streaming() -> Iterator[str]:
    found = result("streaming-h200")
    systems = {
        "ours": "offload_runtime", "deepspeed": "DeepSpeed ZeRO-Inference 0.19.8, tuned",
        "accelerate-pinned": "accelerate 1.15 `cpu_offload`, weights pinned by hand",
        "accelerate": "accelerate 1.15 `cpu_offload` as it comes",
    }  # fmt: skip
    for key, name in systems.items():
        row = found["results"][key]
        times = "" if key == "ours" else f" {found['times_ours_over'][key]:.2f} x"
        seconds, share = row["s_per_token"]["median"], percent(row["bound"]["share"])
        yield f"| {name} | {seconds:.4f} | {row['link_gbps']:.1f} GB/s | {share} |{times} |"
    for window in found["results"]["ours"]["windows"]:
        if window["window_tokens"] in (1, 17, 128, 1024):
            seconds, launch = window["pass_s"]["median"], percent(window["host_launch_share"])
            yield f"| {window['window_tokens']} | {seconds:.4f} | {percent(window['link_share'])} | {launch} |"
    yield f"({found['results']['ours']['bytes_per_token'] / 1e9:.2f} GB a pass)"
    later = result("streaming-passes-ef73a52-h200")["results"]["ours"]["windows"]
    assert (later[0]["window_tokens"], later[-1]["window_tokens"]) == (1, 1024)
    shares, launches = ([row[key] for row in later] for key in ("link_share", "host_launch_share"))
    peak_gbps = later[0]["link_peak_gbps"]
    yield f"{100 * min(shares):.1f} to {percent(max(shares))} of the link's peak of {peak_gbps:.1f} GB/s"
    yield f"the host launches for {100 * min(launches):.1f} to {percent(max(launches))} of a pass there"


def ours(name: str) -> Any:
    return result(name)["results"]["ours"]


def stored_weights() -> Iterator[str]:
    large = ours("stored-70b-q4-k-m-h200")
    assert large["placement"].startswith("35 of 80 layers resident") and "emulating rtx4090" in large["placement"]
    yield f"{large['bytes_per_pass'] / 1e9:.1f} GB cross the paced link in a pass"
    shares, times = ({round(row(w), 3) for w in large["windows"]} for row in (
        lambda w: w["link_share"], lambda w: w["pass_s"]["median"]
    ))  # fmt: skip
    assert [w["window_tokens"] for w in large["windows"]] == [1, 17, 64, 256] and shares == {1.0}
    assert all(abs(w["share_off"]) < 1e-4 for w in large["windows"])
    yield f"passes take {times.pop():.3f} s, as predicted"
    assert not times and all(row["identical_to_plain"] for row in large["scripted"])
    ten, fifteen = (row["tok_per_s"] for row in large["scripted"])
    yield f"at {ten:.1f} and {fifteen:.1f} tokens/s"
    there = [w["predicted_there"] for w in large["windows"]]
    assert all(each["bound_by"] == "link" for each in there)
    yield f"at {there[0]['compute_s']:.2f} s of such a pass for one token and {there[-1]['compute_s']:.2f} s for 256"
    raw, coded = (ours(f"streaming-13b-{name}-h200") for name in ("raw", "coded"))
    assert raw["tokens"] == coded["tokens"]
    yield f"{raw['tok_per_s']:.2f} and {coded['tok_per_s']:.2f} tokens/s, {coded['tok_per_s'] / raw['tok_per_s']:.2f} x"
    yield f"with {raw['bytes_per_pass'] / 1e9:.1f} and {coded['bytes_per_pass'] / 1e9:.1f} GB a pass"
    seconds = [row["windows"][0]["pass_s"]["median"] for row in (raw, coded)]
    yield f"passes {seconds[0] / seconds[1]:.2f} x as fast"
    whole = ours("resident-13b-coded-h200")
    yield f"and says {whole['tok_per_s']:.1f} tokens/s there"
    yield f"at {percent(share_of_copies(whole), 0)} of the bandwidth of copies"
    yield f"predicted to be its memory, {1e3 * whole['windows'][0]['predicted_there']['seconds']:.0f} ms a token"
    streamed, resident = (result(f"start-70b-{name}h200") for name in ("", "whole-"))
    yield f"42.5 GB are in place {streamed['weights_s']:.1f} s after the runtime was asked for, with 45 layers"
    peaks_gb = [row["peak_rss_bytes"] / 1e9 for row in (streamed, resident)]
    yield f"peak of resident memory {peaks_gb[0]:.2f} GB), and {resident['weights_s']:.1f} s after with all"
    yield f"start-70b-whole-h200.json); {peaks_gb[1]:.2f} GB); imports come before"
    found = [ours(f"resident-8b-{name}-h200") for name in ("bf16", "q4-k-m", "q8-0")]
    yield f"plain decoding says {in_words(row['tok_per_s'] for row in found)} tokens/s with "
    yield f"{in_words(row['peak_vram_bytes']['driver'] / 1e9 for row in found)} GB of the card"
    wide = (next(w for w in row["windows"] if w["window_tokens"] == 8)["pass_s"]["median"] for row in found)
    yield f"tokens take {in_words(1e3 * seconds for seconds in wide)} ms"
    yield f"at {percent(share_of_copies(found[1]), 0)} of the bandwidth of copies"


def packed_13b() -> Iterator[str]:
    """As a file stores it and decoded: the same tokens."""
    said = {
        "stored": "stored, resident",
        "streamed": "stored, streamed",
        "decoded": "decoded, as many resident as fit",
    }
    files = {"Q8_0": ("stored", "streamed", "decoded"), "Q4_0": ("stored", "decoded")}
    plain, drafted = dict[tuple[str, str], Any](), dict[tuple[str, str], Any]()
    for case in [(kind, way) for kind, ways in files.items() for way in ways]:
        name = f"compare-13b-{case[0].lower().replace('_', '-')}-{case[1]}-h200"
        asked, rows = result(name)["configuration"], result(name)["results"]
        assert asked["temperature"] == 0.6 and asked["vram"] == "24GB" and asked["new_tokens"] == 128
        assert asked["weights"] == ("decoded" if case[1] == "decoded" else "stored")
        plain[case], drafted[case] = rows["ours-plain"], rows["ours"]
        assert not any(row["differing_generations"] for row in rows.values())
        moved = dict.fromkeys(f"{row['bytes_per_pass'] / 1e9:.1f}".replace("0.0", "0") for row in rows.values())
        yield (
            f"| {case[0]} | {said[case[1]]} ([JSON](../tools/results/{name}.json)) | {' and '.join(moved)} GB "
            f"| {plain[case]['tok_per_s']:.1f} | {drafted[case]['tok_per_s']:.1f} "
            f"| {drafted[case]['tokens_per_pass']:.1f} |"
        )
    for kind, ways in files.items():
        answers = [rows[kind, way]["tokens"] for rows in (plain, drafted) for way in ways]
        assert all(answer == answers[0] for answer in answers)
        yield f"a file says the same {sum(map(len, answers[0]))} tokens: 6 runs of Q8_0 and 4 of Q4_0"
        assert len(answers) == {"Q8_0": 6, "Q4_0": 4}[kind]
    speeds = {case: row["tok_per_s"] for case, row in plain.items()}
    times = [speeds[kind, "stored"] / speeds[kind, "decoded"] for kind in files]
    yield f"plain decoding is {times[0]:.1f} and {times[1]:.1f} x as fast as decoded"
    yield f"Q4_0 is only {speeds['Q4_0', 'stored'] / speeds['Q8_0', 'stored']:.2f} x as fast as Q8_0"
    times = [drafted[kind, "stored"]["tok_per_s"] / speeds[kind, "stored"] for kind in files]
    yield f"the draft brings {times[0]:.2f} and {times[1]:.2f} x"
    busy = [row["bound"]["share"] for case, row in drafted.items() if case[1] != "stored"]
    yield f"rounds with it keep the link {100 * min(busy):.0f} to {percent(max(busy), 0)} busy"


def cards() -> Iterator[str]:
    names = ("one", "two", "one-emulated", "two-emulated")
    one, two, one_played, two_played = rows = [ours(f"cards-13b-{name}-h200") for name in names]
    assert one["tokens"] == two["tokens"] == one_played["tokens"] == two_played["tokens"]
    yield from (of_cards(row) for row in rows)
    first, second = (row["windows"][0]["pass_s"]["median"] for row in (one, two))
    yield f"Two cards take {second / first:.2f} of one card's time for a pass and say the same tokens"


def cards_at_120k() -> Iterator[str]:
    names = ("one-emulated-h200", "two-emulated-h200", "two-h200", "two-24gb-emulated-h100")
    one, two, real, roomy = rows = [ours(f"cards-7b-120k-{name}") for name in names]
    assert one["tokens"] == two["tokens"] and one["bytes_per_pass"] == two["bytes_per_pass"]
    yield f"an answer has 1.795 tokens/s with 64 MiB and {real['tok_per_s']:.3f} with 128"
    yield from (of_cards(row) for row in rows)
    yield f"({one['bytes_per_pass'] / 1e9:.1f} GB a pass"
    yield f"({roomy['bytes_per_pass'] / 1e9:.1f} GB a pass"
    gain = two["tok_per_s"] / one["tok_per_s"]
    yield f"two emulated cards bring {gain:.2f} x the tokens/s of one and say the same tokens"
    yield f"a token of an answer takes {roomy['token_s']['p50']:.3f} s on an H100"
    launches = {100 * row["windows"][0]["host_launch_share"] for row in (two, real, roomy)}
    yield f"The host launches for {between(launches, 0)} % of such passes"


def papers_rows_on_cards() -> Iterator[str]:
    for shape, name in (("7b", "7b-120k"), ("13b", "13b-60k")):
        found = result(f"compare-cards-{name}-h200")
        rows = [found["results"][system] for system in ("ours-plain", "ours")]
        asked, plain = found["configuration"], rows[0]["tok_per_s"]
        assert rows[0]["tokens"] == rows[1]["tokens"]
        cells = [
            f"{row['tok_per_s']:.{digits}f} | {row['tokens_per_pass']:.{of_pass}f} "
            f"| {row['tokens_per_pass'] / row['tok_per_s']:.3f} | {row['time_to_first_token_s']:.1f} s |"
            for row, digits, of_pass in zip(rows, (2, 1), (0, 1), strict=True)
        ]
        yield f"| {shape.upper()}, {asked['prompt_tokens']:,} tokens | plain decoding | {cells[0]} |"
        yield f"{asked['new_tokens']} tokens) | TriForce | {cells[1]} {rows[1]['tok_per_s'] / plain:.1f} x |"
        yield f"{'here it is' if shape == '7b' else 'half the context,'} {1e3 / rows[1]['tok_per_s']:.0f} ms"


def serving_memory() -> Iterator[str]:
    (row,) = result("serving-13b-memory-h200")["rows"]
    assert row["at_once"] == 8 and row["seconds"] == 480 and not row["errors"] and not row["left"]
    yield f"{row['finished'] + row['cut']} in all"
    yield f"the process grows by {row['mb_per_minute']['rss_bytes']:.2f} MB a minute"
    assert row["mb_per_minute"]["device_bytes"] == 0


def of_cards(row: Any) -> str:
    """Cells of a run on one card or two."""
    passes_s, shares = ({w["pass_s"]["median"] for w in row["windows"]}, {w["link_share"] for w in row["windows"]})
    gbps = row["windows"][0]["link_peak_gbps"]
    links = f"{gbps:.1f}" if row["settings"]["emulate"] is None else f"{gbps:.0f}"
    window = row["windows"][0]
    predicted_s = window["predicted_s"] or window["predicted_there"]["seconds"]
    times, predicted = between(passes_s, 3), f"{predicted_s:.3f}"
    busy = between({min(100.0, 100 * share) for share in shares}, 1).replace("100.0", "100")
    said = f"{row['tok_per_s']:.3f}".rstrip("0") if row["settings"]["emulate"] else f"{row['tok_per_s']:.2f}"
    return f"| {links} | {times} | {predicted} | {busy} % | {said}"


def between(values: set[float], digits: int) -> str:
    """The smallest and the largest, or what both are."""
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values))))


def share_of_copies(row: Any) -> float:
    """Of a resident model's weights, read once a token."""
    weights = row["weights"]
    return weights["read_bytes_per_pass"] * row["tok_per_s"] / 1e9 / weights["copy_gbps"]


def in_words(values: Iterable[float]) -> str:
    """Three or more, as a sentence has them."""
    *others, last = (f"{value:.1f}" for value in values)
    return f"{', '.join(others)} and {last}"


def long_context() -> Iterator[str]:
    found = result("long-context-host-h200")
    yield f"prefill | {found['prefill']['s']:.1f} s, host memory growing beside it"
    yield f"{found['prefill']['link_bytes'] / 1e9:.1f} GB over the link"
    for window in found["windows"]:
        tokens = "1 token" if window["window_tokens"] == 1 else f"{window['window_tokens']} tokens"
        share = percent(window["link_share"])
        yield f"over {tokens} | {window['pass_s']['median']:.3f} s, {share} of the link's peak |"
    yield from long_context_prefill(found)
    row, settings = drawn_places("sweep-gamma-host-12-starts-h200")
    yield f"windows of {row['value']}"
    yield f"{row['tokens_per_pass']:.1f} tokens a pass, {row['s_per_token']:.3f} s / token, "
    worst, best = worst_and_best(row)
    yield f"**{row['times_plain']:.1f} x plain decoding** with the same bytes resident"
    yield f"{worst:.1f} x at the worst place and {best:.1f} x at the best"
    yield f"{percent(row['share_of_bound'], 0)} of what pass time and acceptance allow"
    yield f"The {row['compared_tokens']} tokens that were decoded plainly as well"
    yield f"{settings['plain_tokens']} behind each place, are the same"
    steps, step_ms = row["verifier_steps_per_pass"], row["step_ms"]
    yield f"A round is a pass and {steps:.0f} steps of {step_ms:.1f} ms"
    shorter, _ = drawn_places("sweep-gamma-24-host-12-starts-h200")
    slower = percent(shorter["plain_s_per_token"] / row["plain_s_per_token"] - 1, 0)
    yield f"took {shorter['s_per_token']:.3f} s / token, on another machine"
    yield f"whose plain decoding was slower by {slower}"
    yield from long_context_32k()


def long_context_32k() -> Iterator[str]:
    row, settings = drawn_places("sweep-gamma-16-host-32k-12-starts-h200")
    yield f"At {int(settings['context']):,} tokens"
    yield f"windows of {row['value']} give {row['tokens_per_pass']:.1f} tokens a pass"
    yield f"and {row['s_per_token']:.4f} s / token"
    worst, best = worst_and_best(row)
    yield f"**{row['times_plain']:.1f} x plain decoding**, {worst:.1f} x at the worst of the twelve places"
    yield f"and {best:.1f} x at the best"
    yield f"A round takes {row['tokens_per_pass'] / row['times_plain']:.2f} times as long as a pass"
    yield f"{row['verifier_steps_per_pass']:.0f} steps of {row['step_ms']:.1f} ms"


def drawn_places(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of a sweep from twelve drawn places of two texts, and its settings."""
    found = result(name)
    (row,), settings = found["rows"], found["settings"]
    assert settings["draw"] == "1" and len(row["places"]) == 12 and row["identical_to_plain"]
    assert len({place["text"] for place in row["places"]}) == 2
    return row, settings


def worst_and_best(row: dict[str, Any]) -> tuple[float, float]:
    """Times plain decoding, of its places."""
    times = [place["times_plain"] for place in row["places"]]
    return min(times), max(times)


def long_context_prefill(found: Any) -> Iterator[str]:
    prefill, peak_gbps = found["prefill"], found["windows"][0]["link_peak_gbps"]
    yield f"of {prefill['weights_and_kv_bytes'] / 1e9:.1f} of weights and keys and values"
    tflop_per_s = result("kernel-attention-h200")["matmul_tflops"]
    yield f"{prefill['operations'] / tflop_per_s / 1e12:.1f} s for {prefill['operations'] / 1e15:.2f}e15 operations"
    yield f"at the {tflop_per_s:.0f} TFLOP/s of matrix products"
    yield f"{prefill['link_bytes'] / peak_gbps / 1e9:.1f} s for the link"


def on_chip() -> Iterator[str]:
    row, settings = drawn_places("sweep-budget-12-starts-h200")
    worst, best = worst_and_best(row)
    plain_ms, copy_gbps = 1e3 * row["plain_s_per_token"], copies_gbps()
    # In bf16, layers, SmolLM2's vocabulary, and a key and a value of 32 layers.
    weights = result("streaming-h200")["results"]["ours"]["bytes_per_token"] + 49152 * 4096 * 2
    read_gb = (weights + mean(place["tokens"] for place in row["places"]) * 2 * 32 * 4096 * 2) / 1e9
    yield f"windows of {settings['gamma']} tokens, {settings['tokens']} tokens each"
    yield f"plain decoding takes {plain_ms:.1f} ms a token, {plain_ms / (1e3 * read_gb / copy_gbps):.2f} x"
    yield f"reading {read_gb:.1f} GB takes at the {copy_gbps / 1e3:.2f} TB/s"
    yield f"TriForce {1e3 * row['s_per_token']:.1f} ms: {row['tokens_per_pass']:.1f} tokens a pass"
    yield f"**{row['times_plain']:.2f} x**, {worst:.2f} x at the worst place and {best:.2f} x at the best"
    yield f"{percent(row['share_of_bound'], 0)} of the bound. All {row['compared_tokens']} tokens"
    for row in result("sweep-batch-h200")["rows"]:
        assert row["identical_to_plain"] and len(row["places"]) == 4
        what = row["value"].replace("x", " x ") + (" tokens" if row["value"] == "6x19K" else "")
        yield f"{what} {row['times_plain']:.2f} x"


def copies_gbps() -> float:
    """Of copies within the card."""
    gbps = load_profile("h200").hbm_gbps
    assert gbps is not None
    return gbps


def steps() -> Iterator[str]:
    (found,) = result("long-context-host-h200")["verifier_passes"]
    copy_gbps = copies_gbps()
    yield f"over a tree of {found['tokens'] - 1} tokens takes {found['verifier_step_ms']:.1f} ms"
    yield f"{found['verifier_step_ms'] / (found['bytes'] / (copy_gbps * 1e6)):.2f} x what reading its weights and keys"
    yield f"at the {copy_gbps / 1e3:.2f} TB/s of copies"
    yield f"A level of a tree takes the draft {found['draft_step_ms']:.2f} ms"
    case = next(case for case in result("draft-step-h200")["cases"] if case["shape"] == "llama-68m")
    yield f"of a Llama of 68M {case['step_ms']['median']:.3f}"


def trees() -> Iterator[str]:
    longest, tree_shares = 0.0, list[int]()
    for noise in ("0.02", "0.05", "0.1"):
        found = result(f"trees-noise-{noise}-h200")
        plain_tokens, tokens = found["settings"]["plain_tokens"], found["settings"]["tokens"]
        chain_tokens = found["settings"]["chain_tokens"]
        assert chain_tokens == tokens
        yield f"{tokens} tokens each, the same tokens as with chains of 16"
        yield f"plain decoding, 0.355 s / token, ran for the first {plain_tokens} of them and said the same"
        chain: Any = None
        families: Counter[str] = Counter()
        for row in found["streamed"]:
            if row["how"] == "plain":
                assert f"{row['s_per_pass']:.3f}" == "0.355"
            assert row.get("identical", True)
            if row["how"] == "chain 16":
                chain = row
            if row["how"] == "auto":
                assert (chain["prompt"], chain["temperature"]) == (row["prompt"], row["temperature"])
                assert row["identical_tokens"] == chain["tokens"] == int(chain_tokens)
                longest = max(longest, row["times_link"])
                for window, count in row["windows"].items():
                    families[window.split()[0]] += count
                yield (
                    f"| {noise} | {row['temperature']:g} | {row['prompt']} | {chain['tokens_per_pass']:.1f} "
                    f"| {chain['tok_per_s']:.1f} | {row['tokens_per_pass']:.1f} | {row['tok_per_s']:.1f} "
                    f"| {row['times_plain']:.1f} x "
                    f"| {percent(row['hidden_draft_share'], 0)} | {percent(row['link_idle_share'])} |"
                )
        tree_shares.append(round(100 * families["tree"] / families.total()))
    yield f"A round takes at most {longest:.2f} times what its bytes take over the link"
    small, *others = tree_shares
    assert small < 50
    yield (
        "With noise 0.02 more than half of the rounds were chains and n-grams, "
        f"with the others {others[0]} and {others[1]} % of them trees"
    )


def useless_draft() -> Iterator[str]:
    found = result("trees-noise-1-h200")
    rows = {(row["prompt"], row["how"]): row for row in found["streamed"]}
    tokens = {row["tokens"] for (_, how), row in rows.items() if how == "auto"}
    yield f"(noise 1, T = {found['streamed'][0]['temperature']:g}, {tokens.pop()} tokens"
    assert not tokens and all(row.get("identical", True) for row in rows.values())
    assert {f"{row['s_per_pass']:.3f}" for row in rows.values()} == {"0.355"}
    for prompt in ("prose", "code"):
        assert not rows[prompt, "chain 16"]["accepted_by_source"]
        assert rows[prompt, "auto"]["accepted_by_source"].keys() == {"ngram"}
    prose, code = (rows[prompt, "auto"]["tokens_per_pass"] for prompt in ("prose", "code"))
    yield f"{prose:.2f} tokens a pass in the prose and {code:.1f} in the code"


def tree_sizes() -> Iterator[str]:
    firsts: dict[str, list[str]] = {"prose": [], "code": []}
    for noise in ("0.02", "0.05", "0.1"):
        rows = result(f"tree-sizes-noise-{noise}-h200")["sizes"]
        assert all(row["identical"] and row["tokens"] == 256 for row in rows)
        for start in range(0, len(rows), 6):
            sizes = rows[start : start + 6]
            if sizes[0]["temperature"] == 0.6:
                firsts[sizes[0]["prompt"]].append(f"{sizes[0]['hits_by_rank'][0]:.2f}")
            assert [row["nodes"] for row in sizes] == [1, 4, 16, 64, 256, 1024]
            cells = [f"{row['tokens_per_pass']:.1f} ({row['predicted_tokens_per_pass']:.1f})" for row in sizes]
            yield f"| {sizes[0]['temperature']:g} | {sizes[0]['prompt']} | {noise} | {' | '.join(cells)} |"
    told = {prompt: f"{', '.join(rates[:2])} and {rates[2]}" for prompt, rates in firsts.items()}
    yield f"the target's token {told['prose']} of the time in the prose and {told['code']} in the code (T = 0.6)"


def circle(tokens: list[int]) -> tuple[int, int]:
    """How many of the last tokens repeat those before them, and how many these are."""

    def repeated(period: int) -> int:
        same = [one == other for one, other in zip(tokens[period:], tokens[:-period], strict=True)]
        return len(same) - max((at + 1 for at, yes in enumerate(same) if not yes), default=0)

    most, period = max((repeated(period), -period) for period in range(1, 65))
    return most, -period


OURS_AND_DEEPSPEED = {
    "ours-plain": "offload_runtime, plain decoding", "ours": "offload_runtime, windows chosen",
    "deepspeed": "DeepSpeed ZeRO-Inference 0.19.8",
    "deepspeed-assistant": "DeepSpeed with the draft as `assistant_model`",
}  # fmt: skip


def ours_is(found: dict[str, Any], key: str) -> str:
    """A cell: how many times as fast as a system ours was in a comparison; empty for ours."""
    times = found["times_ours_over"].get(key)
    return "" if times is None else f"{times:.{1 if times > 1 else 2}f} x "


def beside_deepspeed() -> Iterator[str]:
    greedy, sampled = result("compare-13b-h200"), result("compare-13b-sampled-h200")
    names = {**OURS_AND_DEEPSPEED, "ours-chains": "the same without trees"}
    circles = [circle(tokens) for tokens in greedy["results"]["ours"]["tokens"]]
    yield "the last {} tokens of the prose repeat {}, the last {} of the code {}".format(*circles[0], *circles[1])
    windows = greedy["results"]["ours"]["speculation"]["windows"]
    others = sum(count for window, count in windows.items() if not window.startswith("tree"))
    yield f"At T = 0 windows were chains and n-grams in {others} of {sum(windows.values())} passes"
    longer = [1 / found["results"]["ours"]["bound"]["share"] for found in (greedy, sampled)]
    yield f"a round takes {longer[0]:.2f} times what its bytes do at T = 0 and {longer[1]:.2f} times at 0.6"
    for found in (greedy, sampled):
        asked, agreed = found["configuration"], found["agreement"]["systems"]["ours"]
        assert agreed["leading"] == agreed["of"]
        yield f"the two prompts, {asked['new_tokens']} tokens each"
        for key, row in found["results"].items():
            yield (
                f"| {asked['temperature']:g} | {names[key]} | {row['tok_per_s']:.1f} | {row['tokens_per_pass']:.1f} "
                f"| {row['bytes_per_pass'] / 1e9:.1f} GB | {row['link_gbps']:.1f} GB/s "
                f"| {ours_is(found, key)}|"
            )
    assert greedy["results"].keys() == OURS_AND_DEEPSPEED.keys()
    assert sampled["results"].keys() == names.keys() - {"deepspeed"}
    times = sampled["results"]["ours"]["tok_per_s"] / greedy["results"]["deepspeed"]["tok_per_s"]
    yield f"beside that rate ours is {times:.1f} x at {sampled['configuration']['temperature']:g}"


def other_drafts() -> Iterator[str]:
    alone = result("compare-13b-h200")["results"]["deepspeed"]["tok_per_s"]
    yield f"DeepSpeed's {alone:.1f} tokens/s without an assistant"
    names = {**OURS_AND_DEEPSPEED, "ours-chains": "the same without trees"}
    most = list[dict[str, Any]]()
    for noise in ("0.02", "0.1"):
        found = result(f"compare-13b-sampled-{noise}-h200")
        asked, agreed, rows = found["configuration"], found["agreement"], found["results"]
        assert asked["target"].endswith(f"-{noise}")
        for system in ("ours", "ours-chains"):
            assert agreed["systems"][system]["leading"] == agreed["systems"][system]["of"]
        yield f"at T = {asked['temperature']:g}, {asked['new_tokens']} tokens each"
        most.append(rows["deepspeed-assistant"]["assistant"])
        for key, row in rows.items():
            yield (
                f"| {noise} | {names[key]} | {row['tok_per_s']:.1f} | {row['tokens_per_pass']:.1f} "
                f"| {row['link_gbps']:.1f} GB/s | {ours_is(found, key)}"
                f"| {row['tok_per_s'] / alone:.1f} x |"
            )
    told = []
    for assistant in most:
        *tried, last = assistant["tok_per_s_by_tokens"]
        told.append(f"with {assistant['tokens']} proposals at noise {{}}, of {', '.join(tried)} and {last}")
    yield "fastest " + told[0].format("0.02")
    yield told[1].format("0.1")
    yield f"with 12 proposals the assistant was {most[0]['tok_per_s_by_tokens']['12']:.1f}"


def all_systems() -> Iterator[str]:
    found = result("compare-7b-h200")
    asked, agreed, rows = found["configuration"], found["agreement"]["systems"], found["results"]
    assert agreed["ours"]["leading"] == agreed["ours"]["of"] and asked["temperature"] == 0
    yield f"{asked['new_tokens']} tokens each, `--vram {asked['vram']}` for all but the last"
    names = {
        **OURS_AND_DEEPSPEED,
        "accelerate": "accelerate 1.15 `cpu_offload`, weights pinned by hand",
        "transformers-offloaded-cache": "transformers 5.17, KV cache offloaded, weights on the GPU",
        "resident": "transformers 5.17, all on the GPU",
    }  # fmt: skip
    assert rows.keys() == names.keys()
    for key, row in rows.items():
        yield (
            f"| {names[key]} | {row['tok_per_s']:.1f} | {row['tokens_per_pass']:.1f} | {row['link_gbps']:.1f} GB/s "
            f"| {row['peak_vram_bytes']['driver'] / 1e9:.1f} GB | {ours_is(found, key)}|"
        )
        if not key.startswith("ours"):
            assert agreed[key]["leading"] == [8, asked["new_tokens"]]
    yield f"In the code all seven say the same {asked['new_tokens']} tokens"
    shares = {key: percent(rows[key]["bound"]["share"]) for key in ("ours", "ours-plain")}
    yield f"reach {shares['ours']} of what the link was measured at"
    yield f"with {rows['ours']['tokens_per_pass']:.1f} tokens in each"
    yield f"and {shares['ours-plain']} with one"
    slow, fast = (f"{run['tok_per_s']:.1f}" for run in rows["deepspeed"]["runs"])
    yield f"({slow} and {fast} tokens/s for the two prompts)"
    tie = found["near_tie"]
    assert tie["token"] == 8 and tie["transformers_bf16"]["ours"] == tie["transformers_bf16"]["others"]
    yield f"the same logit of {tie['transformers_bf16']['ours']} twice"
    yield "in fp32 {ours:.3f} for ours and {others:.3f} for theirs".format(**tie["transformers_fp32"])
    prose, code = (f"{1e3 / run['tok_per_s']:.0f} ms" for run in rows["resident"]["runs"])
    yield f"a token takes the last {prose} in the prose and {code} in the code"


def long_contexts_beside_others() -> Iterator[str]:
    names = {
        **OURS_AND_DEEPSPEED,
        "ours": "offload_runtime, TriForce, windows chosen",
        "ours-chains": "the same without n-grams",
        "transformers-offloaded-cache": "transformers 5.17, KV cache offloaded",
    }
    new_tokens, of_verifier, of_ngrams = [], [], 0
    for label in ("32K", "120K"):
        found = result(f"compare-7b-{label.lower()}-h200")
        agreed, asked = found["agreement"], found["configuration"]
        assert agreed["systems"]["ours"]["leading"] == agreed["systems"]["ours"]["of"] == [asked["new_tokens"]]
        assert asked["temperature"] == 0.6 and asked["vram"] == "24GB"
        assert min(share for shares in agreed["in_common"].values() for share in shares) > 0.98
        new_tokens.append(asked["new_tokens"])
        ours = found["results"]["ours"]
        verifier = ours["speculation"]["levels"][1]
        assert ours["runs"][0]["passes"] == verifier["verifications"]
        of_verifier += [verifier["accepted"], verifier["proposed"]]
        of_ngrams += ours["speculation"]["accepted"] - verifier["accepted"]
        if assistant := found["results"].get("deepspeed-assistant", {}).get("assistant"):
            rates = {int(tokens): f"{rate:.1f}" for tokens, rate in assistant["tok_per_s_by_tokens"].items()}
            best = assistant["tokens"]
            yield f"fastest with {best} proposals ({rates.pop(best)} tokens/s; {rates[8]} with 8, {rates[4]} with 4)"
        for key, row in found["results"].items():
            yield (
                f"| {label} | {names[key]} | {row['tok_per_s']:.2f} | {row['tokens_per_pass']:.1f} "
                f"| {row['time_to_first_token_s']:.1f} s | {row['link_gbps']:.1f} GB/s "
                f"| {row['peak_vram_bytes']['driver'] / 1e9:.1f} GB | {ours_is(found, key)}|"
            )
    yield "{} and {} tokens of one answer".format(*new_tokens)
    yield "{} of {} proposals of TriForce's retrieval verifier at 32K and {} of {} at 120K".format(*of_verifier)
    assert of_ngrams == 1


def deepspeed_at_120k() -> Iterator[str]:
    """In a run of its own: held against plain decoding of the other."""
    found, other = result("compare-7b-120k-deepspeed-h200"), result("compare-7b-120k-h200")
    asked, rows = found["configuration"], found["results"]
    for key in ("target", "draft", "prompt_tokens", "new_tokens", "temperature", "vram", "kv", "resident_layers"):
        assert asked[key] == other["configuration"][key]
    agreed = agreements({"ours-plain": other["results"]["ours-plain"], **rows}, greedy=False)
    assert agreed is not None and agreed["systems"]["ours"]["leading"] == [asked["new_tokens"]]
    assert min(share for shares in agreed["in_common"].values() for share in shares) > 0.98
    row, name = rows["deepspeed-assistant"], OURS_AND_DEEPSPEED["deepspeed-assistant"]
    yield (
        f"| 120K | {name} | {row['tok_per_s']:.2f} | {row['tokens_per_pass']:.1f} "
        f"| {row['time_to_first_token_s']:.1f} s "
        f"| {row['link_gbps']:.1f} GB/s | {row['peak_vram_bytes']['driver'] / 1e9:.1f} GB "
        f"| {ours_is(found, 'deepspeed-assistant')}|"
    )
    yield f"At 120K it ran with {row['assistant']['tokens']} proposals only"
    yield f"beside ours at {rows['ours']['tok_per_s']:.2f} tokens/s"


def verified() -> Iterator[str]:
    found = [result("verify-7b-h200"), result("verify-7b-streamed-h200")]
    for one in found:
        assert one["verdict"] == "exact" and one["bitwise_compared"] and one["device_name"] == "NVIDIA H200"
        findings = [answer["finding"] for answer in one["identity"]]
        assert all(finding["verdict"] == "identical" and not finding["differing_logit_rows"] for finding in findings)
        assert {answer["proposer"] for answer in one["identity"]} == {"ngram", "draft", "script", "as loaded"}
        assert not any(fit["impossible"] or fit["p_value"] < one["fit_level"] for fit in one["fit"])
    yield "{} and {} answers".format(*(len(one["identity"]) for one in found))
    yield "none of {} and {} tests".format(*(len(one["fit"]) for one in found))
    yield "of {:,} and {:,} sampled tokens".format(*(sum(fit["draws"] for fit in one["fit"]) for one in found))
    yield "(least p-values {:.3f} and {:.3f})".format(*(min(fit["p_value"] for fit in one["fit"]) for one in found))


def plans() -> Iterator[str]:
    rows, emulated = result("plan-h200")["rows"], result("emulation-h200")
    assert not result("plan-h200")["failures"] and emulated["holds"]
    used = [row["used_share"] for row in rows]
    yield f"is off by at most {percent(max(abs(row['share_off']) for row in rows))}"
    yield f"{100 * min(used):.0f} to {percent(max(used), 0)} of the memory allowed is used"
    large = [abs(row["share_off"]) for row in emulated["rows"] if row["copy_mib"] >= 4]
    yield f"is within {percent(max(large))} for copies of 4 MiB and more"


def attention_kernels() -> Iterator[str]:
    """Shares of the time of the kernels before, by kind of case."""
    before, after = (result(f"kernel-attention-{name}h100")["cases"] for name in ("before-", ""))
    shares: dict[str, list[float]] = {}
    for old, new in zip(before, after, strict=True):
        kind = old["mode"]
        if kind in ("window", "prefill"):
            kind = f"{kind} of 1" if old["queries"] == 1 else f"{kind} {bool(old['context'])}"
        shares.setdefault(kind, []).append(new["triton_ms"]["median"] / old["triton_ms"]["median"])
    words = {kind: (f"{min(found):.2f}", f"{max(found):.2f}") for kind, found in shares.items()}
    yield "windows of one token take as long ({} to {} of the time)".format(*words["window of 1"])
    yield "wider ones {} to {}".format(*words["window True"])
    yield "trees of 64 nodes {} to {}".format(*words["tree"])
    (wide, grouped), (wide_alone, grouped_alone) = shares["prefill True"], shares["prefill False"]
    yield f"takes {wide:.2f} (32 heads) and {grouped:.2f} (64 heads"
    yield f"without anything before it {wide_alone:.2f} and {grouped_alone:.2f}"


def whole_on_the_card() -> Iterator[str]:
    results = result("compare-7b-resident-h200")["results"]
    ours = results["ours-plain"]["tok_per_s"]
    for name, system in (
        ("resident-compiled", "transformers 5.17, static cache, compiled by `torch.compile`"),
        ("resident", "transformers 5.17 as it comes"),
    ):
        theirs = results[name]["tok_per_s"]
        yield f"| {system} | {1000 * results[name]['s_per_token']['median']:.2f} | {ours / theirs:.2f} x |"
        assert results[name]["differing_generations"] == 3 and results["ours-plain"]["differing_generations"] == 0
        assert results[name]["tokens"][0][:3] == results["ours-plain"]["tokens"][0][:3]
    yield f"| offload_runtime, plain decoding | {1000 * results['ours-plain']['s_per_token']['median']:.2f} | |"
    found = result("compare-135m-resident-h200")
    plain, eager, compiled = (found["results"][name] for name in ("ours-plain", "resident", "resident-compiled"))
    plain_ms, eager_ms, compiled_ms = (1000 * row["s_per_token"]["median"] for row in (plain, eager, compiled))
    yield f"SmolLM2-135M takes {plain_ms:.2f} ms a token"
    times = found["times_ours_over"]["resident-compiled"]
    yield f"compiled transformers {compiled_ms:.2f} (ours is {times:.1f} x)"
    yield f"transformers as it comes {eager_ms:.2f} "
    slow, fast = (run["tok_per_s"] for run in eager["runs"])
    yield f"({slow:.1f} and {fast:.1f} tokens/s in its two generations)"
    assert plain["tokens"] == eager["tokens"] == compiled["tokens"]
    yield f"The answers that are kept are the same {len(plain['tokens'][0])} tokens"
    assert plain["differing_generations"] == compiled["differing_generations"] == 0
    assert found["configuration"]["warmup"] == found["configuration"]["repeats"] == 2
    yield f"two of them warm-ups, {eager['differing_generations']} differs from the other of its length"


def turns() -> Iterator[str]:
    found = result("turns-smollm2-h200")
    assert found["exact"] and len({(row["weights"], row["kv"]) for row in found["rows"]}) == 4
    for way, words in (("turns", "turns**"), ("answers", "answers**"), ("prompts", "prompts**")):
        yield f"0 of {sum(row['compared'] for row in found['rows'] if row['way'] == way)} {words}"


@pytest.mark.parametrize(
    "claims",
    [
        whole_on_the_card,
        turns,
        attention_kernels,
        streaming,
        stored_weights,
        packed_13b,
        cards,
        cards_at_120k,
        papers_rows_on_cards,
        serving_memory,
        long_context,
        on_chip,
        steps,
        trees,
        useless_draft,
        tree_sizes,
        beside_deepspeed,
        other_drafts,
        all_systems,
        long_contexts_beside_others,
        deepspeed_at_120k,
        verified,
        plans,
    ],
)
def test_the_results_are_what_was_measured(claims: Callable[[], Iterator[str]]) -> None:
    text = " ".join(PAGE.split())
    missing = [claim for claim in claims() if " ".join(claim.split()) not in text]
    assert not missing


def test_the_readme_says_what_was_measured_and_predicted() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    speeds, plain = emulated_speeds(), f"{plain_speed():.1f}"
    agreed = {noise: result(f"tree-sizes-noise-{noise}-h200")["sizes"] for noise in (0.02, 0.05, 0.1)}
    for noise, sizes in agreed.items():
        first = next(row for row in sizes if row["prompt"] == "prose" and row["temperature"] == 0.6)["hits_by_rank"][0]
        row = next(line for line in readme.splitlines() if f"right {percent(first, 0)} of the time" in line)
        assert f"| {plain}" in row and row.endswith(f"| {speeds[noise, 'prose']:.1f} | emulated |")
    plans = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
    for start, model, cells in (
        ("| Llama-3.1-8B | 131072 |", "Llama-3.1-8B", (-3, -2)),
        ("| Qwen2.5-32B | 1 |", "Qwen2.5-32B", (6, 11)),
        ("| Llama-3.1-70B | 1 |", "Llama-3.1-70B", (6, 11)),
    ):
        predicted = next(line for line in plans.splitlines() if line.startswith(start)).split("|")
        plain, drafted = (predicted[cell].split()[0] for cell in cells)
        row = next(line for line in readme.splitlines() if line.startswith(f"| {model}"))
        assert row.endswith(f"| {plain} | {drafted} | predicted |")
    beside = result("compare-13b-sampled-h200")["times_ours_over"]["deepspeed-assistant"]
    long = result("sweep-gamma-host-12-starts-h200")["rows"][0]["times_plain"]
    assert f"the same 13B is {beside:.1f} x DeepSpeed ZeRO-Inference" in " ".join(readme.split())
    assert f"120K tokens of context are {long:.1f} x plain decoding" in " ".join(readme.split())


def test_every_result_that_is_named_is_there() -> None:
    named = set(re.findall(r"tools/results/([\w.-]+\.json)", PAGE))
    assert len(named) > 10 and named <= {path.name for path in RESULTS.glob("*.json")}


def test_chosen_windows_are_held_against_fixed_ones_as_measured() -> None:
    page = (ROOT / "docs" / "windows.md").read_text(encoding="utf-8")
    measured: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in (RESULTS / "commits-h200.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("bench") == "trees":
            case = f"{row['noise']:g}", row["link"].split()[0].strip(","), row["prompt"]
            measured[case]["before" if row["commit"] == "08ad60b" else row["how"]].append(row["tok_per_s"])
    shares = list[float]()
    for case, answers in measured.items():
        speeds = {how: mean(found) for how, found in answers.items()}
        best = max((how for how in speeds if how.startswith(("chain", "tree"))), key=lambda how: speeds[how])
        shares.append(speeds["auto"] / max(speeds["before"], speeds[best]))
        figures = f"{speeds['auto']:.1f} | {speeds['before']:.1f} | {speeds[best]:.1f} ({best}) | {shares[-1]:.2f}"
        assert f"| {' | '.join(case)} | {figures} |" in page
    assert len(shares) == page.count("| own |") + page.count("| emulated |") == 12
    assert f"{mean(shares):.2f} on average" in page
