"""How the embedded model `tiny` was made, re-runnable: `python -m training.make --out leyline_server/assets/tiny`."""
