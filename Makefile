# The commands of a checkout. They need Python 3.11 or later, make, and a package index.

PYTHON ?= python3
PROTO_OUT ?= .
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := .venv/.installed

.PHONY: setup demo test test-slow check protos freeze-protos clean

setup: $(STAMP)

# Torch comes first and pinned: as a dependency of something else it may come as a larger build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	@test -x $(BIN)/python || { echo "Creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing pip"
	@$(PIP) install -qq --upgrade pip
	@echo "Installing torch"
	@$(PIP) install -qq -c constraints.txt torch
	@echo "Installing the other dependencies"
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "Ready: .venv"

demo: setup
	@$(BIN)/python scripts/demo.py

check: setup
	@scripts/check

test: check
	@scripts/test

# Ray Serve with several replicas, and structured output over ranks.
test-slow: setup
	@scripts/test -m slow

protos: setup
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) \
		--grpc_python_out=$(PROTO_OUT) protos/pagedray/v1/*.proto

# The baseline is what clients of a release may rely on. It is made again at a release, and before
# it only when an addition is to be kept as well; what breaks it is never frozen.
freeze-protos: setup
	@$(BIN)/buf breaking protos --against protos/baseline.binpb
	@$(BIN)/buf build protos --exclude-source-info -o protos/baseline.binpb

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
