"""The client's settings: arguments first, then the environment, then defaults."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

from leyline_sdk.calls import Retry
from leyline_sdk.errors import ConfigError
from leyline_sdk.transport import Metadata

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Config:
    """Attributes:
    target: "host:port". LEYLINE_TARGET.
    api_key: sent as a bearer token; None sends none. LEYLINE_API_KEY.
    timeout_s: seconds that a call may take, retries included. LEYLINE_TIMEOUT.
    """

    target: str = DEFAULT_TARGET
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = DEFAULT_TIMEOUT_S
    retry: Retry = field(default_factory=Retry)

    @property
    def metadata(self) -> Metadata:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    @classmethod
    def read(cls, target: str | None, api_key: str | None, timeout_s: float | None, retry: Retry | None) -> Config:
        """Raises ConfigError for a timeout that is no positive number of seconds, and a target with a scheme."""
        where = "timeout_s"
        if timeout_s is None and os.environ.get("LEYLINE_TIMEOUT"):
            where = "LEYLINE_TIMEOUT"
            try:
                timeout_s = float(os.environ["LEYLINE_TIMEOUT"])
            except ValueError:
                timeout_s = math.nan
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ConfigError(f"{where} must be a positive number of seconds")
        target = target or os.environ.get("LEYLINE_TARGET") or DEFAULT_TARGET
        if "://" in target:
            raise ConfigError(f"target {target!r} is no address: host:port, no scheme")
        return cls(
            target,
            api_key or os.environ.get("LEYLINE_API_KEY") or None,
            timeout_s,
            retry or Retry(),
        )
