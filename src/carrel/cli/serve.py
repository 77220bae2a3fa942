"""`carrel serve`: task sessions over HTTP."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from carrel import server
from carrel.cli.exit_codes import WrongUsage, async_command
from carrel.cli.options import duration, store_of
from carrel.cli.output import flush, print_text
from carrel.execution.config import MODES


@async_command
async def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 chooses a free one.", min=0, max=65535)] = 8765,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL|DIR", help="Where keys, sessions and logs are kept. Default: the folder $CARREL_HOME/server."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="The same as --store DIR.")] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="URL|DIR", help="Another store that has the keys. Default: --store.")
    ] = None,
    datasets: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: $CARREL_HOME/datasets, and the demo.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: $CARREL_HOME/cache.")] = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Tool files for sessions without a sample. Default: no tools.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Maximum number of live sessions.", min=1)] = 200,
    prewarmed: Annotated[
        int,
        typer.Option(help="Executors started in advance for samples requested repeatedly.", min=0),
    ] = 4,
    retention: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="Delete records of sessions that ended so long ago, as in 30d. Default: never."
        ),
    ] = None,
    keep: Annotated[float | None, typer.Option(metavar="DAYS", hidden=True, min=0)] = None,
    sandbox: Annotated[
        str | None, typer.Option(metavar="MODE", help="required, auto or off. Default: $CARREL_SANDBOX, or required.")
    ] = None,
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Let sessions without a sample use this machine's network.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the URL and a new key as JSON.")] = False,
) -> None:
    """Serve task sessions over HTTP until Ctrl-C."""
    wanted = sandbox or os.environ.get("CARREL_SANDBOX") or "required"
    mode = next((known for known in MODES if known == wanted), None)
    if mode is None:
        raise WrongUsage(f"--sandbox is {wanted!r}; it can be {', '.join(MODES)}")
    age = timedelta(days=keep) if keep is not None else None
    settings = server.ServerSettings(
        host=host,
        port=port,
        store=store_of(store, data),
        keys=keys,
        datasets=datasets,
        cache=cache,
        tools=tools,
        sandbox=mode,
        network=allow_network,
        max_sessions=max_sessions,
        prewarmed=prewarmed,
        retention=duration(retention) if retention is not None else age,
    )

    def listening(url: str, key: str | None) -> None:
        if as_json:
            # One line, which the program that started the server reads.
            typer.echo(json.dumps({"url": url, "key": key}))
        else:
            print_text(f"Listening on {url}, sandbox: {mode}")
            if key is not None:
                print_text(f"There was no key, so here is a new one; it is not shown again: {key}")
            print_text("Ctrl-C ends the server and all its sessions.", "dim")
        flush()

    await server.serve_http(settings, listening)
