"""Chat formats: how messages become token ids, and generated ids messages.

A family is a declaration (`families`); one renderer (`format`) and one parser (`parse`) read it. Nothing here knows
sessions, slots or tensors.
"""

from leyline_server.model.chat.format import FamilyFormat
from leyline_server.model.chat.parse import BodyStream, StreamDelta
from leyline_server.model.chat.plain import PlainFormat
from leyline_server.model.chat.select import select_format
from leyline_server.model.chat.template import Renderer, TemplateFailed, load_renderer

__all__ = [
    "BodyStream",
    "FamilyFormat",
    "PlainFormat",
    "Renderer",
    "StreamDelta",
    "TemplateFailed",
    "load_renderer",
    "select_format",
]
