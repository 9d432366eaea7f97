"""What a server is started with: where it listens, who may ask, and for how much."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from offload_runtime.options import LIMITS, documented, option, require, validate

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@documented()
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """These options say where the server listens, who may ask, and for how much.

    Reading the body of a request may take a tenth of `max_seconds`.
    """

    host: str = option("127.0.0.1", "Where to listen; elsewhere than here it needs a key.", metavar="HOST")
    port: int = option(8000, "0 picks a free one and says which.", least=0, most=65535, metavar="PORT")
    api_key: str | None = option(
        None, "What requests have to bring; or set OFFLOAD_RUNTIME_API_KEY.", metavar="KEY",
        env="OFFLOAD_RUNTIME_API_KEY",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = option(
        (), "Another name of this machine; repeatable.", flag="--allowed-host", metavar="NAME", repeated=True
    )
    cors_origins: tuple[str, ...] = option(
        (), "Let pages of https://chat.example ask; may be repeated.", flag="--cors-origin", metavar="ORIGIN",
        repeated=True,
    )  # fmt: skip
    grace_s: float = option(
        30.0, "How long answers may go on after Ctrl-C or SIGTERM.", flag="--grace", least=0, metavar="SECONDS"
    )
    max_waiting: int = option(64, "Requests that may wait; further ones get a 429.", LIMITS, least=0, metavar="N")
    prefix_cache_bytes: int | None = option(
        None, "Host memory, beyond --ram, for keys and values that a slot loses to another prompt.", LIMITS,
        flag="--prefix-cache", size=True, metavar="SIZE",
    )  # fmt: skip
    sessions: Path | None = option(
        None, "Keep what was read of prompts in this directory, for the next process.", metavar="DIR"
    )
    sessions_bytes: int | None = option(
        None, "What --sessions may hold, 64GB by itself; what was used least recently goes first.", LIMITS,
        flag="--sessions-size", size=True, metavar="SIZE",
    )  # fmt: skip
    max_tokens: int | None = option(
        None, "Longest answer; by itself, what the context holds.", LIMITS, least=1, metavar="N"
    )
    max_body_bytes: int = option(
        8_000_000, "Largest body of a request.", LIMITS, flag="--max-body", size=True, metavar="SIZE"
    )
    max_seconds: float = option(
        3600.0, "After this long, waiting included, an answer ends as it is.", LIMITS, least=0.001, metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        validate(self)
        for origin in self.cors_origins:
            fine = origin.startswith(("http://", "https://")) and origin.count("/") == 2
            require(fine, f"{origin!r} is not an origin: write it like https://chat.example")
        key = self.api_key
        fine = key is None or (key.isascii() and key.isprintable() and key == key.strip() != "")
        require(fine, "an API key is a word of printable ASCII characters")
        needed = f"listening at {self.host} lets other machines ask: give --api-key or OFFLOAD_RUNTIME_API_KEY"
        require(self.is_loopback or key is not None, needed)
        fine = self.sessions is not None or self.sessions_bytes is None
        require(fine, "--sessions-size does nothing without --sessions: add it, or drop this")

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches the server."""
        return self.host == "localhost" or getattr(_address(self.host), "is_loopback", False)

    def allows_host(self, header: str) -> bool:
        """Return whether a Host header names this server. An address always does where all are listened at: only a name
        can be made to stand for another machine's."""
        name = _host_of(header)
        if name in _LOOPBACK_NAMES | {self.host.lower()} | {host.lower() for host in self.allowed_hosts}:
            return True
        return getattr(_address(self.host), "is_unspecified", False) and _address(name) is not None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _host_of(header: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
