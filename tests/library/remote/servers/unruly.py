"""An MCP server in plain Python that misbehaves: `unruly.py BEHAVIOUR`; quick to start."""

import json
import os
import signal
import subprocess
import sys
import time

behaviour = sys.argv[1]
TOOLS = [
    {
        "name": "echo",
        "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
    {"name": "do", "inputSchema": {"type": "object", "properties": {"what": {"type": "string"}}}},
    {"name": "odd-names", "inputSchema": {"properties": {"user-id": {}, "from": {}}, "required": ["user-id"]}},
    {"name": "odd_names", "inputSchema": {"type": "object"}},
]


def say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(content: str) -> dict[str, object]:
    return {"content": [{"type": "text", "text": content}]}


def say_raw(request: object, result: str) -> None:
    sys.stdout.write(f'{{"jsonrpc": "2.0", "result": {result}, "id": {json.dumps(request)}}}\n')
    sys.stdout.flush()


ODD_RESULTS = {
    "null": "null",
    "deep": f'{{"content": [], "structuredContent": {{"a": {"[" * 300 + "]" * 300}}}}}',
    "deeper": f'{{"content": [], "structuredContent": {{"a": {"[" * 90_000 + "]" * 90_000}}}}}',
}


def do(what: str, request: object) -> dict[str, object] | None:
    """The result of `do`, or None for none at all."""
    if what == "hang":  # and read nothing any more
        time.sleep(3600)
    if what == "work":
        time.sleep(3)
    if what == "ignore":
        return None
    if what == "spawn":
        child = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        return text(str(child.pid))
    if what in ("leave", "daemon"):
        leaving = ["setsid", "sleep", "3600"] if what == "leave" else ["sh", "-c", "setsid sleep 3600 & echo $!"]
        child = subprocess.Popen(leaving, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert child.stdout
        return text(str(child.pid) if what == "leave" else child.stdout.readline().decode())
    if what == "flood":
        while True:
            say({"method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}})
    if what == "babble":
        while True:
            sys.stdout.write("y\n")
    if what == "endless":
        while True:
            sys.stdout.write("x" * 65536)
    if what in ODD_RESULTS:
        say_raw(request, ODD_RESULTS[what])
        return None
    if what == "nonsense":
        return {"content": "this is no list"}
    if what == "exit":
        print("out of ideas", file=sys.stderr, flush=True)
        os._exit(3)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "big":
        return text("x" * 5_000_000)
    if what == "secret":
        return {"isError": True} | text(f"bad token {os.environ['TOKEN']}")
    return text(f"pid {os.getpid()}")


if behaviour == "silent":
    time.sleep(3600)
if behaviour == "dies":
    print("cannot start: no licence", file=sys.stderr)
    sys.exit(7)
if behaviour == "babbles":
    while True:
        sys.stdout.write("Welcome to my server!\n")
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour == "banner":
    print("Welcome to my server!", flush=True)

for line in sys.stdin:
    message = json.loads(line)
    method, params = message.get("method"), message.get("params", {})
    if "id" not in message:
        continue
    if method == "initialize":
        result = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "unruly", "version": "1"},
        }
    elif method == "tools/list" and behaviour == "endless-list":
        result = {"tools": [], "nextCursor": "more"}
    elif method == "tools/list" and behaviour == "deep-list":
        schema = '{"items": ' * 400 + "{}" + "}" * 400
        tools = f'{{"tools": [{{"name": "a", "inputSchema": {schema}}}]}}'
        say_raw(message["id"], tools)
        continue
    elif method == "tools/list" and behaviour == "telltale":
        tale = {"type": "string", "description": f"a tale of {os.environ['TOKEN']}", "default": os.environ["TOKEN"]}
        output_schema = {"type": "object", "properties": {"tale": tale}, "required": ["tale"]}
        padded = f"Tell a tale {'~' * 135} {os.environ['TOKEN']}"
        tool = {"name": "tell", "description": padded, "inputSchema": output_schema, "outputSchema": output_schema}
        result = {"tools": [tool]}
    elif method == "tools/list":
        result = {"tools": TOOLS}
    elif method == "tools/call" and params["name"] == "do":
        result = do(params["arguments"].get("what", ""), message["id"])  # type: ignore[assignment]
    elif method == "tools/call":
        result = text(json.dumps(params["arguments"]))
    else:
        say({"id": message["id"], "error": {"code": -32601, "message": "Method not found"}})
        continue
    if result is not None:
        say({"id": message["id"], "result": result})

if behaviour == "stubborn":
    time.sleep(3600)
