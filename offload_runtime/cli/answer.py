"""One answer: the options go to the engine, text comes back piece by piece, Ctrl-C stops it, figures follow."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from offload_runtime.cli.settings import LoadOptions
from offload_runtime.cli.terminal import ProgressBars
from offload_runtime.config import GenerationParams
from offload_runtime.errors import BudgetError

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, GenerationStats, Runtime
    from offload_runtime.engine.prompts import PromptRoom
    from offload_runtime.engine.run_plan import RunPlan

Prompt = str | Sequence[Mapping[str, str]]
_PROPOSERS = {"ngram": "n-grams'", "draft": "draft's", "middle": "middle level's"}
_SHOWN_DEPTHS = 8
_SHOWN_WINDOWS = 4
_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class AnswerStream(Protocol):
    """What `Runtime.stream` and `Conversation.say` return: pieces of text, then the result."""

    @property
    def result(self) -> GenerationResult:
        """The finished answer; only after the last piece or `close`."""

    def __iter__(self) -> Iterator[str]: ...

    def close(self) -> None:
        """Stop here and keep what there is."""


class StopRequest:
    """Ctrl-C as a wish, so that an answer ends between two passes and the cache stays whole.

    A pass over a streamed target takes seconds; whoever presses Ctrl-C again does not want to wait for it, and gets
    the plain KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> StopRequest:
        # Signal handlers can be set from the main thread only; elsewhere no Ctrl-C arrives either.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def load_runtime(
    options: LoadOptions, *, show_progress: bool, prompts: Sequence[Prompt] = (), max_new_tokens: int = 1
) -> Runtime:
    """Load the target (and the draft) with a progress bar in bytes on stderr.

    Prompts that leave no room for `max_new_tokens` are refused before weights are read.
    """
    from offload_runtime.engine import Runtime

    with ProgressBars(enabled=show_progress) as bars:
        return Runtime.load(
            options.target,
            draft=options.draft,
            device=options.device,
            dtype=options.dtype,
            vram=options.vram_bytes,
            ram=options.ram_bytes,
            pinned=options.pinned_bytes,
            resident_layers=options.resident_layers,
            context=options.context,
            kv=options.kv,
            speculation=options.speculation,
            max_batch=options.max_batch,
            gamma=options.gamma,
            max_gamma=options.max_gamma,
            tree_nodes=options.tree_nodes,
            emulate=options.emulate,
            profile=options.profile,
            on_progress=bars.on_bytes,
            on_plan=partial(_explain, options=options) if options.explain else None,
            check=partial(_check_prompts, prompts=prompts, max_new_tokens=max_new_tokens) if prompts else None,
            trace=options.trace,
        )


def _check_prompts(room: PromptRoom, *, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    if len(prompts) == 1:
        room.fit(prompts[0], max_new_tokens)
    else:
        room.fit_all(prompts, max_new_tokens)


def _explain(plan: RunPlan, *, options: LoadOptions) -> None:
    """Print on stderr what a run holds where and, where the machine's figures are known, how long a pass will take."""
    from offload_runtime.cli.plan_tables import memory_tables, print_tables, speed_line
    from offload_runtime.engine.expectation import planned_figures
    from offload_runtime.engine.machines import COMMON_PROFILE

    machine = planned_figures(plan, device=options.device, profile=options.profile, emulate=options.emulate)
    unknown = (
        "no profile of this machine is known: nothing is predicted, and what was left to be chosen was chosen by the "
        f"figures of {COMMON_PROFILE}"
    )
    print_tables([*memory_tables(plan), unknown if machine is None else speed_line(plan, machine)], sys.stderr)


def stream_answer(
    start: Callable[..., AnswerStream],
    prompt: Prompt,
    params: GenerationParams,
    *,
    show: Callable[[str], None],
    show_progress: bool,
    speculate: bool = True,
) -> GenerationResult:
    """Run one answer to its end or to Ctrl-C, handing each piece of text to `show` as it comes.

    `start` is `Runtime.stream` or `Conversation.say`. Returns the result; its finish reason is `interrupted` when
    Ctrl-C ended it. Before the first piece of text Ctrl-C raises KeyboardInterrupt instead and, as with every other
    exception, the stream is not settled: a conversation then stays as it was before the turn.

    Raises:
        BudgetError: Memory ran out; behind the first piece of text the answer so far comes with it, and stays in a
            conversation.
    """
    shown_characters = 0
    failure: BudgetError | None = None
    with StopRequest() as stop, ProgressBars(enabled=show_progress) as bars:
        stream = start(
            prompt,
            **_keywords(params),
            speculate=speculate,
            on_prefill=_stoppable_prefill(stop, bars),
        )
        try:
            for piece in stream:
                bars.close()
                show(piece)
                shown_characters += len(piece)
                if stop.requested:
                    break
        except KeyboardInterrupt:
            if not shown_characters:
                raise
        except BudgetError as error:
            if not shown_characters:
                raise
            failure = error
        stream.close()
        result = stream.result
        # Text that the engine held back, as the possible beginning of a stop text, is part of a stopped answer too.
        if result.finish_reason == "interrupted":
            show(result.text[shown_characters:])
    if failure is not None:
        raise BudgetError(str(failure), [result]) from failure
    return result


def answer_batch(
    runtime: Runtime, prompts: Sequence[Prompt], params: GenerationParams, *, show_progress: bool
) -> list[GenerationResult]:
    """Answer all prompts together, to their ends or to Ctrl-C.

    After Ctrl-C the answers that were not finished have the finish reason `interrupted`. While the prompts are worked
    on, and at the second one, Ctrl-C raises KeyboardInterrupt.
    """
    with (
        StopRequest() as stop,
        ProgressBars(enabled=show_progress) as prefill_bars,
        ProgressBars(enabled=show_progress) as answer_bars,
    ):

        def on_progress(finished: int, answers: int) -> None:
            prefill_bars.close()
            answer_bars.on_answers(finished, answers)

        return runtime.generate_batch(
            prompts,
            **_keywords(params),
            on_prefill=_stoppable_prefill(stop, prefill_bars),
            on_progress=on_progress,
            should_stop=lambda: stop.requested,
        )


def _keywords(params: GenerationParams) -> dict[str, Any]:
    """Return what an answer is asked for by, in the engine's keywords."""
    return {
        "max_new_tokens": params.max_new_tokens,
        "stop": params.stop,
        "gamma": params.gamma,
        "ignore_eos": params.ignore_eos,
        **asdict(params.sampling),
    }


def _stoppable_prefill(stop: StopRequest, bars: ProgressBars) -> Callable[[int, int], None]:
    """Show the layers of a prefill, and end it where Ctrl-C asked for that."""

    def on_prefill(done_layers: int, layers: int) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        bars.on_prefill(done_layers, layers)

    return on_prefill


def speed_figures(stats: GenerationStats) -> list[str]:
    """Return what was reached, each figure beside its bound: tokens/s, tokens per pass, acceptance (of each level, by
    depth and by source), windows, link, prediction.

    Figures of an emulated machine begin with its name.
    """
    figures = [] if stats.emulated is None else [f"emulating {stats.emulated}"]
    figures += [f"{stats.tok_per_s:.1f} tokens/s", f"{stats.tokens_per_pass:.2f} tokens per pass"]
    proposals = acceptance_figure(stats), depth_figure(stats), source_figure(stats), window_figure(stats)
    figures += [figure for figure in proposals if figure]
    if stats.link_gbps is not None:
        idle = share_figure(stats.link_idle_share)
        figures.append(f"link {link_figure(stats)}{f', idle {idle}' if idle else ''}")
    if hidden := share_figure(stats.hidden_draft_share):
        figures.append(f"drafting hidden {hidden}")
    if prediction := prediction_figure(stats):
        figures.append(prediction)
    return figures


def prediction_figure(stats: GenerationStats) -> str:
    """Return the predicted time of a pass beside the measured one; nothing where none was predicted or none passed."""
    predicted_s, measured_s = stats.predicted_s_per_pass, stats.measured_s_per_pass
    if not predicted_s or not measured_s:
        return ""
    off = 100 * (measured_s / predicted_s - 1)
    return f"predicted {predicted_s:.3g} s a pass, measured {measured_s:.3g} ({off:+.1f} %)"


def acceptance_figure(stats: GenerationStats) -> str:
    """Return what share of each level's proposals was accepted, the last level first; nothing if there were none."""
    levels = [level for level in reversed(stats.acceptance) if level.proposed]
    shares = [f"{level.rate:.2f} of the {_PROPOSERS[level.proposed_by]}" for level in levels]
    return f"accepted {', '.join(shares)}" if shares else ""


def share_figure(share: float | None) -> str:
    """Return a share as a percentage; nothing where it is not known."""
    return "" if share is None else f"{100 * share:.1f} %"


def depth_figure(stats: GenerationStats) -> str:
    """Return in how many passes a first proposal was accepted, a second one behind it, and so on; nothing if never."""
    shown = stats.accepted_by_depth[:_SHOWN_DEPTHS]
    more = ", ..." if len(stats.accepted_by_depth) > len(shown) else ""
    return f"by depth {', '.join(map(str, shown))}{more}" if shown else ""


def source_figure(stats: GenerationStats) -> str:
    """Return who proposed what was accepted, where it was more than one."""
    shares = [f"{count} {_PROPOSERS.get(source, source)}" for source, count in stats.accepted_by_source.items()]
    return f"by source {', '.join(shares)}" if len(shares) > 1 else ""


def window_figure(stats: GenerationStats) -> str:
    """Return how many passes verified which windows, the most frequent first; nothing without proposals."""
    shown = list(stats.windows.items())[:_SHOWN_WINDOWS]
    if not shown or set(stats.windows) == {"plain"}:
        return ""
    more = ", ..." if len(stats.windows) > len(shown) else ""
    return f"windows {', '.join(f'{count} x {window}' for window, count in shown)}{more}"


def link_figure(stats: GenerationStats) -> str:
    """Return the link's speed beside its measured peak, such as `54.1 of 55.5 GB/s (97 %)`."""
    if stats.link_gbps is None:
        return "nothing streamed"
    if not stats.link_peak_gbps:
        return f"{stats.link_gbps:.1f} GB/s"
    share = 100 * stats.link_gbps / stats.link_peak_gbps
    return f"{stats.link_gbps:.1f} of {stats.link_peak_gbps:.1f} GB/s ({share:.0f} %)"


def result_record(
    result: GenerationResult, *, runtime: Runtime, options: LoadOptions, params: GenerationParams
) -> dict[str, Any]:
    """Return what `--json` prints for one answer."""
    return {**_answer_record(result), **_run_record(runtime, options, params)}


def batch_record(
    names: Sequence[str], results: Sequence[GenerationResult], *, runtime: Runtime, options: LoadOptions,
    params: GenerationParams,
) -> dict[str, Any]:  # fmt: skip
    """Return what `--json` prints for the answers of a batch, each with the name of its prompt."""
    answers = [{"name": name, **_answer_record(result)} for name, result in zip(names, results, strict=True)]
    return {"results": answers, **_run_record(runtime, options, params)}


def _answer_record(result: GenerationResult) -> dict[str, Any]:
    return {
        "tokens": list(result.tokens),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }


def _run_record(runtime: Runtime, options: LoadOptions, params: GenerationParams) -> dict[str, Any]:
    """Return what all answers of a run share."""
    return {
        "target": options.target,
        "draft": options.draft,
        "device": str(runtime.device),
        "dtype": _DTYPE_NAMES[str(runtime.dtype).removeprefix("torch.")],
        "seed": params.sampling.seed,
        "emulated": runtime.emulated,
    }
