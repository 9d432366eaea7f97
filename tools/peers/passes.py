"""Single passes of a loaded runtime, beside what the machine's profile predicts of them, and passes of which a script
decides how many tokens they give: what costs what, without the chance of a draft."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from common import PeerOptions
from long_context.internals import link_peak_gbps, runner_of
from long_context.session import Session, compare, together

from harness import integers, percentiles  # isort: skip (`common` sets the path)
from timing import measure_copy_gbps, measure_link_gbps  # isort: skip

from offload_runtime.config import GB
from offload_runtime.engine import Runtime
from offload_runtime.engine.load import planned_figures
from offload_runtime.errors import OptionError
from offload_runtime.hardware import load_profile
from offload_runtime.model import Window
from offload_runtime.params import SamplingParams
from offload_runtime.plan import machine_figures, pass_time
from offload_runtime.speculation import DraftRequest, Proposal, Proposer

_WARMUP_PASSES = 3


@dataclass(frozen=True)
class Singles:
    """What is timed beside whole answers: of every one of `windows` so many `passes`, and a script of which so many
    tokens are `accepted` a pass, over windows of `scripted_window`."""

    windows: Sequence[int] = ()
    passes: int = 1
    accepted: Sequence[int] = ()
    scripted_window: int = 1

    @property
    def widest(self) -> int:
        """Tokens of the widest window."""
        return max([1, *self.windows, *([self.scripted_window] if self.accepted else [])])


NO_SINGLES = Singles()


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """Those that `bench_streaming.py` and `ours_runtime.py` have in common."""
    parser.add_argument(
        "--scripted", type=integers, default=(), help="of ours: tokens a pass that a script has right, like 10,15"
    )
    parser.add_argument("--scripted-window", type=int, default=64, help="tokens of its windows")


def peaks_gbps(device: torch.device) -> tuple[float | None, float | None]:
    """Of a memcpy to the device, and of copies within it; None without a GPU. Nothing of what they took stays."""
    if device.type != "cuda":
        return None, None
    found = measure_link_gbps(device), measure_copy_gbps(device)
    torch.cuda.empty_cache()
    return found


def time_window(runtime: Runtime, prompt: Sequence[int], width: int, passes: int, peak_gbps: float | None) -> Any:
    """Passes over windows of `width` tokens, each followed by reading one token back, as decoding does."""
    runner = runner_of(runtime)
    runner.cache.truncate(0, 0)
    runner.prefill(0, list(prompt))
    window = Window(tuple(islice(cycle(prompt), width)))
    passes_s, launches_s, before_s, before_bytes = list[float](), list[float](), 0.0, 0
    for number in range(_WARMUP_PASSES + passes):
        launched_s = time.perf_counter()
        logits = runner.verify([window], [0])
        launch_s = time.perf_counter() - launched_s
        logits.argmax(-1).tolist()
        runner.cache.commit(0, 1)
        ended_s = time.perf_counter()
        if number >= _WARMUP_PASSES:
            passes_s.append(ended_s - before_s)
            launches_s.append(launch_s)
        else:
            before_bytes = runner.streamer.bytes_begun
        before_s = ended_s
    pass_s, launch = percentiles(passes_s), percentiles(launches_s)
    pass_bytes = (runner.streamer.bytes_begun - before_bytes) / passes  # of weights, keys and values
    gbps = pass_bytes / pass_s.median / GB
    return {
        "window_tokens": width, "pass_bytes": pass_bytes, "pass_s": pass_s.as_dict(), "host_launch_s": launch.as_dict(),
        "host_launch_share": launch.median / pass_s.median, "link_gbps": gbps, "link_peak_gbps": peak_gbps,
        "link_share": gbps / peak_gbps if peak_gbps else None,
        **predicted_pass(runtime, len(prompt), width, pass_s.median),
    }  # fmt: skip


def predicted_pass(runtime: Runtime, length: int, width: int, measured_s: float) -> dict[str, Any]:
    """What the machine's profile alone says of a pass, and by what share it took longer, None where there is none; and
    what the whole profile says of a machine that is played, where not only the link is slower."""
    played, figures = runtime.plan.request.emulate, planned_figures(runtime.plan)
    found: dict[str, Any] = {"predicted_s": None, "share_off": None, "bound_by": None, "predicted_there": None}
    if figures is not None:
        predicted = pass_time(runtime.plan, figures, length_tokens=length, rows=width)
        found |= {
            "predicted_s": predicted.seconds, "share_off": measured_s / predicted.seconds - 1,
            "bound_by": predicted.bound_by,
        }  # fmt: skip
    if played is not None:
        there = pass_time(runtime.plan, machine_figures(load_profile(played)), length_tokens=length, rows=width)
        found["predicted_there"] = {
            "seconds": there.seconds, "link_s": there.link_s, "compute_s": there.compute_s, "bound_by": there.bound_by,
        }  # fmt: skip
    return found


def weight_bytes_of(runtime: Runtime) -> dict[str, Any]:
    """Stored bytes of weights: what a pass reads of them, what of it crosses the link and how many elements that are,
    and all by how they are stored."""
    plan = runtime.plan.target
    layout, streamed = plan.layout, plan.placement.streamed_layers
    shared = {spec.name: spec.nbytes for spec in layout.shared.tensors}
    return {
        "read_bytes_per_pass": sum(layout.layer_bytes) + shared.get("lm_head", shared["embedding"]),
        "streamed_bytes_per_pass": sum(layout.layer_bytes[index] for index in streamed),
        "streamed_elements": sum(layout.layers[index].matrix_elements for index in streamed),
        "bytes_by_kind": layout.bytes_by_kind,
    }


class ScriptProposer(Proposer):
    """Proposes as many tokens as there is room for, of which the first `right` are those of a known continuation.

    Args:
        script: Prompt and continuation.
        right: Tokens before the first wrong one, so that a pass gives one more.
        vocab_size: Of the target.
    """

    name = "script"

    def __init__(self, script: Sequence[int], right: int, vocab_size: int) -> None:
        self._script, self._right, self._vocab_size = list(script), right, vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal.chain(self._guess(len(request.tokens), request.gamma), self.name) for request in requests]

    def _guess(self, start: int, count: int) -> list[int]:
        known = self._script[start : start + self._right + 1]
        wrong = [(token + 1) % self._vocab_size for token in known[self._right :] or self._script[-1:]]
        return [*known[: self._right], *wrong * count][:count]


def scripted(
    runtime: Runtime, prompt: Sequence[int], answer: Sequence[int], options: PeerOptions, *, accepted: int, window: int
) -> dict[str, Any]:
    """Decode a known answer again, `accepted` tokens a pass over windows of `window` tokens.

    Raises:
        OptionError: The answer is shorter than two such passes.
    """
    count = (len(answer) - 1) // accepted * accepted
    if count < accepted or accepted >= window:
        raise OptionError(
            f"--scripted {accepted} needs {accepted + 1} --new-tokens and wider windows than {accepted} tokens, there "
            f"are {len(answer)} and {window}: raise --new-tokens or --scripted-window"
        )
    sampling = SamplingParams(temperature=options.temperature, seed=options.seed)
    proposer = ScriptProposer([*prompt, *answer], accepted - 1, runtime.config.vocab_size)
    session = Session(runtime)
    start = [[*prompt, answer[0]]]
    done = [
        session.decode(start, proposer, sampling, gamma=window - 1, count=count) for _ in range(options.repeats)
    ]  # fmt: skip
    found, same = together(done), compare([answer[1:]] * len(done), [text for one in done for text in one.texts])
    nbytes, peak_gbps = runner_of(runtime).streamer.bytes_per_pass, link_peak_gbps(runtime)
    bound = accepted * peak_gbps * GB / nbytes if peak_gbps and nbytes else None
    return {
        "accepted_per_pass": accepted, "window_tokens": window, "tokens_per_pass": found.tokens_per_pass,
        "pass_s": found.elapsed_s / found.passes, "passes": found.passes, "tok_per_s": 1 / found.s_per_token,
        "bound_tok_per_s": bound, "share_of_bound": 1 / found.s_per_token / bound if bound else None,
        "identical_to_plain": same.identical,
    }  # fmt: skip
