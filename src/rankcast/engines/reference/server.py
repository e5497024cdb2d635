"""The embedded fleet's HTTP application, on vLLM's RL routes.

This module knows routes, their JSON, and which call of the fleet each one is. It must not know workers' processes, nor
on which address it is served (``serve``). Methods, parameters and answers are those of vLLM's routes of the same name;
``/abort_weight_update`` and ``/generate`` are this engine's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rankcast.engines.reference.bodies import (
    BODY_LIMIT,
    SMALL_BODY_LIMIT,
    answer,
    error_answer,
    faults_answer,
    parse,
    read_body,
)
from rankcast.engines.reference.fleet import Fleet
from rankcast.engines.reference.request import Ask, Generation
from rankcast.engines.reference.turns import PauseMode
from rankcast.errors import PayloadError, RankcastError, UnsupportedError
from rankcast.wire.codec import MAC_HEADER
from rankcast.wire.reports import Report

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _InitBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    init_info: dict[str, Any]


class _UpdateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    update_info: dict[str, Any] | list[dict[str, Any]]


class _FinishBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weight_version: str | None = None


class _VersionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    new_version: str


class _CheckBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


def application(fleet: Fleet, *, body_limit: int = BODY_LIMIT) -> Starlette:
    """The application that serves ``fleet``, which its caller starts and closes.

    ``body_limit``, in bytes, is for messages and payloads; other bodies may have ``SMALL_BODY_LIMIT`` at most. Where
    the fleet has a secret, every route that changes something wants a signature: in the message itself on the init and
    update routes, and of the route and the body in ``X-Rankcast-Mac`` on all others.
    """
    routes = _Routes(fleet, body_limit)
    table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("GET", "/health", routes.health),
        ("POST", "/init_weight_transfer_engine", routes.init),
        ("POST", "/start_weight_update", routes.start),
        ("POST", "/update_weights", routes.update),
        ("POST", "/finish_weight_update", routes.finish),
        ("POST", "/abort_weight_update", routes.abort),
        ("POST", "/update_weight_version", routes.update_weight_version),
        ("POST", "/pause", routes.pause),
        ("POST", "/resume", routes.resume),
        ("GET", "/is_paused", routes.is_paused),
        ("GET", "/weight_info", routes.weight_info),
        ("POST", "/weight_checker", routes.weight_checker),
        ("GET", "/get_world_size", routes.get_world_size),
        ("POST", "/reset_prefix_cache", routes.reset_prefix_cache),
        ("POST", "/generate", routes.generate),
    ]
    return Starlette(
        routes=[Route(path, _answering(handler), methods=[method]) for method, path, handler in table],
        exception_handlers={HTTPException: _no_route},
    )


def _answering(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except RankcastError as error:
            return error_answer(error)
        except Exception as error:
            _log.exception("%s %s failed", request.method, request.url.path)
            return error_answer(error)

    return endpoint


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path}: {error.detail if isinstance(error, HTTPException) else error}"
    return answer({"error": {"code": "route", "message": message, "faults": []}}, status)


class _Routes:
    def __init__(self, fleet: Fleet, body_limit: int) -> None:
        self._fleet = fleet
        self._limit = body_limit

    async def _message(self, request: Request, kind: type[T]) -> T:
        """The body of a route whose messages are signed themselves."""
        return parse(await read_body(request, self._limit), kind, request.url.path)

    async def _asked(self, request: Request, kind: type[T]) -> T:
        """The body of a route that changes nothing."""
        return parse(await read_body(request, min(self._limit, SMALL_BODY_LIMIT)), kind, request.url.path)

    async def _ordered(self, request: Request) -> bytes:
        """The body of a route that changes something; raises ``AuthenticationError`` when it is not signed as it must.

        Only then is anything done. What was signed once can be sent again: see docs/decisions.md.
        """
        body = await read_body(request, min(self._limit, SMALL_BODY_LIMIT))
        query = request.url.query
        route = f"{request.url.path}?{query}" if query else request.url.path
        self._fleet.codec.check_signature(route, body, request.headers.get(MAC_HEADER))
        return body

    # -- weight updates ----------------------------------------------------------------------------------------------

    async def _call(self, call: str, argument: object, message: str) -> Response:
        reports = await _outcome(self._fleet.submit_call(call, argument))
        return faults_answer(reports) or answer({"message": message})

    async def init(self, request: Request) -> Response:
        body = await self._message(request, _InitBody)
        return await self._call("init", body.init_info, "Weight transfer initialized")

    async def start(self, request: Request) -> Response:
        await self._ordered(request)
        return await self._call("start", None, "Weight update started")

    async def update(self, request: Request) -> Response:
        body = await self._message(request, _UpdateBody)
        return await self._call("update", body.update_info, "Weights updated")

    async def finish(self, request: Request) -> Response:
        body = parse(await self._ordered(request) or b"{}", _FinishBody, request.url.path)
        reports: list[Report] = await _outcome(self._fleet.submit_finish(body.weight_version))
        return faults_answer(reports) or answer({"message": "Weight update finished"})

    async def abort(self, request: Request) -> Response:
        await self._ordered(request)
        return await self._call("abort", None, "Weight update aborted")

    async def update_weight_version(self, request: Request) -> Response:
        body = parse(await self._ordered(request), _VersionBody, request.url.path)
        await _outcome(self._fleet.submit_weight_version(body.new_version))
        return answer({"success": True, "new_version": body.new_version})

    # -- pausing -----------------------------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        await self._ordered(request)
        mode = request.query_params.get("mode", "abort")
        if mode not in ("keep", "wait", "abort"):
            raise PayloadError(f"unknown pause mode {mode!r}: keep, wait or abort")
        _flag(request, "clear_cache", True)  # there is no cache to clear
        known: dict[str, PauseMode] = {"keep": "keep", "wait": "wait", "abort": "abort"}
        await _outcome(self._fleet.submit_pause(known[mode]))
        return answer({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._ordered(request)
        await _outcome(self._fleet.submit_resume())
        return answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        self._fleet.check_alive()
        return answer({"is_paused": self._fleet.paused})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self._ordered(request)
        self._fleet.check_alive()
        return Response()  # there is no cache to reset

    # -- what it is and holds ----------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        self._fleet.check_alive()
        return answer({"status": "ok"})

    async def weight_info(self, request: Request) -> Response:
        fleet = self._fleet
        fleet.check_alive()
        rows = [
            {"label": fleet.label(worker.rank), "pid": pid, **msgspec.structs.asdict(worker)}
            for worker, pid in zip(fleet.workers(), fleet.pids(), strict=True)
        ]
        info = {
            "weight_version": fleet.weight_version,
            "engine": "rankcast-reference",
            "engine_id": fleet.engine,
            "layout": fleet.layout,
            "is_paused": fleet.paused,
            "requests": fleet.requests,
            "workers": rows,
        }
        return answer(info)

    async def weight_checker(self, request: Request) -> Response:
        body = await self._asked(request, _CheckBody)
        if body.action == "reset":
            raise UnsupportedError("this engine does not reset its weights: push others")
        if body.action == "compare" and body.baseline is None:
            raise PayloadError("action 'compare' needs a 'baseline': parameter key -> checksum")
        found = await _outcome(self._fleet.submit_checksums())
        flat: dict[str, str] = {}
        for rank, parameters in enumerate(found):
            place = self._fleet.layout.place(rank)
            prefix = f"dp{place.dp_index}:pp{place.pp_index}:pcp0:tp{place.tp_index}:"
            flat.update((prefix + name, parameter.sha256) for name, parameter in parameters.items())
        if body.baseline is not None and body.action == "compare":
            keys = flat.keys() | body.baseline.keys()
            differing = sorted(key for key in keys if flat.get(key) != body.baseline.get(key))
            return answer({"match": not differing, "mismatches": differing})
        workers = [{"rank": rank, "parameters": parameters} for rank, parameters in enumerate(found)]
        return answer({"checksums": flat, "workers": workers})

    async def get_world_size(self, request: Request) -> Response:
        self._fleet.check_alive()
        layout = self._fleet.layout
        with_dp = _flag(request, "include_dp", True)
        return answer({"world_size": layout.workers if with_dp else layout.tp * layout.pp})

    # -- generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        asked = self._fleet.request(await self._asked(request, Ask))
        answered = asyncio.ensure_future(_outcome(asked.future))
        leaving = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({answered, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise ClientDisconnect
            generation: Generation = answered.result()
        finally:
            self._fleet.abandon(asked)
            answered.cancel()
            leaving.cancel()
        versions = generation.weight_versions
        content: dict[str, Any] = {
            "token_ids": generation.token_ids,
            "logprobs": generation.log_probs,
            "weight_version": versions[-1] if versions else self._fleet.weight_version,
            "weight_versions": versions,
            "finish_reason": generation.finish_reason,
        }
        if generation.prompt_log_probs is not None:
            content["prompt_logprobs"] = [None, *generation.prompt_log_probs]
        return answer(content)


async def _outcome(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _flag(request: Request, name: str, default: bool) -> bool:
    text = request.query_params.get(name)
    if text is None:
        return default
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise PayloadError(f"query parameter {name}={text!r}: true or false")
