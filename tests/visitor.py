"""A page without a browser: HTTP for the HTML, then Bokeh's websocket, as BokehJS speaks it.

::

    GET /?ckpt=…    ──►  HTML with the session's token
    websocket       ──►  ACK
    PULL-DOC-REQ    ──►  the document; document_ready: the page has loaded
    PATCH-DOC       ──►  OK, and patches with what changed
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

__all__ = ["Visitor", "fetch"]

MOST = 1 << 28  #: bytes of a message


async def fetch(url: str, timeout: float = 120) -> bytes:
    """The body of an answer."""
    client = AsyncHTTPClient(force_instance=True)
    try:
        return bytes((await client.fetch(HTTPRequest(url, request_timeout=timeout))).body)
    finally:
        client.close()


class Visitor:
    """One open page.

    Attributes:
        models: the document's models as they were pulled: id → its type and attributes.
    """

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket, self._number = socket, 0
        self.models: dict[str, dict[str, Any]] = {}

    @classmethod
    async def come(cls, url: str, **query: str) -> Visitor:
        """Load the page and its document."""
        html = (await fetch(f"{url}?{urlencode(query)}")).decode()
        token = re.search(r'"token":"([^"]+)"', html)
        assert token is not None, html[-500:]
        request = HTTPRequest("ws" + url.removeprefix("http") + "ws", request_timeout=120, connect_timeout=120)
        socket = await websocket_connect(request, subprotocols=["bokeh", token[1]], max_message_size=MOST)
        socket.protocol.set_nodelay(True)  # as browsers have it: a message is three parts
        self = cls(socket)
        await self._until(lambda header, _: header["msgtype"] == "ACK")
        document = await self._ask("PULL-DOC-REQ", {})
        self.models = {one["id"]: one for one in _models(document)}
        loaded = {"type": "event", "name": "document_ready", "values": {"type": "map"}}
        await self._event({"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": loaded})
        return self

    async def change(self, model: str, attribute: str, value: Any) -> None:
        """Set a property of a model, as a click in the browser does; returns when the server has dealt with it."""
        await self._event({"kind": "ModelChanged", "model": {"id": model}, "attr": attribute, "new": value})

    async def leave(self) -> None:
        """Close the page; returns when the server has closed its side, too."""
        self._socket.close()
        while await asyncio.wait_for(self._socket.read_message(), 120) is not None:
            pass

    async def _event(self, event: dict[str, Any]) -> None:
        await self._ask("PATCH-DOC", {"events": [event]})

    async def _ask(self, kind: str, content: dict[str, Any]) -> Any:
        self._number += 1
        asked = f"visitor-{id(self)}-{self._number}"
        for part in ({"msgid": asked, "msgtype": kind}, {}, content):
            await self._socket.write_message(json.dumps(part))
        return await self._until(lambda header, _: header.get("reqid") == asked)

    async def _until(self, wanted: Any) -> Any:
        while True:
            header = json.loads(await self._read())
            await self._read()
            content = json.loads(await self._read())
            for _ in range(header.get("num_buffers", 0)):
                await self._read()
                await self._read()
            assert header["msgtype"] != "ERROR", str(content)[:2000]
            if wanted(header, content):
                return content

    async def _read(self) -> str | bytes:
        message = await asyncio.wait_for(self._socket.read_message(), 120)
        assert message is not None, "the server closed the page"
        return message


def _models(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "id" in node and "attributes" in node:
            yield node
        for item in node.values():
            yield from _models(item)
    elif isinstance(node, list):
        for item in node:
            yield from _models(item)
