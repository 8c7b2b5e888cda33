# Everything a developer or a curious user does; `make demo` and `make test` set up what they need.
IS_NEW_ENOUGH := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
# The first of these that is new enough and has venv; `make PYTHON=...` takes another.
PYTHON ?= $(or $(shell for python in python3.11 python3 python3.14 python3.13 python3.12; do \
  $$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done),python3.11)
VENV := .venv
BIN := $(VENV)/bin
LAB := .lab
SETUP := $(VENV)/.set-up
EXTRAS := demo,dev,shared
ifeq ($(MAKECMDGOALS)$(wildcard $(SETUP)),demo)
# Nothing but the demo is wanted: that needs a small part.
SETUP := $(VENV)/.set-up-demo
EXTRAS := demo
endif
SERVER := $(LAB)/llama-server/llama-server
MODELS := $(LAB)/models/.made
CLIENTS := $(LAB)/clients/.installed
PROMETHEUS := $(LAB)/prometheus/promtool
PY_SPY := $(LAB)/py-spy/bin/py-spy
NGINX := $(LAB)/nginx/nginx
HAPROXY := $(LAB)/haproxy/haproxy
CEPH := $(LAB)/ceph/run
CHROMIUM := $(LAB)/chromium/chromium
DEBIAN := $(LAB)/debian.tar
DEBIAN_SID := $(LAB)/debian-sid.tar
ENGINE := $(LAB)/engine/root/usr/sbin/dockerd
# Where `make install` puts things; /etc and systemd's units only as root.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
NAME := llama-prefix-cache
INSTALLED := $(PREFIX)/lib/$(NAME)
UNITS := $(PREFIX)/lib/systemd/system

define NEED_PYTHON
$(PYTHON) -c '$(IS_NEW_ENOUGH)' 2>/dev/null || \
  { apt-get install -qq --no-install-recommends $(PYTHON) $(PYTHON)-venv && $(PYTHON) -c '$(IS_NEW_ENOUGH)'; } || \
  { echo "Python 3.11 or newer, with venv, is missing: apt-get install python3-venv"; exit 1; }
endef

.PHONY: all setup llama-server older-builds models prometheus nginx haproxy chromium demo test test-long test-shared test-clients live lint format type docs screenshots bench bench-overhead bench-index canary bench-load proof bench-shared flame clean

all: lint type test

setup: $(SETUP)
$(SETUP): pyproject.toml
	@$(NEED_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(LOCKED),)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
else
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r deploy/requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
endif
	@touch $@

# What the image and CI install, with the hashes of all files; pip's own settings say where from.
LOCK := $(LAB)/lock/bin/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-header --no-annotate \
  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links
lock:
	@$(NEED_PYTHON)
	test -x $(LAB)/lock/bin/pip-compile || $(PYTHON) -m venv $(LAB)/lock
	$(LAB)/lock/bin/python -m pip install --quiet --disable-pip-version-check 'pip-tools>=7.5'
	$(LOCK) --upgrade --extra shared --output-file deploy/requirements.lock pyproject.toml
	$(LOCK) --upgrade --extra demo --extra dev --extra shared --build-deps-for editable --constraint deploy/requirements.lock \
	  --output-file deploy/requirements-dev.lock pyproject.toml

# The tests that need no llama-server, with the lowest versions that pyproject.toml allows.
test-lowest:
	@$(NEED_PYTHON)
	$(PYTHON) -m venv --clear $(LAB)/lowest
	$(PYTHON) -c "import re, tomllib; needs = tomllib.load(open('pyproject.toml', 'rb'))['project']; needs = [*needs['dependencies'], *needs['optional-dependencies']['shared']]; \
	  print(*(re.sub('>=([0-9.]+).*', r'==\1', need) for need in needs), sep='\n')" >$(LAB)/lowest/lowest.txt
	$(LAB)/lowest/bin/python -m pip install --quiet --disable-pip-version-check -c $(LAB)/lowest/lowest.txt --editable '.[demo,dev,shared]'
	$(LAB)/lowest/bin/python -m pytest -n 2 --dist worksteal tests/unit tests/store

# A llama-server in LLAMA_SERVER_BIN or on PATH wins; otherwise Debian's own is unpacked into .lab.
llama-server:
	@if [ -n "$$LLAMA_SERVER_BIN" ] || command -v llama-server >/dev/null; then :; \
	 else $(MAKE) --no-print-directory $(SERVER); fi
$(SERVER):
	tests/lab/fetch_llama_server.sh $(abspath $(LAB)/llama-server)

# llama-servers of earlier months, from PyPI: their folders are named by the versions in tests/lab/older_server.py.
older-builds: $(SETUP)
	@$(BIN)/python -m tests.lab.older_server

# For the dashboard and the alerts: one on PATH wins, otherwise Debian's own is unpacked into .lab.
prometheus:
	@if command -v prometheus >/dev/null && command -v promtool >/dev/null; then :; \
	 else $(MAKE) --no-print-directory $(PROMETHEUS); fi
$(PROMETHEUS):
	tests/lab/fetch_prometheus.sh $(abspath $(LAB)/prometheus)

# To compare with: one on PATH wins, otherwise Debian's own is unpacked into .lab.
nginx:
	@if command -v nginx >/dev/null; then :; else $(MAKE) --no-print-directory $(NGINX); fi
$(NGINX):
	tests/lab/fetch_nginx.sh $(abspath $(LAB)/nginx)

# Before several hosts: one on PATH wins, otherwise Debian's own is unpacked into .lab.
haproxy:
	@if command -v haproxy >/dev/null; then :; else $(MAKE) --no-print-directory $(HAPROXY); fi
$(HAPROXY):
	tests/lab/fetch_haproxy.sh $(abspath $(LAB)/haproxy)
$(CEPH):
	tests/lab/fetch_ceph.sh $(abspath $(LAB)/ceph)

# For the live page: one in CHROMIUM_BIN or on PATH wins, otherwise Debian's own is unpacked into .lab.
chromium:
	@if [ -n "$$CHROMIUM_BIN" ] || command -v chromium >/dev/null; then :; \
	 else $(MAKE) --no-print-directory $(CHROMIUM); fi
$(CHROMIUM):
	tests/lab/fetch_chromium.sh $(abspath $(LAB)/chromium)

models: $(MODELS)
$(MODELS): $(SETUP) $(wildcard tests/lab/*.py tests/lab/templates/*)
	rm -f $(filter-out $(SMOLLM2),$(wildcard $(LAB)/models/*.gguf))
	$(BIN)/python -m tests.lab.models $(LAB)/models --size tiny least
	$(BIN)/python -m tests.lab.models $(LAB)/models --kind hybrid --size small
	@touch $@

# With a real small model and real words: `make demo MODEL=smollm2`.
SMOLLM2 := $(LAB)/models/smollm2-135m.gguf
# What the tests need.
TESTED := $(SETUP) llama-server older-builds models $(SMOLLM2) prometheus nginx haproxy chromium
$(SMOLLM2): tests/lab/fetch_smollm2.sh | $(MODELS)
	tests/lab/fetch_smollm2.sh $@ $(BIN)/python

ifeq ($(MODEL),smollm2)
demo: $(SETUP) llama-server $(SMOLLM2)
	@$(BIN)/python -m tests.bench.words
else
demo: $(SETUP) llama-server models
	@$(BIN)/python -m tests.bench.demo
endif

test: $(TESTED)
	$(BIN)/python -m pytest -n 6 --dist worksteal

# The same with many more generated examples for each property, and on all kinds of memory.
test-long: $(TESTED)
	$(BIN)/python -m pytest -n 6 --dist worksteal --hypothesis-profile=long -m ""

# Hosts that share a bucket, on more engines (Ceph with three OSDs on files, moto) and under every fault.
test-shared: $(SETUP) llama-server models nginx haproxy $(CEPH)
	$(BIN)/python -m pytest -m "" tests/shared tests/integration/test_buckets.py tests/live/test_balancers.py \
	  tests/live/test_shared_hosts.py tests/live/test_shared_store.py

# The real clients, pinned in tests/clients/package.json; npm is only needed to fetch them.
test-clients: $(SETUP) llama-server models $(CLIENTS)
	$(BIN)/python -m pytest tests/clients -s
$(CLIENTS): tests/clients/package.json
	@command -v npm >/dev/null || apt-get install -y --no-install-recommends npm || \
	  { echo "npm is missing: apt-get install npm"; exit 1; }
	@command -v git >/dev/null || apt-get install -y --no-install-recommends git || \
	  { echo "git is missing: apt-get install git"; exit 1; }
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	npm install --prefix $(@D) --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $@

live: $(TESTED)
	$(BIN)/python -m pytest -n 6 --dist worksteal tests/live

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(SETUP)
	$(BIN)/mypy proxy tests
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin proxy

docs: $(SETUP)
	$(BIN)/python -m tests.documents

# The pictures in docs/: the live page in a real browser, and the demo's terminal.
screenshots: $(SETUP) llama-server models chromium
	$(BIN)/python -m tests.bench.page screenshots
	$(BIN)/python -m tests.bench.demo --svg docs/demo.svg

# The tables of docs/benchmarks.md, and more that are only printed (an hour and a half), or only traces: make bench TRACE=interleaved MODEL=hybrid.
# Also SIZE, SLOTS, VARIANT, TIMES=N for several runs, AGAIN=1, VERBOSE=1 for every request.
ONE := $(TRACE)$(MODEL)$(SIZE)$(SLOTS)$(VARIANT)
bench: $(SETUP) llama-server models
ifeq ($(ONE),)
	@status=0; $(BIN)/python -m tests.bench.main_job --document || status=$$?; \
	  $(BIN)/python -m tests.bench.moves || status=$$?; \
	  $(BIN)/python -m tests.bench.traces --document $(AGAIN:%=--again) || status=$$?; exit $$status
else
	@$(BIN)/python -m tests.bench.traces $(TRACE:%=--trace %) $(MODEL:%=--model %) \
	  $(SIZE:%=--size %) $(SLOTS:%=--slots %) $(VARIANT:%=--variant %) $(TIMES:%=--times %) \
	  $(AGAIN:%=--again) $(VERBOSE:%=--verbose)
endif

# What the proxy adds to a request, against llama-server alone; PINNED=1 gives llama-server a core to itself.
bench-overhead: $(SETUP) llama-server models nginx
	@$(BIN)/python -m tests.bench.overhead --document $(PINNED:%=--pinned)

# Opening, lookups, evictions and memory of stores of 10,000, 100,000 and a million checkpoints (11 GB of disk).
bench-index: $(SETUP)
	@$(BIN)/python -m tests.bench.index

# What real builds of seven months learn, save and evaluate: the table in docs/proof.md (half an hour).
canary: $(SETUP) llama-server models
	@$(BIN)/python -m tests.bench.canary --document

# NVIDIA's aiperf on llama-server alone and through the proxy (40 minutes; QUICK=1 five), then what users would
# pick instead on the project's own traces (half an hour). The tools are other people's, from PyPI.
LOAD_TOOLS := $(LAB)/load-tools/.installed
bench-load: $(SETUP) llama-server models $(LOAD_TOOLS)
	@$(BIN)/python -m tests.bench.neutral_load $(QUICK:%=--quick)
	@test -n "$(QUICK)" || $(BIN)/python -m tests.bench.side_by_side
$(LOAD_TOOLS):
	@$(NEED_PYTHON)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check aiperf==0.13.0 hearth-llm==0.1.1 kvprof==0.2.0
	@touch $@

# Everything on docs/proof.md: at most three hours on two cores. TRACES=folder of Mooncake's traces, without which
# two sections stay as they are. QUICK=1: a small part, into a copy (2 minutes).
SIMULATOR := $(LAB)/kvcache-simulator/.installed
proof: $(SETUP) llama-server older-builds models $(LOAD_TOOLS) $(SIMULATOR)
	@$(BIN)/python -m tests.bench.proof $(TRACES:%=--traces %) $(QUICK:%=--quick)
$(SIMULATOR): $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(@D) kvcache-simulator==0.1.3
	@touch $@

# Hosts as network namespaces, with a bucket (half an hour; as root): make bench-shared PART=moves.
bench-shared: $(SETUP) llama-server models
	@$(BIN)/python -m tests.bench.shared $(PART)

# docs/where-time-goes.md: a flame graph of the proxy on hot requests, and its table.
flame: $(SETUP) llama-server models $(PY_SPY)
	@$(BIN)/python -m tests.bench.flame
$(PY_SPY): $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(LAB)/py-spy py-spy==0.4.3

# An environment of its own under PREFIX, the command, and as root systemd's units with their settings.
install:
	@$(NEED_PYTHON)
	$(PYTHON) -m venv --clear $(INSTALLED)
	$(INSTALLED)/bin/python -m pip install --quiet --disable-pip-version-check '.[shared]'
	mkdir -p $(PREFIX)/bin
	ln -sf $(INSTALLED)/bin/$(NAME) $(PREFIX)/bin/$(NAME)
	@if [ "$$(id -u)" = 0 ]; then $(MAKE) --no-print-directory install-units; fi
	@$(PREFIX)/bin/$(NAME) --version

# llama-server.service names the group render, for GPUs: systemd starts no unit with a group that does not exist.
install-units:
	install -d $(UNITS) $(SYSCONFDIR)/$(NAME)
	for unit in $(notdir $(wildcard deploy/systemd/*.service)); do \
	  sed 's,/usr/local/bin/$(NAME),$(PREFIX)/bin/$(NAME),; s,/etc/$(NAME),$(SYSCONFDIR)/$(NAME),' \
	    deploy/systemd/$$unit >$(UNITS)/$$unit || exit 1; done
	test -e $(SYSCONFDIR)/$(NAME)/config.yaml || \
	  install -m 644 deploy/config.example.yaml $(SYSCONFDIR)/$(NAME)/config.yaml
	test -e $(SYSCONFDIR)/$(NAME)/llama-server.env || \
	  install -m 600 deploy/systemd/llama-server.env $(SYSCONFDIR)/$(NAME)/llama-server.env
	getent group render >/dev/null || groupadd --system render
	if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi

# Settings and states stay.
uninstall:
	if [ -d /run/systemd/system ] && [ -e $(UNITS)/$(NAME).service ]; then \
	  systemctl disable --now $(notdir $(wildcard deploy/systemd/*.service)) || true; fi
	rm -rf $(INSTALLED) $(PREFIX)/bin/$(NAME)
	rm -f $(addprefix $(UNITS)/,$(notdir $(wildcard deploy/systemd/*.service)))

.PHONY: lock test-lowest test-newest audit test-image test-bare release-check install install-units uninstall

# A real Docker engine builds deploy/Dockerfile and runs the services of compose.yaml before a real llama-server.
# Root only. Nothing is installed, and nothing of it outlives the test.
test-image: $(SETUP) llama-server models $(DEBIAN) $(ENGINE)
	$(BIN)/python -m tests.deployment.run_image
$(ENGINE):
	tests/deployment/fetch_engine.sh $(LAB)/engine

# docs/quickstart.md on a bare Debian, timed, with a real OpenCode; then docs/systemd.md on one
# that systemd-nspawn boots.
test-bare: $(SETUP) llama-server models $(CLIENTS) $(DEBIAN)
	$(BIN)/python -m tests.deployment.run_bare
	$(BIN)/python -m tests.deployment.run_booted
$(DEBIAN):
	tests/deployment/fetch_debian_root.sh $@

# The tests on the newest Python that Debian has; TESTS=... for some of them.
test-newest: $(TESTED) $(DEBIAN_SID)
	$(BIN)/python -m tests.deployment.run_newest $(TESTS)
$(DEBIAN_SID):
	tests/deployment/fetch_debian_root.sh $@ sid

# Wheel, sdist and bill of materials, in dist/; their metadata and licences: what must hold before a release.
release-check: $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[release]'
	$(BIN)/python -m tests.release

# Known vulnerabilities of what the image installs; asks PyPI.
audit: $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[release]'
	$(BIN)/python -m pip_audit --require-hashes --disable-pip -r deploy/requirements.lock

clean:
	rm -rf $(VENV) $(LAB) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
