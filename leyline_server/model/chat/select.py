"""Which chat format a checkpoint gets.

Its vocabulary says which families are possible, and its own Jinja template, where it has one, which of them it is:
the one whose plain conversation the template writes with the same ids. `verify` reports where the two part.
"""

from __future__ import annotations

from leyline_server.model.chat.families import FAMILIES
from leyline_server.model.chat.format import FamilyFormat
from leyline_server.model.chat.layout import Layout, lay_out
from leyline_server.model.chat.plain import PlainFormat
from leyline_server.model.chat.template import Renderer
from leyline_server.model.chat.verify import differences, same_plain_conversation
from leyline_server.model.tokenizer import TextTokenizer, TokenizerError


def select_format(
    tokenizer: TextTokenizer,
    model_type: str,
    renderer: Renderer | None,
    vocab_size: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> FamilyFormat | PlainFormat:
    """The format, with its differences from the template. `PlainFormat` with the reason when no family fits.

    Args:
        model_type: of the config; decides between families when there is no template to ask.
        renderer: the checkpoint's chat template, or None when it has none.
        vocab_size: the model's bound of ids; the tokenizer's own when it is not given.
        stop_ids: the checkpoint's end-of-text ids, for a plain format.

    Raises:
        TokenizerError: the tokenizer has ids beyond the model's bound.
    """
    bound = tokenizer.vocab_size if vocab_size is None else vocab_size
    if tokenizer.vocab_size > bound:
        raise TokenizerError(f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's bound is {bound}")
    laid_out = [lay_out(family, tokenizer) for family in FAMILIES]
    possible = [FamilyFormat(layout, tokenizer, bound) for layout in laid_out if isinstance(layout, Layout)]
    if not possible:
        reason = "; ".join(layout for layout in laid_out if isinstance(layout, str))
        return PlainFormat(tokenizer, bound, f"no chat format fits its vocabulary: {reason}", stop_ids)
    possible.sort(key=lambda fmt: fmt.name != model_type)
    if renderer is None:
        return possible[0].with_differences(["the checkpoint has no chat template to compare with"])
    reasons: list[str] = []
    for candidate in possible:
        why_not = same_plain_conversation(candidate, tokenizer, renderer)
        if not why_not:
            return candidate.with_differences(differences(candidate, tokenizer, renderer))
        reasons.append(f"{candidate.name}: {why_not}")
    return PlainFormat(tokenizer, bound, f"its chat template is not one of ours: {'; '.join(reasons)}", stop_ids)
