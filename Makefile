# Everything here sets itself up: a virtual environment in .venv, from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PROTOC := $(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --mypy_out=quiet:proto \
	--grpc_python_out=proto --mypy_grpc_out=quiet:proto proto/leyline_proto/leyline.proto

.PHONY: demo test check proto bench clean

demo: $(READY)  ## the agent loop on the embedded model, five arms, a table and a picture; TRACE=path replays a recording
	$(BIN)/python -m demo $(if $(TRACE),--trace "$(TRACE)")

test: $(READY)  ## the test suite
	$(BIN)/python -m pytest

check: $(READY)  ## ruff, mypy --strict, buf lint, generated code is current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/buf lint
	PATH="$(abspath $(BIN)):$$PATH" $(PROTOC)
	git diff --exit-code --stat -- proto

bench: $(READY)  ## the benchmarks that this machine can run: checked, timed, tables, benchmarks/results; TRACES=dir
	$(BIN)/python -m benchmarks.run --all $(if $(TRACES),--traces "$(TRACES)")

proto: $(READY)  ## generates the code beside leyline.proto
	PATH="$(abspath $(BIN)):$$PATH" $(PROTOC)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) demo-out
