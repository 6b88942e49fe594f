# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
# Many tests wait for processes of their own, so two side by side take little more than half the time.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: train test test-fast lint types imports check speed-benchmark stepping-benchmark collecting-benchmark device-benchmark faults-benchmark strategies long-run curve notebook wheel constraints clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

train: $(VENV)/.installed  ## Train the default task to a solved score.
	$(BIN)/python -m puffer_lightning fit --config ppo.yaml

test: $(VENV)/.installed  ## Run the whole test suite.
	$(PYTEST)

test-fast: $(VENV)/.installed  ## Run the tests that take less than ten seconds each.
	$(PYTEST) -m 'not slow'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

imports: $(VENV)/.installed
	$(BIN)/lint-imports

check: lint types imports  ## Lint, types and the direction of imports.

speed-benchmark: $(VENV)/.installed  ## Measure training against its peers, each on the same work, in the same run.
	$(BIN)/python -m pip install --quiet -c benchmarks/constraints.txt -e '.[peers]'
	$(BIN)/python benchmarks/speed.py

stepping-benchmark: $(VENV)/.installed  ## Measure stepping in worker processes, against peers in the same run.
	$(BIN)/python -m pip install --quiet -e '.[peers]'
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/stepping.py

collecting-benchmark: $(VENV)/.installed  ## Measure rollouts whose environments step while the policy acts.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/collecting.py

device-benchmark: $(VENV)/.installed  ## Measure environments in torch against gymnasium's vectorised CartPole.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/device_stepping.py

faults-benchmark: $(VENV)/.installed  ## Kill runs at random moments, strike them with faults, and resume them.
	$(BIN)/python benchmarks/faults.py

strategies: $(VENV)/.installed  ## Train under each strategy, started in each way, on 1, 2 and 4 processes.
	$(BIN)/python benchmarks/strategies.py

long-run: $(VENV)/.installed  ## Train for 10,000 iterations and count what the process holds.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/long_run.py

curve: $(VENV)/.installed  ## Train five seeds and draw their curves.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/solve.py

notebook: $(VENV)/.installed  ## Run the notebooks again and keep their outputs.
	SDL_VIDEODRIVER=dummy $(BIN)/jupyter execute --inplace notebooks/*.ipynb

wheel: $(VENV)/.installed
	$(BIN)/python -m build --wheel

constraints: $(VENV)/.installed  ## Resolve the newest versions that work together, on Python 3.10 and above.
	$(BIN)/python -m pip install --quiet uv
	# envpool 1.2 installs 600 MB of models with it.
	printf 'torch==2.13.0\nnumpy<2.5\nenvpool<1.2\n' > $(VENV)/pins.txt
	(echo '# Exact versions that README and CI install with. Regenerate: `make constraints`.'; \
	 $(BIN)/uv pip compile --universal --python-version 3.10 --extra dev --extra notebook -c $(VENV)/pins.txt \
	 --upgrade --quiet --no-annotate --no-header pyproject.toml | grep -vE '^(nvidia-|triton|cuda-)') > constraints.txt

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
