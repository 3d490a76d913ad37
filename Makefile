# Both commands set everything up by themselves: all they need is Python 3.11 or later, as PYTHON.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test fast check bench clean

demo: $(VENV)/ready
	$(RUN) -m memfit demo

# Everything: lint, types, the fast tests, then the slow ones; a file's tests stay in one of two processes.
SPREAD := -n 2 --dist loadfile

test: fast
	$(RUN) -m pytest $(SPREAD) -m "slow"

fast: check
	$(RUN) -m pytest $(SPREAD) -m "not slow"

check: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(RUN)

# On a quiet machine; results land in benchmarks/results.
bench: $(VENV)/ready
	for name in gradients memory prediction_cpu phases_cpu boundary_cpu heap cost speed ragged scripts distributed faults sharding; do $(RUN) benchmarks/$$name.py || exit 1; done

$(VENV)/ready: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --config-settings editable_mode=compat -e .
	touch $@

clean:
	rm -rf $(VENV)
