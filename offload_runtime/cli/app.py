"""The commands of `offload-runtime` and their options; each one hands over to its module as soon as they are read."""

from __future__ import annotations

from typing import Annotated

import typer

from offload_runtime.cli import options as opt
from offload_runtime.cli.settings import generation_params, load_options, speculation_options
from offload_runtime.cli.terminal import ending_in_order
from offload_runtime.cli.usage import OneLineGroup
from offload_runtime.cli.user_text import collect_prompts, user_path

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
def generate(
    *,
    target: opt.TargetOption,
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
    draft: opt.DraftOption = "ngram",
    context: opt.ContextOption = "auto",
    kv: opt.KVOption = opt.KVPlace.auto,
    speculation: opt.SpeculationOption = opt.SpeculationMode.auto,
    draft_cache: opt.DraftCacheOption = opt.DraftCache.auto,
    sink_tokens: opt.SinkTokensOption = None,
    recent_tokens: opt.RecentTokensOption = None,
    chunk_size: opt.ChunkSizeOption = None,
    budget_tokens: opt.BudgetTokensOption = None,
    policy: opt.PolicyOption = None,
    refresh_steps: opt.RefreshStepsOption = None,
    gamma_draft: opt.GammaDraftOption = None,
    tree_nodes: opt.TreeNodesOption = "auto",
    max_new_tokens: opt.MaxNewTokensOption = 256,
    temperature: opt.TemperatureOption = 0.0,
    top_k: opt.TopKOption = 0,
    top_p: opt.TopPOption = 1.0,
    min_p: opt.MinPOption = 0.0,
    seed: opt.SeedOption = 0,
    gamma: opt.GammaOption = "auto",
    stop: opt.StopOption = None,
    ignore_eos: opt.IgnoreEosOption = False,
    device: opt.DeviceOption = opt.Device.auto,
    dtype: opt.DtypeOption = opt.Dtype.auto,
    vram: opt.VramOption = None,
    ram: opt.RamOption = None,
    pinned: opt.PinnedOption = None,
    resident_layers: opt.ResidentLayersOption = "auto",
    emulate: opt.EmulateOption = None,
    profile: opt.FiguresOption = None,
    explain: opt.ExplainOption = False,
    trace: opt.TraceOption = None,
    as_json: opt.JsonOption = False,
    no_progress: opt.NoProgressOption = False,
) -> None:
    """Answer one prompt as the text comes, or several at once: text on stdout, progress and figures on stderr."""
    from offload_runtime.cli.generate import run_batch, run_generate

    files = prompt_file or []
    with ending_in_order():
        proposing = speculation_options(
            draft=draft, mode=speculation, draft_cache=draft_cache, sink_tokens=sink_tokens,
            recent_tokens=recent_tokens, chunk_size=chunk_size, budget_tokens=budget_tokens, policy=policy,
            refresh_steps=refresh_steps, gamma_draft=gamma_draft,
        )  # fmt: skip
        params = generation_params(
            max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
            top_p=top_p, min_p=min_p, seed=seed, gamma=gamma, stop=stop, ignore_eos=ignore_eos,
        )  # fmt: skip
        load = load_options(
            target=target, draft=draft, device=device, dtype=dtype, vram=vram, ram=ram, pinned=pinned,
            resident_layers=resident_layers, context=context, kv=kv, gamma=gamma, speculation=proposing,
            max_batch=max(1, len(files)), emulate=emulate, profile=profile, tree_nodes=tree_nodes,
            trace=trace,
        )  # fmt: skip
        prompts = collect_prompts(prompt, files)
        run = run_generate if len(prompts) == 1 else run_batch
        run(prompts, load, params, as_chat=chat, as_json=as_json, explain=explain, show_progress=not no_progress)


@app.command()
def chat(
    *,
    target: opt.TargetOption,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told before the first turn.")
    ] = None,
    draft: opt.DraftOption = "ngram",
    context: opt.ContextOption = "auto",
    kv: opt.KVOption = opt.KVPlace.auto,
    speculation: opt.SpeculationOption = opt.SpeculationMode.auto,
    draft_cache: opt.DraftCacheOption = opt.DraftCache.auto,
    sink_tokens: opt.SinkTokensOption = None,
    recent_tokens: opt.RecentTokensOption = None,
    chunk_size: opt.ChunkSizeOption = None,
    budget_tokens: opt.BudgetTokensOption = None,
    policy: opt.PolicyOption = None,
    refresh_steps: opt.RefreshStepsOption = None,
    gamma_draft: opt.GammaDraftOption = None,
    tree_nodes: opt.TreeNodesOption = "auto",
    max_new_tokens: opt.MaxNewTokensOption = 1024,
    temperature: opt.TemperatureOption = 0.7,
    top_k: opt.TopKOption = 0,
    top_p: opt.TopPOption = 1.0,
    min_p: opt.MinPOption = 0.0,
    seed: opt.SeedOption = 0,
    gamma: opt.GammaOption = "auto",
    stop: opt.StopOption = None,
    ignore_eos: opt.IgnoreEosOption = False,
    device: opt.DeviceOption = opt.Device.auto,
    dtype: opt.DtypeOption = opt.Dtype.auto,
    vram: opt.VramOption = None,
    ram: opt.RamOption = None,
    pinned: opt.PinnedOption = None,
    resident_layers: opt.ResidentLayersOption = "auto",
    emulate: opt.EmulateOption = None,
    profile: opt.FiguresOption = None,
    explain: opt.ExplainOption = False,
    trace: opt.TraceOption = None,
    as_json: opt.JsonOption = False,
    no_progress: opt.NoProgressOption = False,
) -> None:
    """Hold a conversation; through a pipe every line of stdin is one turn."""
    from offload_runtime.cli.chat import run_chat

    with ending_in_order():
        proposing = speculation_options(
            draft=draft, mode=speculation, draft_cache=draft_cache, sink_tokens=sink_tokens,
            recent_tokens=recent_tokens, chunk_size=chunk_size, budget_tokens=budget_tokens, policy=policy,
            refresh_steps=refresh_steps, gamma_draft=gamma_draft,
        )  # fmt: skip
        params = generation_params(
            max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
            top_p=top_p, min_p=min_p, seed=seed, gamma=gamma, stop=stop, ignore_eos=ignore_eos,
        )  # fmt: skip
        load = load_options(
            target=target, draft=draft, device=device, dtype=dtype, vram=vram, ram=ram, pinned=pinned,
            resident_layers=resident_layers,
            context=context, kv=kv, gamma=gamma, speculation=proposing, emulate=emulate, profile=profile,
            tree_nodes=tree_nodes, trace=trace,
        )  # fmt: skip
        run_chat(load, params, system=system, as_json=as_json, explain=explain, show_progress=not no_progress)


@app.command()
def verify(
    *,
    target: opt.TargetOption,
    draft: opt.DraftOption = "ngram",
    context: opt.ContextOption = "auto",
    kv: opt.KVOption = opt.KVPlace.auto,
    speculation: opt.SpeculationOption = opt.SpeculationMode.auto,
    draft_cache: opt.DraftCacheOption = opt.DraftCache.auto,
    sink_tokens: opt.SinkTokensOption = None,
    recent_tokens: opt.RecentTokensOption = None,
    chunk_size: opt.ChunkSizeOption = None,
    budget_tokens: opt.BudgetTokensOption = None,
    policy: opt.PolicyOption = None,
    refresh_steps: opt.RefreshStepsOption = None,
    gamma_draft: opt.GammaDraftOption = None,
    tree_nodes: opt.TreeNodesOption = "auto",
    prompts: Annotated[
        str | None, typer.Option("--prompts", metavar="FILE", help="More prompts, one a line of UTF-8; - is stdin.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of every generation compared.")] = 64,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Seeds of every test of fit: 256, or 64 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts, settings and seeds.")] = False,
    device: opt.DeviceOption = opt.Device.auto,
    dtype: opt.DtypeOption = opt.Dtype.auto,
    vram: opt.VramOption = None,
    ram: opt.RamOption = None,
    pinned: opt.PinnedOption = None,
    resident_layers: opt.ResidentLayersOption = "auto",
    emulate: opt.EmulateOption = None,
    as_json: opt.JsonOption = False,
    no_progress: opt.NoProgressOption = False,
) -> None:
    """Prove on this machine that speculation changes nothing; exit code 1 when it does."""
    from offload_runtime.cli.verify import read_prompts, run_verify

    with ending_in_order():
        proposing = speculation_options(
            draft=draft, mode=speculation, draft_cache=draft_cache, sink_tokens=sink_tokens,
            recent_tokens=recent_tokens, chunk_size=chunk_size, budget_tokens=budget_tokens, policy=policy,
            refresh_steps=refresh_steps, gamma_draft=gamma_draft,
        )  # fmt: skip
        load = load_options(
            target=target, draft=draft, device=device, dtype=dtype, vram=vram, ram=ram, pinned=pinned,
            resident_layers=resident_layers,
            context=context, kv=kv, gamma="auto", speculation=proposing, emulate=emulate,
            tree_nodes=tree_nodes,
        )  # fmt: skip
        extra = {} if prompts is None else read_prompts(prompts)
        run_verify(load, extra, tokens=tokens, seeds=seeds, quick=quick, as_json=as_json, show_progress=not no_progress)


@app.command()
def plan(
    *,
    target: opt.TargetOption,
    draft: opt.DraftOption = "ngram",
    context: opt.ContextOption = "auto",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts that are answered at once.")] = 1,
    kv: opt.KVOption = opt.KVPlace.auto,
    speculation: opt.SpeculationOption = opt.SpeculationMode.auto,
    draft_cache: opt.DraftCacheOption = opt.DraftCache.auto,
    sink_tokens: opt.SinkTokensOption = None,
    recent_tokens: opt.RecentTokensOption = None,
    chunk_size: opt.ChunkSizeOption = None,
    budget_tokens: opt.BudgetTokensOption = None,
    policy: opt.PolicyOption = None,
    refresh_steps: opt.RefreshStepsOption = None,
    gamma_draft: opt.GammaDraftOption = None,
    tree_nodes: opt.TreeNodesOption = "auto",
    gamma: opt.GammaOption = "auto",
    profile: opt.ProfileOption = None,
    dtype: opt.DtypeOption = opt.Dtype.auto,
    vram: opt.VramOption = None,
    ram: opt.RamOption = None,
    pinned: opt.PinnedOption = None,
    resident_layers: opt.ResidentLayersOption = "auto",
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the plan as bars, such as plan.png or plan.svg.")
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Say before anything is loaded what a run would hold where, how fast it would be, or what would fit instead."""
    from offload_runtime.cli.plan import run_plan_command

    with ending_in_order():
        proposing = speculation_options(
            draft=draft, mode=speculation, draft_cache=draft_cache, sink_tokens=sink_tokens,
            recent_tokens=recent_tokens, chunk_size=chunk_size, budget_tokens=budget_tokens, policy=policy,
            refresh_steps=refresh_steps, gamma_draft=gamma_draft,
        )  # fmt: skip
        load = load_options(
            target=target, draft=draft, device=opt.Device.cuda, dtype=dtype, vram=vram, ram=ram, pinned=pinned,
            resident_layers=resident_layers, context=context, kv=kv, gamma=gamma, speculation=proposing,
            max_batch=batch, tree_nodes=tree_nodes,
        )  # fmt: skip
        run_plan_command(
            load, profile=profile,
            picture=None if plot is None else user_path(plot), as_json=as_json,
        )  # fmt: skip


@app.command()
def profile(
    *,
    save: Annotated[
        str | None,
        typer.Option("--save", metavar="NAME", help="Keep the profile under this name, in place of one that has it."),
    ] = None,
    device: Annotated[
        opt.Device, typer.Option("--device", help="cpu leaves the GPU out; auto measures it if there is one.")
    ] = opt.Device.auto,
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
            save=save, device=device.value, quick=quick, full=full, disk_file=disk_file, as_json=as_json,
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
    device: opt.DeviceOption = opt.Device.auto,
    dtype: opt.DtypeOption = opt.Dtype.auto,
    no_progress: opt.NoProgressOption = False,
) -> None:
    """Stream a small real model layer by layer, without and with speculation, and compare. Fetches 98 MB once."""
    from offload_runtime.cli.demo import DEFAULT_PROMPT, run_demo

    with ending_in_order():
        params = generation_params(
            max_new_tokens=max_new_tokens, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0,
            seed=seed, gamma=gamma, stop=None, ignore_eos=False,
        )  # fmt: skip
        run_demo(
            DEFAULT_PROMPT if prompt is None else prompt,
            params,
            device=device.value,
            dtype=dtype.value,
            show_progress=not no_progress,
        )
