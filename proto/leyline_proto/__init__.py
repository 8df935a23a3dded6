"""The contract between Leyline's client and server: the wire messages, and the rules they obey.

Owns `leyline.proto` (with its generated code) and the rules that both the server and the SDK's fake
must apply in the same way: the span table, legal cuts, the edit log, and the refusals. It knows
nothing of tensors, slots or transports.
"""
