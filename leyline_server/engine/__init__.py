"""Sequences of tokens and their KV: the seam (`engine.Engine`) and the engine of this server (`local`)."""
