# Both commands set everything up by themselves: all they need is Python 3.11 or later, as PYTHON.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test test-all check bench clean

demo: $(VENV)/ready
	$(RUN) -m memfit demo

# A file's tests stay in one of two processes, files by name: by number of tests, a heavy one would come last, alone. Some of the slow ones read clocks and memory: they want a quiet machine.
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder

test: check
	$(RUN) -m pytest $(SPREAD) -m "not slow" --durations=40 --durations-min=3

# All that `make test` leaves out.
test-all: $(VENV)/ready
	$(RUN) -m pytest $(SPREAD) -m "slow"

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
