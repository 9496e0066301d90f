"""The conversation between the network benchmark and the ranks on its hosts.

Ranks live in other network namespaces, which a Unix socket in a folder crosses. Rank 0 holds the
connection and passes every request on to the other ranks, so that all of them do the same.

A request is one line of JSON, and so is the answer:

    {"do": "prepare", "variants": [...]}            -> {"parameters": n}
    {"do": "links", "mib": m}                       -> {"links": [...]}
    {"do": "decide", "gbps": g}                     -> {precision: row, ...}
    {"do": "steps", "steps": n, "warm_up": w}       -> {variant: [[sample, ...], ...]}
    {"do": "end"}                                   -> {}

This module is also what the ranks run: ``python -m benchmarks.network.remote SOCKET SETTINGS``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import qsdp
from benchmarks.network.auto import precision_of, row
from benchmarks.network.hosts import sent_bytes
from qsdp.agreement import all_gather_json
from qsdp.bench.link import measure_links
from qsdp.bench.steps import Contender, bench_config, measure, prepare
from qsdp.plan.variant import parse_variant
from qsdp.trainer.model import num_parameters
from qsdp.trainer.ranks import Ranks, process_group

CONNECT_TIMEOUT_S = 120.0
POLL_S = 0.5


class Control:
    """The benchmark's side. ``alive`` raises where ranks have ended; it is asked while waiting."""

    def __init__(self, path: str, alive: Callable[[], None]) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen(1)
        self._server.settimeout(POLL_S)
        self._alive = alive
        self._connection: socket.socket | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            RuntimeError: the ranks answered with an error, or ``alive`` says that they ended.
        """
        if self._connection is None:
            self._connection = self._patiently(lambda: self._server.accept()[0])
            self._connection.settimeout(POLL_S)
        connection = self._connection
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._patiently(lambda: connection.recv(1 << 16))
            if not part:
                self._alive()
                raise RuntimeError("rank 0 closed its connection")
            answer += part
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def close(self) -> None:
        for endpoint in (self._connection, self._server):
            if endpoint is not None:
                endpoint.close()

    def _patiently(self, attempt: Callable[[], Any]) -> Any:
        while True:
            with contextlib.suppress(TimeoutError):
                return attempt()
            self._alive()


def main(argv: list[str]) -> int:
    """One rank: do what the benchmark asks until it says that this is the end."""
    path, settings = argv[0], json.loads(argv[1])
    with process_group("cpu", settings["timeout_s"]) as ranks:
        lines = _requests(path) if ranks.rank == 0 else None
        worker = _Worker(ranks, settings)
        while True:
            request = worker.pass_on(json.loads(lines.readline()) if lines else None)
            answer = worker.answer(request)
            if lines:
                lines.write(json.dumps(answer) + "\n")
                lines.flush()
            if request["do"] == "end" or "error" in answer:
                return 0


def _requests(path: str) -> Any:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CONNECT_TIMEOUT_S)
    connection.connect(path)
    connection.settimeout(None)
    return connection.makefile("rw")


class _Worker:
    """What a rank keeps between requests."""

    def __init__(self, ranks: Ranks, settings: dict[str, Any]) -> None:
        self._ranks, self._settings = ranks, settings
        self._contenders: dict[str, Contender] = {}
        self._step = 1

    def pass_on(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's request, on every rank."""
        found: dict[str, Any] = all_gather_json(request)[0]
        return found

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        do: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "prepare": self._prepare,
            "links": self._links,
            "decide": self._decide,
            "steps": self._steps,
            "end": lambda request: {},
        }
        try:
            return do[request["do"]](request)
        except Exception as error:
            traceback.print_exc()  # to this host's log
            return {"error": f"rank {self._ranks.rank}: {type(error).__name__}: {error}"}

    def _prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        config = bench_config(**self._settings["model"])
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self._contenders = {
            variant.name: prepare(variant, config, self._ranks, per_node)
            for variant in map(parse_variant, request["variants"])
        }
        model = next(iter(self._contenders.values())).training.model
        return {"parameters": num_parameters(model)}

    def _links(self, request: dict[str, Any]) -> dict[str, Any]:
        links = measure_links(self._ranks.device, round(request["mib"] * 2**20))
        return {"links": [link._asdict() for link in links]}

    def _decide(self, request: dict[str, Any]) -> dict[str, Any]:
        """What auto would choose now, for a model of each precision that is measured."""
        models = {
            precision_of(name): contender.training.model
            for name, contender in self._contenders.items()
        }
        return {
            precision: row(request["gbps"], precision, qsdp.decide(model))
            for precision, model in sorted(models.items(), reverse=True)
        }

    def _steps(self, request: dict[str, Any]) -> dict[str, Any]:
        steps, warm_up = request["steps"], request["warm_up"]
        samples = measure(
            self._contenders,
            steps=steps,
            warm_up=warm_up,
            first_step=self._step,
            interface=sent_bytes,
        )
        self._step += steps + warm_up
        return dict(samples)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
