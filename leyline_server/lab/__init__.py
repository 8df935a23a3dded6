"""The fidelity lab: what an edit does to the model. Its figures say when to use which mode (docs/fidelity.md)."""
