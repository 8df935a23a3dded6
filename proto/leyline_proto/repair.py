"""Repair: what an AMORTIZE computes again behind its span. Between AMORTIZE and FORGET it is the dial."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal


@dataclass(frozen=True, slots=True)
class Repair:
    """The first so many tokens behind the span, or the share of those with KV that deviates most. None stands behind
    the next span of the same call."""

    first: int = 0
    share: float = 0.0


NO_REPAIR: Final = Repair()


def repair_to_pb(repair: Repair) -> pb.Repair:
    """As a client would ask for it."""
    return pb.Repair(share=repair.share) if repair.share else pb.Repair(first=repair.first)


def num_of_share(count: int, share: float) -> int:
    """How many of so many tokens a share is, rounded up; 0.1 of ten is one."""
    return math.ceil(round(count * share, 4))


def repair_of(directive: pb.Directive, mode: pb.Mode.ValueType, share_refused: str) -> Repair:
    """What a directive asks for. `share_refused`: why deviations can't be measured, if so.

    Raises INVALID_ARGUMENT, NOT_SUPPORTED.
    """
    if not directive.HasField("repair"):
        return NO_REPAIR
    if mode == pb.MODE_FORGET:
        raise Refusal(
            "INVALID_ARGUMENT", "FORGET computes all behind its span again; repair is AMORTIZE's", field="repair"
        )
    return amount_of(directive.repair, "repair", share_refused)


def amount_of(asked: pb.Repair, field: str, share_refused: str) -> Repair:
    """What the repair in this field asks for. Raises INVALID_ARGUMENT, NOT_SUPPORTED."""
    amount = asked.WhichOneof("amount")
    if amount is None:
        raise Refusal("INVALID_ARGUMENT", f"the {field} says neither first nor share", field=field)
    value = asked.first if amount == "first" else asked.share
    if not (value >= 0 if amount == "first" else 0 < value <= 1):
        bound = "at least 0" if amount == "first" else "in (0, 1]"
        raise Refusal(
            "INVALID_ARGUMENT",
            f"{field}.{amount} is {value}; it must be {bound}",
            field=f"{field}.{amount}",
            value=value,
            bound=bound,
        )
    if 0 < asked.share < 1 and share_refused:
        raise Refusal(
            "NOT_SUPPORTED",
            f"this model does not support {field}.share: {share_refused}; use {field}.first",
            feature="REPAIR_SHARE",
            why=share_refused,
        )
    return Repair(first=asked.first) if amount == "first" else Repair(share=asked.share)
