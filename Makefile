# make demo    train a small GPT on 8 virtual devices and on one, and compare (about three minutes on 2 cores)
# make test    everything that CI runs
# make sweep   the long tables that `make test` leaves out
# Each sets up .venv on its first run. PYTHON chooses the interpreter, ARGS go to the demo: make demo ARGS="--explain"

PYTHON ?= python3
BIN := .venv/bin
# The pins matter: without them pip may take another torch, several gigabytes of it.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test lint sweep clean

demo: .venv/.demo-installed
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: lint
	$(BIN)/pytest -n 2

lint: .venv/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

sweep: .venv/.test-installed
	$(BIN)/pytest -n 2 -m sweep

clean:
	rm -rf .venv out

# A stamp is older than what it was made from when the pins or the extras change.
.venv/.%-installed: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -e ".[$*]"
	touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "spmdfn needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
