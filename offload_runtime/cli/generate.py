"""`offload-runtime generate`: one prompt and its answer as it comes, or several answered at once; and `offload-runtime
demo`: what speculation buys, shown on a small real model that is streamed layer by layer.

Also what all commands that answer share: loading, one answer (`stream_answer`) that Ctrl-C stops between passes, and
what is said of it afterwards.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Column, Table

from offload_runtime.cli import interrupt, terminal
from offload_runtime.cli.hosts import end_with_others, has_layers_for_another
from offload_runtime.cli.options import AnswerOptions, DemoOptions, GenerateOptions, LoadOptions, refuse_early
from offload_runtime.cli.plan import print_explanation
from offload_runtime.config import SOURCES, RuntimeConfig
from offload_runtime.errors import BudgetError
from offload_runtime.options import require
from offload_runtime.sizes import counted, format_bytes, memory_name

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, GenerationStats, Runtime, TokenStream
    from offload_runtime.engine.request import Prompt, PromptRoom
    from offload_runtime.plan.sizes import RunPlan
    from offload_runtime.server.parsers import AnswerParser

    CheckPrompts = Callable[[PromptRoom], object]
    OnPrefill = Callable[[int, int], None]

_WORDS = {**SOURCES, "unigram": "n-grams", "copy": "copied"}  # of those who propose, and of windows


def generate(options: GenerateOptions) -> None:
    """Answer one prompt as the text comes, or several at once: text on stdout, progress and figures on stderr."""
    if has_layers_for_another(options):
        return
    params, config = options.params, replace(options.config, max_batch=max(1, len(options.prompt_file or ())))
    allowed = options.chat or not config.allow_special_tokens
    require(allowed, "--allow-special-tokens does nothing without --chat: a plain prompt always allows them")
    needed = "--template-option does nothing without --chat: add it, or drop this"
    require(options.chat or not options.template_options, needed)
    named = read_prompts(options.prompt, options.prompt_file or [])
    prompts: list[Prompt] = [[{"role": "user", "content": text}] if options.chat else text for _, text in named]
    refuse_early(config)
    is_batch = len(prompts) > 1

    def check(room: PromptRoom) -> object:
        options.check(room)
        if options.template_options:
            prompts[:] = [room.encode(prompt, options.for_template) for prompt in prompts]
        return room.fit_all(prompts, params.max_new_tokens)

    results: Sequence[GenerationResult]
    failure: BudgetError | None = None
    with load_runtime(options, config, check) as runtime:
        try:
            if is_batch:
                with _stoppable(options) as (stop, bars, on_prefill):
                    on_progress = partial(bars.update, "answers finished")
                    results = runtime.generate_batch(
                        prompts, params=params, on_prefill=on_prefill, on_progress=on_progress, should_stop=stop.is_set
                    )
            else:
                show = None if options.as_json else terminal.write_text
                results = [stream_answer(runtime.stream, prompts[0], options, show=show)]
        except BudgetError as error:
            if not error.answers:
                raise
            results, failure = error.answers, error  # shown as far as they had come, before the error
        about = run_record(runtime, options)
    answers = [(name, result) for (name, _), result in zip(named, results, strict=True)]
    if options.as_json:
        records = [{"name": name, **answer_record(result)} for name, result in answers]
        answered = {"results": records} if is_batch else answer_record(results[0])
        terminal.write_json({**answered, **about}, sys.stdout)
    elif is_batch:
        texts = [f"== {terminal.one_line(name)} ==\n{result.text}\n" for name, result in answers]
        terminal.write_text("".join(texts))
    for name, result in answers:
        line = answer_line(result, f"first token {result.stats.time_to_first_token_s:.2f} s", *prediction(result.stats))
        terminal.status_line(f"{name}: {line}" if is_batch else line)
        if options.explain:
            show_stats(result.stats, about["device"])
    if failure is not None:
        raise failure
    if any(result.finish_reason == "interrupted" for result in results):
        raise typer.Exit(terminal.INTERRUPTED_EXIT_CODE)


def read_prompts(prompt: str | None, files: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name and the text of `--prompt`, or of each `--prompt-file`: the file as the user wrote it (`-` is
    stdin). Raises `OptionError`."""
    given = "both" if files else "neither"
    fine = (prompt is None) != (not files)
    require(fine, f"{given} of --prompt and --prompt-file was given: give exactly one of them")
    if prompt is not None:
        return [("--prompt", prompt)]
    again = files.count("-")
    require(again <= 1, f"--prompt-file - was given {again} times: stdin can be read once")
    return [("stdin" if path == "-" else path, terminal.read_text(path, option="--prompt-file")) for path in files]


# --- what other commands share


@contextmanager
def load_runtime(
    options: LoadOptions, config: RuntimeConfig, check: CheckPrompts | None = None,
    check_plan: Callable[[RunPlan], None] = lambda plan: None, ends_with_ranks: bool = True,
) -> Iterator[Runtime]:  # fmt: skip
    """Load the target (and the draft) with a progress bar in bytes on stderr, and say there how long it took and what
    lives where; what `check` and `check_plan` refuse is refused before weights are read. With `--json` what libraries
    print meanwhile goes to stderr, too. Where several machines share the target and one of the others ends, so does
    this command, unless it says that it does not end with them: then it does where one was stopped."""
    from offload_runtime.engine import Runtime

    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)

    def on_plan(plan: RunPlan) -> None:
        check_plan(plan)
        if options.explain:
            print_explanation(plan)

    with terminal.only_json(options.as_json):
        with terminal.ProgressBars(enabled=not options.no_progress, in_bytes=True) as bars:
            runtime = Runtime.from_config(config, on_progress=bars.update, on_plan=on_plan, check=check)
        with runtime:
            end_with_others(runtime, if_lost=ends_with_ranks)
            terminal.status_line(runtime.load_report)
            terminal.status_line(runtime.placement)
            yield runtime
    if config.trace is not None:
        terminal.status_line(f"trace written to {config.trace}")


@contextmanager
def _stoppable(options: LoadOptions) -> Iterator[tuple[threading.Event, terminal.ProgressBars, OnPrefill]]:
    """Take Ctrl-C for a wish, so that an answer ends between two passes and the cache stays whole.

    A pass over a streamed target takes seconds; whoever presses Ctrl-C again does not want to wait for it, and gets
    the plain KeyboardInterrupt. So does who presses it while the prompt is worked on.

    Yields:
        What is set at the first Ctrl-C, bars of progress, and what shows the layers of a prefill in them.
    """
    stop = threading.Event()

    def interrupt_again(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            interrupt(number, frame)
        stop.set()

    def on_prefill(done_layers: int, layers: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        bars.update("prefill", done_layers, layers)

    with (
        terminal.signal_handler(interrupt_again, signal.SIGINT),
        terminal.ProgressBars(enabled=not options.no_progress) as bars,
    ):
        yield stop, bars, on_prefill


@dataclass(frozen=True)
class FoldedAnswer:
    """Takes an answer apart as it comes: what the model thinks aloud goes to `think`, what it says to `show`."""

    parser: AnswerParser
    show: Callable[[str], None]
    think: Callable[[str], None]

    def push(self, text: str, token: int | None = None) -> None:
        """Take the text that a token has added."""
        self._tell(*self.parser.push(text, token))

    def finish(self, rest: str) -> None:
        """Take the last text of an answer that has ended."""
        self.push(rest)
        self._tell(*self.parser.finish())

    def _tell(self, thought: str, said: str, _: Sequence[object]) -> None:
        if thought:
            self.think(thought)
        if said:
            self.show(said)


def stream_answer(
    start: Callable[..., TokenStream], prompt: Prompt, options: AnswerOptions | DemoOptions, *,
    show: Callable[[str], None] | None, fold: Callable[[TokenStream], FoldedAnswer] | None = None,
) -> GenerationResult:  # fmt: skip
    """Run one answer to its end or to Ctrl-C; each piece of text is shown as it comes, if at all, and a line's end
    after the last one. What is made by `fold` shows it in place of `show` but for that.

    `start` is `Runtime.stream` or `Conversation.say`. Returns the result; its finish reason is `interrupted` when
    Ctrl-C ended it. Before the first piece of text Ctrl-C raises KeyboardInterrupt instead and, as with every other
    exception, the stream is not settled: a conversation then stays as it was before the turn.

    Raises:
        BudgetError: Memory ran out; behind the first piece of text the answer so far comes with it, and stays in a
            conversation.
    """
    show = show or (lambda piece: None)
    shown_characters = 0
    failure: BudgetError | None = None
    try:
        with _stoppable(options) as (stop, bars, on_prefill):
            stream = start(prompt, params=options.params, on_prefill=on_prefill)
            folded = None if fold is None else fold(stream)
            try:
                for event in stream.tokens():
                    bars.close()
                    if folded is not None:
                        folded.push(event.text, event.token)
                    elif event.text:
                        show(event.text)
                    shown_characters += len(event.text)
                    if stop.is_set():
                        break
            except (KeyboardInterrupt, BudgetError) as error:
                if not shown_characters:
                    raise
                failure = error if isinstance(error, BudgetError) else None
            stream.close()
            # What was held back, as the possible beginning of a stop text, or came with the last piece is part of it.
            rest = stream.result.text[shown_characters:]
            if folded is not None:
                folded.finish(rest)
            else:
                show(rest)
    finally:
        # Whatever is printed next, be it an error, must not continue the answer's last line.
        if shown_characters:
            show("\n")
    if failure is not None:
        raise BudgetError(str(failure), [stream.result]) from failure
    return stream.result


# --- answers shown: their figures, what was reached beside its bound, and plain values for JSON


def answer_line(result: GenerationResult, *more: str) -> str:
    """Return in one line how fast it was, by whose proposals, how much of the link's peak was used, and what else there
    is to tell; an interrupted answer says so."""
    stats = result.stats
    sources = stats.accepted_by_source or {level.proposed_by: 1 for level in stats.acceptance if level.proposed}
    by = _in_words(max(sources, key=lambda source: sources[source])) if sources else "plain"
    figures = ["stopped"] if result.finish_reason == "interrupted" else []
    figures += [f"{stats.tok_per_s:.1f} tokens/s", f"{by} {stats.tokens_per_pass:.1f} tokens/pass"]
    if stats.link_gbps is not None and stats.link_peak_gbps:
        figures.append(f"link {100 * stats.link_gbps / stats.link_peak_gbps:.0f} %")
    if stats.expert_hit_rate is not None:
        figures.append(f"expert hits {100 * stats.expert_hit_rate:.0f} %")
    if stats.expert_cpu_gbps is not None:
        figures.append(f"{100 * stats.expert_cpu_share:.0f} % of misses on the CPU")
    return " · ".join([*figures, *more])


def prediction(stats: GenerationStats) -> list[str]:
    """Return what was predicted of a pass beside what was measured, where something was."""
    predicted_s, measured_s = stats.predicted_s_per_pass, stats.measured_s_per_pass
    if not predicted_s or not measured_s:
        return []
    off = 100 * (measured_s / predicted_s - 1)
    return [f"predicted {predicted_s:.3g} s a pass, measured {measured_s:.3g} ({off:+.1f} %)"]


def show_stats(stats: GenerationStats, device: str) -> None:
    """Print what else there is to tell of an answer: lengths, times, proposals, the link and memory, a line each."""

    lines = [
        f"prompt of {counted(stats.prompt_tokens, 'token')}, first token after {stats.time_to_first_token_s:.2f} s",
        f"answer of {counted(stats.new_tokens, 'token')} in {stats.passes} pass{'es' * (stats.passes != 1)}, "
        f"{stats.tokens_per_pass:.2f} tokens a pass",
    ]
    lists: dict[str, Sequence[object]] = {
        "accepted, as shares of what was proposed":
            [f"{level.rate:.2f} of {_in_words(level.proposed_by)}" for level in stats.acceptance if level.proposed],
        "accepted, by depth": stats.accepted_by_depth,
        "accepted, by who proposed": [f"{n} of {_in_words(name)}" for name, n in stats.accepted_by_source.items()],
        "passes by what was proposed": [f"{n} x {_in_words(name)}" for name, n in stats.windows.items()],
    }  # fmt: skip
    for name, items in lists.items():
        lines += [f"{name}: {', '.join(map(str, items[:8]))}{', ...' * (len(items) > 8)}"] if items else []
    if stats.link_gbps is not None:
        figures = [f"link {link_figure(stats)}", f"{format_bytes(stats.bytes_per_pass)} a pass"]
        if stats.link_idle_share is not None:
            figures.insert(1, f"idle {100 * stats.link_idle_share:.1f} %")
            figures.append(f"{stats.stall_s:.2f} s waited for")
        lines.append(", ".join(figures))
    if stats.expert_hit_rate is not None:
        figures = [f"expert hits {100 * stats.expert_hit_rate:.1f} %"]
        figures.append(f"{format_bytes(stats.expert_bytes_per_pass)} a pass over the link")
        if stats.expert_cpu_gbps is not None:
            share = f"{100 * stats.expert_cpu_share:.0f} % of misses on the CPU"
            figures.append(f"{share} at {stats.expert_cpu_gbps:.1f} GB/s")
        lines.append(", ".join(figures))
    if stats.hidden_draft_share is not None:
        lines.append(f"drafting hidden {100 * stats.hidden_draft_share:.1f} %")
    held = {memory_name(device.split(":")[0]): stats.peak_vram_bytes, "page-locked memory": stats.pinned_bytes,
            "pageable memory to stage from": stats.pageable_bytes}  # fmt: skip
    peak = ", ".join(f"{format_bytes(nbytes)} of {name}" for name, nbytes in held.items() if nbytes)
    for line in (*lines, *prediction(stats), f"peak of {peak}"):
        terminal.status_line(f"  {line}")


def _in_words(name: str) -> str:
    return " ".join(_WORDS.get(word, word) for word in name.split())


def link_figure(stats: GenerationStats) -> str:
    """Return the link's speed beside its measured peak, such as `54.1 of 55.5 GB/s (97 %)`."""
    if stats.link_gbps is None:
        return "nothing streamed"
    if not stats.link_peak_gbps:
        return f"{stats.link_gbps:.1f} GB/s"
    share = 100 * stats.link_gbps / stats.link_peak_gbps
    return f"{stats.link_gbps:.1f} of {stats.link_peak_gbps:.1f} GB/s ({share:.0f} %)"


def answer_record(result: GenerationResult) -> dict[str, Any]:
    """Return what `--json` prints of one answer: log-probabilities only where they were asked for."""
    record = {**vars(result), "stats": result.stats.to_dict()}
    del record["logprobs"], record["prompt_logprobs"]
    return record if result.logprobs is None else {**record, "logprobs": [vars(one) for one in result.logprobs]}


def run_record(runtime: Runtime, options: AnswerOptions) -> dict[str, Any]:
    """Return what `--json` prints of the run, which all its answers share."""
    from offload_runtime.plan.sizes import DTYPE_NAMES

    dtype = DTYPE_NAMES[runtime.dtype]
    asked = {"target": options.config.target, "draft": options.config.draft, "seed": options.params.sampling.seed}
    return {**asked, "device": str(runtime.device), "dtype": dtype}


# The n-gram draft copies from the text so far, so the question must have an answer with something to copy.
DEFAULT_PROMPT = (
    "Correct the spelling mistakes in this text and leave everything else as it is:\n\n"
    "Anna lived in a small house by the sea. Every morning Anna walked along the beach and collected shells. "
    "Every evenning Anna sat by the window and watched the ships come home. When the ships were late, Anna lit a "
    "lamp and put it in the window."
)
_WARM_UP_TOKENS = 4


def demo(options: DemoOptions) -> None:
    """Stream a small real model layer by layer, without and with speculation, and compare. Fetches 98 MB once."""
    from offload_runtime.engine import fetch_demo_model

    messages = [{"role": "user", "content": DEFAULT_PROMPT if options.prompt is None else options.prompt}]
    target = fetch_demo_model(on_progress=terminal.status_line, show_download=not options.no_progress)
    results: dict[str, GenerationResult] = {}
    with load_runtime(options, replace(options.config, target=str(target))) as runtime:
        terminal.write_text(f"{machine_line(runtime.device.type)}\n")
        modes = {"plain": partial(runtime.stream, speculate=False), "speculative": partial(runtime.stream)}
        # A few tokens both ways, so that neither run below pays for compiling and first touches.
        terminal.status_line("warming up")
        few = replace(options.params, max_new_tokens=min(_WARM_UP_TOKENS, options.params.max_new_tokens))
        short = replace(options, params=few, no_progress=True)
        for start in modes.values():
            _finished(stream_answer(start, messages, short, show=None))
        for name, start in modes.items():
            terminal.write_text(f"\n── {name} ──\n")
            results[name] = _finished(stream_answer(start, messages, options, show=terminal.write_text))
    terminal.print_tables([comparison_table(results, memory_name(runtime.device.type))], sys.stdout)
    identical = results["plain"].tokens == results["speculative"].tokens
    terminal.write_text(f"identical tokens: {'yes' if identical else 'no'}\n")
    if not identical:
        raise typer.Exit(1)


def _finished(result: GenerationResult) -> GenerationResult:
    """Leave at once when Ctrl-C stopped an answer, because half of one compares with nothing."""
    if result.finish_reason == "interrupted":
        raise typer.Exit(terminal.INTERRUPTED_EXIT_CODE)
    return result


def machine_line(device_type: str) -> str:
    """Return the device and the versions that the figures below it belong to."""
    import torch

    from offload_runtime.hardware.bench import read_host_info

    on_cpu = f"{read_host_info().cpu_name}, {os.cpu_count()} threads"
    name = torch.cuda.get_device_name() if device_type == "cuda" else on_cpu
    return f"{name} · torch {torch.__version__} · Python {platform.python_version()}"


def comparison_table(results: Mapping[str, GenerationResult], memory: str) -> Table:
    """Return the figures with one column per run."""
    table = Table("", *(Column(name, justify="right") for name in results))
    stats = [result.stats for result in results.values()]
    table.add_row("tokens/s", *(f"{s.tok_per_s:.2f}" for s in stats))
    table.add_row("tokens per pass", *(f"{s.tokens_per_pass:.2f}" for s in stats))
    table.add_row("bytes per pass", *(format_bytes(s.bytes_per_pass) for s in stats))
    table.add_row("link", *(link_figure(s) for s in stats))
    table.add_row(f"peak {memory}", *(format_bytes(s.peak_vram_bytes) for s in stats))
    table.add_row("time to first token", *(f"{s.time_to_first_token_s:.2f} s" for s in stats))
    return table
