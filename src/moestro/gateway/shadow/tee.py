"""The clients' port of a shadow: copies of requests are read and dropped."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from moestro.errors import RequestError
from moestro.gateway.admission import Admission
from moestro.gateway.clients.downstream import ClientConnection
from moestro.gateway.clients.http_headers import Incoming, own_head
from moestro.gateway.exchange import ExchangeContext
from moestro.gateway.proxy import Proxy
from moestro.gateway.shadow.observer import ShadowObserver

_ACCEPTED = 202


class ShadowProxy(Proxy):
    """Answers each copy of a request at once, because nginx keeps a client's connection until its mirror has answered.

    Paths that need no engine are answered as by any router.
    """

    def __init__(self, shared: ExchangeContext, admission: Admission, observer: ShadowObserver) -> None:
        super().__init__(shared, admission)
        self._observer = observer

    def _send_on(self, client: ClientConnection, incoming: Incoming) -> None:
        """Answer a copy, and let the observer see it."""
        now_ns, max_bytes = time.monotonic_ns(), client.max_body_bytes
        if self._admission.is_read_inline(incoming):
            self._observer.arrived(*self._admission.read(incoming, now_ns), now_ns)
        else:
            kept = replace(incoming, hold=None)  # The answer releases the body.
            task = asyncio.get_running_loop().create_task(self._read(kept, max_bytes, now_ns))
            self._work.add(task)
            task.add_done_callback(self._work.discard)
        client.reply(own_head(_ACCEPTED, "", 0))

    async def _read(self, incoming: Incoming, max_bytes: int, now_ns: int) -> None:
        try:
            request, model = await self._admission.read_on_thread(incoming, max_bytes)
        except RequestError as error:
            self.refused(error, incoming.client)
        except Exception as error:
            self._shared.faults.bug("a copy could not be read", error)
        else:
            self._observer.arrived(request, model, now_ns)
