"""What a planned edit will do, in counts. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from leyline_server.cache.influence import Influence
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.slots import Slots
from leyline_server.edit.plan import Plan
from leyline_server.engine.engine import RowReceipt
from leyline_server.engine.forgetting import held_elsewhere
from leyline_server.engine.sequence import SequenceState


def receipts(
    cache: KVCache, state: SequenceState, others: Iterable[SequenceState], plan: Plan, influences: Sequence[Influence]
) -> list[RowReceipt]:
    """The receipt of every edit. influences: for each FORGET, in order, what was computed from its span."""
    rows, table = plan.rows, cache.table
    first = min((item.at for item in plan.edits), default=len(rows))
    has_kv, turned = rows.slots[first:] >= 0, rows.turned(table, first)
    to_compute, exact_upto = rows.num_pending + rows.num_to_repair, rows.exact_upto(table)
    going = _going(plan)
    freed = table.falls(going)
    out: list[RowReceipt] = []
    left = list(influences)
    for index, item in enumerate(plan.edits):
        after = item.at + len(item.edit.ids) - first
        kept = int(np.count_nonzero(has_kv[after:]))
        elsewhere: tuple[int, ...] = ()
        if item.edit.forget:
            elsewhere = held_elsewhere(cache, state, others, item, plan, left.pop(0))
        computed_from_it = bool(np.any(item.slots >= 0)) and not item.edit.forget
        out.append(
            RowReceipt(
                at=item.at,
                removed=len(item.ids),
                inserted=len(item.edit.ids),
                kept=kept,
                turned=int(np.count_nonzero(turned[after:])),
                to_compute=to_compute,
                freed=freed[index],
                exact_upto=exact_upto,
                influence_remains=computed_from_it and kept > 0,
                held_elsewhere=elsewhere,
                repaired=item.num_repaired,
            )
        )
    return out


def _going(plan: Plan) -> list[Slots]:
    """The slots that leave the list, edit by edit; the tail goes with the first FORGET, and what else it reaches."""
    going = [np.concatenate([item.slots, item.repaired]) if len(item.repaired) else item.slots for item in plan.edits]
    forget = next((index for index, item in enumerate(plan.edits) if item.edit.forget), None)
    if forget is not None:
        going[forget] = np.concatenate([going[forget], plan.tail_slots, plan.reached])
    return going
