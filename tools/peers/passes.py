"""Single passes of a loaded runtime, beside what the machine's profile predicts of them, and passes of which a script
decides how many tokens they give: what costs what, without the chance of a draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from harness import leading_agreement, percentiles

from offload_runtime.core import TokenTree
from offload_runtime.engine import Runtime
from offload_runtime.engine.load import planned_figures
from offload_runtime.errors import OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.plan.cost import pass_time
from offload_runtime.sizes import GB
from offload_runtime.speculation.step import Budgets, Drafter, Texts

_WARMUP_PASSES = 3


def time_window(
    runtime: Runtime, prompt: Sequence[int], width: int, passes: int, *, nbytes: int, peak_gbps: float | None
) -> dict[str, Any]:
    """Passes over windows of `width` tokens, each followed by reading its best tokens back, as decoding does; `nbytes`
    cross the link in each, which does `peak_gbps` at best."""
    window = tuple(islice(cycle(prompt), width + 1))
    rows = runtime.logits(list(prompt), [window] * (_WARMUP_PASSES + passes))
    passes_s, launches_s = list[float](), list[float]()
    started_s = time.perf_counter()
    for logits in rows:
        launches_s.append(time.perf_counter() - started_s)
        logits.argmax(-1).tolist()
        ended_s = time.perf_counter()
        passes_s.append(ended_s - started_s)
        started_s = ended_s
    pass_s, launch_s = percentiles(passes_s[_WARMUP_PASSES:]), percentiles(launches_s[_WARMUP_PASSES:])
    gbps = nbytes / pass_s["median"] / GB
    return {
        "window_tokens": width, "pass_bytes": nbytes, "pass_s": pass_s, "host_launch_s": launch_s,
        "host_launch_share": launch_s["median"] / pass_s["median"], "link_gbps": gbps,
        "link_peak_gbps": peak_gbps, "link_share": gbps / peak_gbps if peak_gbps else None,
    }  # fmt: skip


def predicted_pass(runtime: Runtime, length: int, width: int, measured_s: float) -> dict[str, Any]:
    """What the machine's profile alone says of a pass, and by what share it took longer; None where there is none. Of
    an emulated machine only the link is another's."""
    figures = planned_figures(runtime.plan)
    if figures is None:
        return {"predicted_s": None, "share_off": None, "bound_by": None}
    predicted = pass_time(runtime.plan, figures, length_tokens=length, rows=width)
    share_off = measured_s / predicted.seconds - 1
    return {"predicted_s": predicted.seconds, "share_off": share_off, "bound_by": predicted.bound_by}


def weight_bytes_of(runtime: Runtime) -> dict[str, Any]:
    """Stored bytes of weights: what a pass reads of them, what of it crosses the link and how many elements that are,
    and all by how they are stored."""
    plan = runtime.plan.target
    layout, streamed = plan.layout, plan.placement.streamed_layers
    return {
        "read_bytes_per_pass": sum(layout.layer_bytes) + layout.head.total_bytes,
        "streamed_bytes_per_pass": sum(layout.layer_bytes[index] for index in streamed),
        "streamed_elements": sum(layout.layers[index].matrix_elements for index in streamed),
        "bytes_by_kind": layout.bytes_by_kind,
    }


class ScriptDrafter(Drafter):
    """Proposes as many tokens as there is room for, of which the first `right` are those of a known continuation.

    Args:
        script: Prompt and continuation.
        right: Tokens before the first wrong one, so that a pass gives one more.
        vocab_size: Of the target.
    """

    name = "script"

    def __init__(self, script: Sequence[int], right: int, vocab_size: int) -> None:
        self._script, self._right, self._vocab_size = list(script), right, vocab_size

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        return {
            slot: TokenTree.chain(self._guess(len(texts[slot]), budget.gamma), self.name)
            for slot, budget in budgets.items()
        }

    def _guess(self, start: int, count: int) -> list[int]:
        known = self._script[start : start + self._right + 1]
        wrong = [(token + 1) % self._vocab_size for token in known[self._right :] or self._script[-1:]]
        return [*known[: self._right], *wrong * count][:count]


def scripted(
    runtime: Runtime, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams, *, repeats: int,
    accepted: int, window: int,
) -> dict[str, Any]:  # fmt: skip
    """Decode a known answer again, `accepted` tokens a pass over windows of `window` tokens: the median of `repeats`.

    Raises:
        OptionError: The answer is shorter than two such passes.
    """
    count = 1 + (len(answer) - 1) // accepted * accepted
    if count <= accepted or accepted >= window:
        raise OptionError(
            f"--scripted {accepted} needs {accepted + 1} --new-tokens and wider windows than {accepted} tokens, there "
            f"are {len(answer)} and {window}: raise --new-tokens or --scripted-window"
        )
    params = GenerationParams(count, gamma=window - 1, ignore_eos=True, sampling=sampling)
    drafter = ScriptDrafter([*prompt, *answer], accepted - 1, runtime.config.vocab_size)
    own, runtime.engine.drafter = runtime.engine.drafter, drafter
    done = [runtime.generate(prompt, params=params) for _ in range(repeats)]
    runtime.engine.drafter = own
    best = sorted(done, key=lambda one: one.stats.tok_per_s)[len(done) // 2].stats
    bound = None
    if best.link_peak_gbps and best.bytes_per_pass:
        bound = accepted * best.link_peak_gbps * GB / best.bytes_per_pass
    return {
        "accepted_per_pass": accepted, "window_tokens": window, "tokens_per_pass": best.tokens_per_pass,
        "pass_s": best.measured_s_per_pass, "passes": best.passes, "tok_per_s": best.tok_per_s,
        "bound_tok_per_s": bound, "share_of_bound": best.tok_per_s / bound if bound else None,
        "identical_to_plain": all(leading_agreement(answer, one.tokens) == count for one in done),
    }  # fmt: skip
