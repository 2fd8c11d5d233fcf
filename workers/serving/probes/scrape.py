"""The probe of an unmodified vLLM server: its /metrics, scraped by a thread that writes a probe's page.

- A scrape costs the server some milliseconds (measured: 5 to 37 of its API process), so there are few: what the page
  shows is up to `interval_s` old and more. metrics.py says what cannot be seen at all. Fit for dashboards, barely for
  control: where the serving team can set one environment variable, the plug-in is the better probe.
- The sign of life is the moment at which the last good scrape was begun. Two that fail in a row take it back at once.
"""

from __future__ import annotations

import http.client
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ....fabric.contract.clock import SystemClock
from ....fabric.contract.errors import ConfigError
from ....fabric.host.network import network_cause
from .metrics import ScrapeHistory, Seen, parse
from .probe_page import ProbeWriter

log = logging.getLogger(__name__)

FAILURES_MAX = 2
BYTES_MAX = 8_000_000  # a server's metrics are some 90 kB


@dataclass(frozen=True, kw_only=True)
class ScrapeOptions:
    """Bounds of scraping: the time between two scrapes, and the longest that one may take."""

    interval_s: float = 0.1
    timeout_s: float = 0.5


class MetricsProbe:
    """Scrapes one server until it is closed."""

    def __init__(self, url: str, path: Path, options: ScrapeOptions | None = None) -> None:
        """Raises ConfigError: `url` is none, or no page can be made at `path`."""
        self._target = target_of(url)
        self._writer = ProbeWriter(path, f"vllm at {url}")
        self._options = options or ScrapeOptions()
        self._clock = SystemClock()
        self._history = ScrapeHistory()
        self._arrived_count = 0
        self._failure_count = 0
        self.failure = "none was scraped yet"  # of the last scrape that brought nothing
        self._connection: http.client.HTTPConnection | None = None
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollfab-scrape", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and take the page away."""
        self._leave.set()
        self._thread.join(self._options.timeout_s + 1.0)
        with suppress(OSError):
            self._writer.path.unlink()

    def _run(self) -> None:
        while not self._leave.is_set():
            begun_at_s = self._clock.now_s()
            try:
                self.take(self._fetch(), begun_at_s)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._fail(error)
            self._leave.wait(max(0.0, begun_at_s + self._options.interval_s - self._clock.now_s()))
        self._hang_up()

    def take(self, text: bytes, at_s: float) -> None:
        """Write what a scrape that was begun at `at_s` has brought. Raises ValueError: it is not vLLM's metrics."""
        metrics = parse(text)
        if metrics is None:
            raise ValueError("it answered without vLLM's metrics")
        self._write(self._history.take(metrics, at_s), at_s)
        if self._failure_count >= FAILURES_MAX:
            log.info("probe.scraped_again", extra={"host": self._target.host})
        self._failure_count = 0

    def _fail(self, error: Exception) -> None:
        self._failure_count += 1
        self.failure = network_cause(error) if isinstance(error, OSError) else str(error) or type(error).__name__
        self._hang_up()
        if self._failure_count == FAILURES_MAX:
            self._writer.alive(0)
            log.warning("probe.scrape_failed", extra={"host": self._target.host, "error": self.failure})

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _write(self, seen: Seen, at_s: float) -> None:
        writer, state, at_ns = self._writer, seen.state, _ns(at_s)
        for prompt_tokens in seen.arrivals:
            writer.arrived(at_ns, prompt_tokens)
        self._arrived_count += len(seen.arrivals)
        if seen.step is not None:
            duration_ns = _ns(seen.step.duration_s)
            writer.stepped(at_ns - duration_ns, duration_ns, seen.step.work)
        for end in seen.ends:
            first_token_ns = at_ns - _ns(end.tpot_s * (end.token_count - 1))
            writer.ended(first_token_ns - _ns(end.ttft_s), first_token_ns, at_ns, end.token_count)
        writer.show(
            waiting=[(_ns(each.arrived_at_s), each.prefill_tokens) for each in state.waiting],
            running=[(_ns(each.first_token_at_s), each.token_count, each.context_tokens) for each in state.running],
            step=(_ns(state.step_began_at_s), state.step) if state.step is not None else None,
            known=self._arrived_count,
            kv_used=state.kv_used_tokens,
            kv_capacity=state.kv_capacity_tokens,
        )
        writer.alive(at_ns)

    def _fetch(self) -> bytes:
        target = self._target
        if self._connection is None:
            make = http.client.HTTPSConnection if target.is_secret else http.client.HTTPConnection
            self._connection = make(target.host, target.port, timeout=self._options.timeout_s)
        self._connection.request("GET", target.path)
        answer = self._connection.getresponse()
        text = answer.read(BYTES_MAX)
        if answer.status != http.client.OK:
            raise ValueError(f"it answered {answer.status} {answer.reason}")
        return text


@dataclass(frozen=True, slots=True)
class Target:
    """The place of the metrics."""

    host: str
    port: int | None
    path: str
    is_secret: bool


def target_of(url: str) -> Target:
    """Find the metrics of a server by its URL, with or without /metrics. Raises ConfigError: it is no such URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--probe {url}: {error}", option="--probe") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--probe {url} is no http:// URL of a vLLM server, such as http://127.0.0.1:8000", option="--probe"
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    path = path if path.endswith("/metrics") else path + "/metrics"
    return Target(parts.hostname, port, path, parts.scheme == "https")


def _ns(at_s: float) -> int:
    return round(at_s * 1e9)
