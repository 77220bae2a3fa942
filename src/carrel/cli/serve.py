"""`carrel serve`: task sessions over HTTP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from carrel import server
from carrel.cli.exit_codes import WrongUsage, async_command
from carrel.cli.output import flush, print_text
from carrel.execution.config import MODES


@async_command
async def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes one that is free.", min=0, max=65535)] = 8765,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keys, sessions and logs. Default: $CARREL_HOME/server.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Another folder with the keys. Default: the one of --data.")
    ] = None,
    datasets: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: $CARREL_HOME/datasets, and the demo.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: $CARREL_HOME/cache.")] = None,
    max_sessions: Annotated[int, typer.Option(help="Sessions alive at one time.", min=1)] = 200,
    warm: Annotated[int, typer.Option(help="Places kept open for samples asked for again and again.", min=0)] = 4,
    keep: Annotated[
        float | None,
        typer.Option(metavar="DAYS", help="Forget what ended so many days ago. Default: nothing is forgotten.", min=0),
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(metavar="MODE", help="required, auto or off. Default: $CARREL_SANDBOX, or required.")
    ] = None,
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Let sessions of no sample ask for this machine's network.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it listens as JSON.")] = False,
) -> None:
    """Serve task sessions over HTTP until Ctrl-C."""
    wanted = sandbox or os.environ.get("CARREL_SANDBOX") or "required"
    mode = next((known for known in MODES if known == wanted), None)
    if mode is None:
        raise WrongUsage(f"--sandbox is {wanted!r}; it can be {', '.join(MODES)}")
    rules = server.Rules(max_sessions=max_sessions, sandbox=mode, network=allow_network, warm=warm, keep_days=keep)
    settings = server.ServerSettings(
        host=host, port=port, data=data, keys=keys, datasets=datasets, cache=cache, rules=rules
    )

    def listening(url: str, key: str | None) -> None:
        if as_json:
            # On one line: who started it reads that line, and no more.
            typer.echo(json.dumps({"url": url, "key": key}))
        else:
            print_text(f"Listening on {url}, sandbox: {mode}")
            if key is not None:
                print_text(f"There was no key, so here is one, this once: {key}")
            print_text("Ctrl-C ends it, with all its sessions.", "dim")
        flush()

    await server.serve_http(settings, listening)
