"""FakeNodeProcess: stands for `pd-node` where only its being a process matters. Listens where it was told, answers
HTTP, says what it does, ends on SIGTERM. FAKE_NODE=<name>:<mode> makes one `die` at start,
be `slow` (it ends at the second signal) or `stubborn` (at none).

Run with `cluster`, it is `pd up` over such nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading

asked: list[str] = []  # one for each signal
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def main() -> None:
    options = {key: value for key, value in zip(sys.argv[1:], sys.argv[2:], strict=False) if key.startswith("--")}
    name = options["--name"]
    who, _, mode = os.environ.get("FAKE_NODE", "").partition(":")
    if who == name and mode == "die":
        sys.exit("--model: there is no such model")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop(name, mode if who == name else ""))
    open_port(int(options["--listen"].rpartition(":")[2]))
    if options["--http-port"] != "0":
        open_port(int(options["--http-port"]))
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)  # ends with us
    print(f"{name} is here, [bold]joining[/bold] {options.get('--join', 'nobody')}", flush=True)
    while True:
        signal.pause()


def stop(name: str, mode: str) -> None:
    asked.append(name)
    print(f"{name} drains" if len(asked) == 1 else f"{name} tells its clients", flush=True)
    if not mode or (mode == "slow" and len(asked) == 2):
        os._exit(0)


def open_port(port: int) -> None:
    server = socket.create_server(("127.0.0.1", port))

    def answer() -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(ANSWER)

    threading.Thread(target=answer, daemon=True).start()


def cluster() -> int:
    from rich.console import Console

    from pdbus.nodes import up
    from pdbus.nodes.cluster import Cluster, http_ok
    from pdbus.nodes.node_process import NodeProcess

    async def ready(node: NodeProcess) -> bool:
        return not node.http or await http_ok(f"{node.http}/health/ready")

    up.KILL_AFTER_S = 1.0  # our nodes have no processes to end
    console = Console(stderr=True, highlight=False)
    nodes = Cluster(
        command=(sys.executable, __file__), ready=ready, on_line=lambda node, line: up.print_line(console, node, line)
    )
    return asyncio.run(up.serve(nodes, console))


if __name__ == "__main__":
    if sys.argv[1:] == ["cluster"]:
        sys.exit(cluster())
    main()
