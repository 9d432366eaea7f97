"""The commands of `offload-runtime` and their options; each one hands over to its module as soon as they are read."""

from __future__ import annotations

from typing import Annotated

import typer

from offload_runtime.cli import options as opt
from offload_runtime.cli.options import count_or_chosen, with_option_groups
from offload_runtime.cli.terminal import OneLineGroup, collect_prompts, ending_in_order, user_path
from offload_runtime.config import GenerationParams, SamplingParams

app = typer.Typer(
    name="offload-runtime",
    cls=OneLineGroup,
    help="Run language models that do not fit the GPU, with exactly the tokens of plain decoding.",
    no_args_is_help=True,
    add_completion=False,
    # An unexpected exception is a defect to report: Python's own traceback, with nothing hidden or decorated.
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the installed command."""
    app(prog_name="offload-runtime")


def _print_version(wanted: bool) -> None:
    if wanted:
        from offload_runtime import __version__

        typer.echo(f"offload-runtime {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options that belong to no command."""


@app.command()
@with_option_groups
def generate(
    *,
    options: opt.AnswerOptions,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="What to continue or answer.")] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt-file",
            metavar="FILE",
            help="The same from a UTF-8 file; - is stdin. Repeated, the prompts are answered as one batch; the first "
            "draws the noise that it would draw alone, each other one its own.",
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt through the model's chat template.")] = False,
) -> None:
    """Answer one prompt as the text comes, or several at once: text on stdout, progress and figures on stderr."""
    from offload_runtime.cli.generate import run_generate

    files = prompt_file or []
    with ending_in_order():
        config, params = options.loading(max_batch=max(1, len(files))), options.params()
        run_generate(
            collect_prompts(prompt, files), config, params, as_chat=chat, as_json=options.as_json,
            explain=options.explain, show_progress=not options.no_progress,
        )  # fmt: skip


@app.command()
@with_option_groups
def chat(
    *,
    options: opt.ChatOptions,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told before the first turn.")
    ] = None,
) -> None:
    """Hold a conversation; through a pipe every line of stdin is one turn."""
    from offload_runtime.cli.chat import run_chat

    with ending_in_order():
        run_chat(
            options.loading(), options.params(), system=system, as_json=options.as_json, explain=options.explain,
            show_progress=not options.no_progress,
        )  # fmt: skip


@app.command()
@with_option_groups
def verify(
    *,
    options: opt.LoadOptions,
    prompts: Annotated[
        str | None, typer.Option("--prompts", metavar="FILE", help="More prompts, one a line of UTF-8; - is stdin.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of every generation compared.")] = 64,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Seeds of every test of fit: 256, or 64 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts, settings and seeds.")] = False,
    as_json: opt.JsonOption = False,
    no_progress: opt.NoProgressOption = False,
) -> None:
    """Prove on this machine that speculation changes nothing; exit code 1 when it does."""
    from offload_runtime.cli.verify import read_prompts, run_verify

    with ending_in_order():
        config, extra = options.config(), {} if prompts is None else read_prompts(prompts)
        run_verify(
            config, extra, tokens=tokens, seeds=seeds, quick=quick, as_json=as_json, show_progress=not no_progress
        )


@app.command()
@with_option_groups
def plan(
    *,
    options: opt.RunOptions,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts that are answered at once.")] = 1,
    gamma: opt.GammaOption = "auto",
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME|FILE",
            rich_help_panel="Machine",
            help="The machine to plan for, such as rtx4090; left out, your own saved profile.",
        ),
    ] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the plan as bars, such as plan.png or plan.svg.")
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Say before anything is loaded what a run would hold where, how fast it would be, or what would fit instead."""
    from offload_runtime.cli.plan import run_plan_command

    with ending_in_order():
        config, picture = options.config(gamma=gamma, max_batch=batch), None if plot is None else user_path(plot)
        run_plan_command(config, profile=profile, picture=picture, as_json=as_json)


@app.command()
def profile(
    *,
    save: Annotated[
        str | None,
        typer.Option("--save", metavar="NAME", help="Keep the profile under this name, in place of one that has it."),
    ] = None,
    device: Annotated[
        opt.Device, typer.Option("--device", help="cpu leaves the GPU out; auto measures it if there is one.")
    ] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="About ten seconds, rougher and without the disk.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Find how much memory can be pinned by pinning nearly all that is free.")
    ] = False,
    disk_file: Annotated[
        str | None,
        typer.Option("--disk-file", metavar="FILE", help="Read this to measure the disk, instead of a temporary file."),
    ] = None,
    as_json: opt.JsonOption = False,
    no_progress: opt.NoProgressOption = False,
) -> None:
    """Measure this machine in about a minute: link, memories, arithmetic, disk, and what holds it back."""
    from offload_runtime.cli.profile import run_profile

    with ending_in_order():
        run_profile(
            save=save, device=device, quick=quick, full=full, disk_file=disk_file, as_json=as_json,
            show_progress=not no_progress,
        )  # fmt: skip


@app.command()
def demo(
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Ask this instead of the text to rewrite.")
    ] = None,
    max_new_tokens: opt.MaxNewTokensOption = 96,
    temperature: opt.TemperatureOption = 0.0,
    seed: opt.SeedOption = 0,
    gamma: opt.GammaOption = "auto",
    device: opt.DeviceOption = "auto",
    dtype: opt.DtypeOption = "auto",
    no_progress: opt.NoProgressOption = False,
) -> None:
    """Stream a small real model layer by layer, without and with speculation, and compare. Fetches 98 MB once."""
    from offload_runtime.cli.demo import DEFAULT_PROMPT, run_demo

    with ending_in_order():
        params = GenerationParams(
            max_new_tokens=max_new_tokens, gamma=count_or_chosen("--gamma", gamma, least=1),
            sampling=SamplingParams(temperature, seed=seed),
        )  # fmt: skip
        run_demo(
            DEFAULT_PROMPT if prompt is None else prompt,
            params,
            device=device,
            dtype=dtype,
            show_progress=not no_progress,
        )
