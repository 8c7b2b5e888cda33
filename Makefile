# Everything a developer or a curious user does; `make demo` and `make test` set up what they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LAB := .lab
SETUP := $(VENV)/.set-up
SERVER := $(LAB)/llama-server/llama-server
MODELS := $(LAB)/models/.made
PROMETHEUS := $(LAB)/prometheus/promtool
CHROMIUM := $(LAB)/chromium/chromium

.PHONY: all setup llama-server models prometheus chromium demo test live lint format type docs screenshots bench clean

all: lint type test

setup: $(SETUP)
$(SETUP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: apt-get install python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || apt-get install -y python3.11-venv || \
	  { echo "Python's venv is missing: apt-get install python3.11-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# A llama-server in LLAMA_SERVER_BIN or on PATH wins; otherwise Debian's own is unpacked into .lab.
llama-server:
	@if [ -n "$$LLAMA_SERVER_BIN" ] || command -v llama-server >/dev/null; then :; \
	 else $(MAKE) --no-print-directory $(SERVER); fi
$(SERVER):
	tests/lab/fetch_llama_server.sh $(abspath $(LAB)/llama-server)

# For the dashboard and the alerts: one on PATH wins, otherwise Debian's own is unpacked into .lab.
prometheus:
	@if command -v prometheus >/dev/null && command -v promtool >/dev/null; then :; \
	 else $(MAKE) --no-print-directory $(PROMETHEUS); fi
$(PROMETHEUS):
	tests/lab/fetch_prometheus.sh $(abspath $(LAB)/prometheus)

# For the live page: one in CHROMIUM_BIN or on PATH wins, otherwise Debian's own is unpacked into .lab.
chromium:
	@if [ -n "$$CHROMIUM_BIN" ] || command -v chromium >/dev/null; then :; \
	 else $(MAKE) --no-print-directory $(CHROMIUM); fi
$(CHROMIUM):
	tests/lab/fetch_chromium.sh $(abspath $(LAB)/chromium)

models: $(MODELS)
$(MODELS): $(SETUP) $(wildcard tests/lab/*.py tests/lab/templates/*)
	rm -rf $(LAB)/models
	$(BIN)/python -m tests.lab.models $(LAB)/models --size tiny
	$(BIN)/python -m tests.lab.models $(LAB)/models --kind hybrid --size small
	@touch $@

demo: $(SETUP) llama-server models
	@$(BIN)/python -m tests.bench.demo

test: $(SETUP) llama-server models prometheus chromium
	$(BIN)/python -m pytest -n 2 --dist worksteal

live: $(SETUP) llama-server models prometheus chromium
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/live

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(SETUP)
	$(BIN)/mypy proxy tests

docs: $(SETUP)
	$(BIN)/python -m tests.documents

# The pictures of the live page in docs/, from a real browser.
screenshots: $(SETUP) llama-server models chromium
	$(BIN)/python -m tests.bench.page screenshots

# All of docs/benchmarks.md (an hour), or only traces: make bench TRACE=interleaved MODEL=hybrid.
# Also SIZE, SLOTS, VARIANT, TIMES=N for several runs, AGAIN=1, VERBOSE=1 for every request.
ONE := $(TRACE)$(MODEL)$(SIZE)$(SLOTS)$(VARIANT)
bench: $(SETUP) llama-server models
ifeq ($(ONE),)
	@status=0; $(BIN)/python -m tests.bench.main_job --document || status=$$?; \
	  $(BIN)/python -m tests.bench.traces --document $(AGAIN:%=--again) || status=$$?; exit $$status
else
	@$(BIN)/python -m tests.bench.traces $(TRACE:%=--trace %) $(MODEL:%=--model %) \
	  $(SIZE:%=--size %) $(SLOTS:%=--slots %) $(VARIANT:%=--variant %) $(TIMES:%=--times %) \
	  $(AGAIN:%=--again) $(VERBOSE:%=--verbose)
endif

clean:
	rm -rf $(VENV) $(LAB) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
