"""What an Envoy gateway has counted for each backend, from its admin interface.

A cluster of the gateway is named `<namespace>/<Service>/<port>`. Measured on Envoy 1.40 with HTTP/1.1 backends: an
error answer, a dead backend and a backend without endpoints all count in `upstream_rq_5xx`; a stream that is cut after
its headers counts there as a 200 and only in `upstream_cx_destroy_remote_with_active_rq`. A caller who hangs up counts
in neither. A connection that is lost before the headers counts in both, so `errors` may count such a request twice; it
never misses one.
"""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from tasks.core.errors import After, UnavailableError
from tasks.ports import BackendCounts

_REQUESTS = "upstream_rq_completed"
_ERRORS = (
    "upstream_rq_5xx",
    "upstream_cx_destroy_remote_with_active_rq",
    "upstream_rq_rx_reset",  # HTTP/2 backends reset the stream and keep the connection
)


class EnvoyStats:
    """Implements `ports.GatewayStats` on Envoy's admin interface.

    Args:
        stats_url: the admin interface, such as http://127.0.0.1:9901.
        namespace: namespace of the backend Services.
        timeout_s: of each request.
    """

    def __init__(self, stats_url: str, namespace: str, *, timeout_s: float = 5.0) -> None:
        self._url = stats_url.rstrip("/")
        self._namespace = namespace
        self._timeout_s = timeout_s
        # The admin interface is inside the cluster: no proxy of the surroundings.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def counts(self, backend: str) -> BackendCounts:
        """Return the counters of a backend Service by name, all its ports; NaN for one that the gateway lacks.

        Envoy counts from 0 as soon as it has a cluster, so a backend without counters is one that it does not know.
        """
        cluster = rf"cluster\.{re.escape(self._namespace)}/{re.escape(backend)}/\d+"
        found = self._stats(rf"^{cluster}\.({'|'.join((_REQUESTS, *_ERRORS))})$")
        if not any(name.endswith(f".{_REQUESTS}") for name in found):
            return BackendCounts(math.nan, math.nan)
        requests = sum(value for name, value in found.items() if name.endswith(f".{_REQUESTS}"))
        errors = sum(value for name, value in found.items() if not name.endswith(f".{_REQUESTS}"))
        return BackendCounts(requests=requests, errors=min(errors, requests))

    def _stats(self, pattern: str) -> Mapping[str, float]:
        url = f"{self._url}/stats?format=json&filter={quote(pattern, safe='')}"
        try:
            with self._opener.open(url, timeout=self._timeout_s) as response:
                return _values(json.load(response))
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            raise UnavailableError(
                "K2-UNA-001",
                f"The gateway's statistics cannot be read: {type(error).__name__}.",
                where=self._url,
                retry=After(2.0),
            ) from error


def _values(document: Mapping[str, Any]) -> dict[str, float]:
    return {str(item["name"]): float(item["value"]) for item in document["stats"] if "name" in item}
