"""What random tests of content reuse draw from: documents that texts share, and modes."""

from __future__ import annotations

from leyline_proto import leyline_pb2 as pb
from leyline_proto.repair import Repair
from leyline_proto.reuse import PREFIX, Reuse
from tests.engine.harness import random_ids

REUSES = [
    PREFIX,
    Reuse(pb.REUSE_REGISTER),
    Reuse(pb.REUSE_CONTENT),
    Reuse(pb.REUSE_CONTENT, Repair(first=5)),
    Reuse(pb.REUSE_CONTENT, Repair(first=40)),
    Reuse(pb.REUSE_CONTENT, Repair(share=0.3)),
    Reuse(pb.REUSE_CONTENT, Repair(share=0.8)),
    Reuse(pb.REUSE_CONTENT, Repair(share=1.0)),
]
DOCS = [random_ids(n, 100 + n) for n in (33, 48, 70, 90, 140)]
