"""The commands: parse, call, print."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise import __version__
from shardwise.errors import ShardwiseError

app = typer.Typer(
    name="shardwise",
    help="Split any PyTorch module over the devices at hand, with the numbers of one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

VERIFY = Path(__file__).with_name("verify_ranks.py")
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def main() -> None:
    """Run a command; an error of ours is one paragraph, not a traceback."""
    try:
        app(standalone_mode=True)
    except ShardwiseError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)


@app.command(context_settings=CONTEXT)
def train(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A script that calls shardwise.parallelize.")],
    devices: Annotated[
        int | None, typer.Option(help="Processes, one per device. Default: all CUDA devices, else the physical cores.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/<name of the script>.")] = None,
    plan: Annotated[str, typer.Option(help="A plan file, instead of what the script asks for.")] = "",
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0 saves none.")] = 100,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start at step 0, whatever the run folder holds.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files to the run folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per step.")] = False,
) -> None:
    """Start SCRIPT on every device of this machine; what follows `--` goes to the script.

    Running the same command again resumes from the last checkpoint of the run folder.

        shardwise train train.py --devices 2 -- --epochs 3
    """
    from shardwise.launch import describe, start_script
    from shardwise.session.options import Options, default_run

    options = Options(
        run=(run or default_run(str(script))).absolute(),
        plan=str(Path(plan).absolute()) if plan else "",
        save_every=save_every,
        fresh=fresh,
        tensorboard=tensorboard,
        output="json" if as_json else "progress",
    )
    environment = {**os.environ, **options.to_environment()}
    outcome = start_script(script, context.args, run_folder=options.run, devices=devices, environment=environment)
    text = describe(outcome)
    if text:
        typer.echo(text, err=True)
    raise typer.Exit(outcome.exit_code)


@app.command()
def plan(
    target: Annotated[str, typer.Argument(help="FILE:FUNCTION; FUNCTION() returns the Job.")],
    cluster: Annotated[str, typer.Option(help='Machines, such as "16x 8x h100-80gb". Default: this one.')] = "",
    pipeline: Annotated[int | None, typer.Option(help="Ranks of the pipeline.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Copies of the model, each with its share of the batch.")] = None,
    shards: Annotated[int | None, typer.Option(help="Ranks that hold one copy of the parameters together.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches of each data rank.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Work out how to split a job over machines, which need not be there.

    FILE also has `example()`, a batch of at least two samples.

        shardwise plan train.py:make_job --cluster "2x 8x a100-80gb"
    """
    from rich.console import Console

    from shardwise.cli.target import load_target
    from shardwise.plan import make_plan, report
    from shardwise.plan import save as save_plan

    job, example = load_target(target)
    made = make_plan(
        job, cluster or None, example, pipeline=pipeline, replicas=replicas, shards=shards, micro_batches=micro_batches
    )
    if save is not None:
        save_plan(made, save)
    if as_json:
        typer.echo(json.dumps(_plain(made), indent=2))
    else:
        Console().print(report(made))


def _plain(plan: Any) -> Any:
    from dataclasses import asdict

    return asdict(plan)


@app.command()
def verify(
    target: Annotated[str, typer.Argument(help="FILE:FUNCTION; FUNCTION() returns the Job.")],
    devices: Annotated[int | None, typer.Option(help="Processes, one per device.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Ranks of the pipeline.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Copies of the model.")] = None,
    shards: Annotated[int | None, typer.Option(help="Ranks that hold one copy of the parameters together.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches of each data rank.")] = None,
    plan: Annotated[str, typer.Option(help="A plan file, instead of the options above.")] = "",
) -> None:
    """Compare the loss and every gradient of a plan with one process in plain PyTorch, on your own model.

    The batch is what `example()` of FILE returns, at least as many samples as there are micro-batches.

        shardwise verify train.py:make_job --devices 2 --pipeline 2
    """
    from shardwise.launch import describe, start_script
    from shardwise.session.options import default_run

    asked = {"pipeline": pipeline, "replicas": replicas, "shards": shards, "micro_batches": micro_batches}
    arguments = [target, plan, json.dumps({name: value for name, value in asked.items() if value is not None})]
    run = default_run(f"verify-{Path(target.rpartition(':')[0]).stem}").absolute()
    outcome = start_script(VERIFY, arguments, run_folder=run, devices=devices)
    text = describe(outcome)
    if text:
        typer.echo(text, err=True)
    raise typer.Exit(outcome.exit_code)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
