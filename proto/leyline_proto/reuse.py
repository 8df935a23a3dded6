"""What a session reuses of others: the same text from its beginning on, or the same content wherever it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal
from leyline_proto.repair import NO_REPAIR, Repair, amount_of, repair_to_pb


@dataclass(frozen=True, slots=True)
class Reuse:
    """repair: what of each content hit is computed all the same. least_share, 0 to 1: while all is exact, hits that
    save less of what a request would compute are left."""

    mode: pb.Reuse.ValueType = pb.REUSE_PREFIX
    repair: Repair = NO_REPAIR
    least_share: float = 0.0

    def tell(self, state: pb.SessionState) -> None:
        """Writes it into what a client mirrors."""
        state.reuse, state.reuse_least_share = self.mode, self.least_share
        if self.repair != NO_REPAIR:
            state.reuse_repair.CopyFrom(repair_to_pb(self.repair))

    @property
    def registers(self) -> bool:
        """Whether exact rows of its text can be found by their content."""
        return self.mode in (pb.REUSE_REGISTER, pb.REUSE_CONTENT)

    @property
    def takes(self) -> bool:
        """Whether it takes rows of the same content that stood elsewhere."""
        return self.mode == pb.REUSE_CONTENT


PREFIX: Final = Reuse()


def reuse_of(request: pb.CreateSessionRequest, refused: str, share_refused: str) -> Reuse:
    """What a new session asks for. `refused`: why nothing is found by its content; `share_refused`: why deviations
    can't be measured; empty where they can.

    Raises INVALID_ARGUMENT, NOT_SUPPORTED.
    """
    mode = request.reuse or pb.REUSE_PREFIX
    if mode not in pb.Reuse.values():
        raise Refusal("INVALID_ARGUMENT", f"reuse is {mode}, which is no mode", field="reuse", value=mode)
    if mode != pb.REUSE_PREFIX and refused:
        raise Refusal(
            "NOT_SUPPORTED",
            f"content reuse is not supported here: {refused}",
            feature="CONTENT_REUSE",
            why=refused,
        )
    least = request.reuse_least_share
    if not 0 <= least <= 1:
        raise Refusal(
            "INVALID_ARGUMENT",
            f"reuse_least_share is {least}; it must be in [0, 1]",
            field="reuse_least_share",
            value=least,
            bound="in [0, 1]",
        )
    if mode != pb.REUSE_CONTENT:
        for field, asked in (("reuse_repair", request.HasField("reuse_repair")), ("reuse_least_share", least > 0)):
            if asked:
                raise Refusal("INVALID_ARGUMENT", f"{field} is of content hits: reuse has to be CONTENT", field=field)
        return Reuse(mode)
    if not request.HasField("reuse_repair"):
        return Reuse(mode, least_share=least)
    return Reuse(mode, amount_of(request.reuse_repair, "reuse_repair", share_refused), least)
