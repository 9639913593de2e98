# The entry point. Each target works as the first command on a machine that has only Python: it sets
# up what is missing. The logic is in tools/setup_dev.sh and tests/run.py.
#
# ARGS is passed to the program of a target: make demo ARGS="--json demo.json"
# With DEVICE=emu, bench-step measures the step on an emulated accelerator.

VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
RUN := $(PY) tests/run.py
ARGS ?=
DEVICE ?=

.DEFAULT_GOAL := help
.PHONY: help demo test tier1 test-sanitized fuzz-corpora tsan test-slow test-long test-thread test-frameworks test-isa lag lint \
	lint-quick analyze fmt bench bench-adam bench-rng bench-io bench-step bench-hooks bench-peers \
	bench-policies bench-lora bench-reference bench-loss bench-accumulate bench-states bench-learning bench-unpack \
	bench-diffusion bench-load bench-rules bench-compression bench-clip sweep sanitize neon neon-fast mutants fuzz sim-long sim-wrong campaign kills powercuts interrupts \
	troubles paper parity docs wheel wheel-aarch64 wheel-test dist try-install matrix newest coverage build clean what-fits

help:
	@echo 'make demo      fine-tune a small model with and without lohan, and compare'
	@echo 'make test      the quick tests in C and Python: about 10 minutes on two cores'
	@echo 'make tier1     what every change must pass: lint-quick, test, test-sanitized (the C tests under'
	@echo '               ASan, 200 seeds of the simulator) and fuzz-corpora; 25 minutes on two cores'
	@echo 'make tsan      the C tests that use threads, under ThreadSanitizer'
	@echo 'make test-slow more Python tests: those that take more than 2.5 seconds each;'
	@echo '               test-long: those that take many minutes, or 40 GB of disk'
	@echo 'make lag       training on a fake GPU that computes late, bit for bit; in quick form in test-slow'
	@echo 'make test-frameworks  axolotl, ms-swift and LLaMA-Factory with lohan, each in its own environment'
	@echo 'make test-thread  the quick Python tests with every backward on a thread of its own'
	@echo 'make test-isa  the numeric tests limited to SSE, AVX2 and AVX-512, with 1 and 2 threads: an hour;'
	@echo '               ARGS="--isa avx2 --threads 2 --part py": one of these'
	@echo 'make lint      formatting, linters, types, spelling (lint-quick), and clang-tidy (analyze)'
	@echo 'make fmt       format C and Python'
	@echo 'make sanitize  all C and Python tests under the sanitizers'
	@echo 'make neon      the C tests compiled for aarch64, under qemu-user: some minutes;'
	@echo '               neon-fast: only arithmetic and checksums, seconds'
	@echo 'make mutants   one-line changes that a test must detect: half an hour;'
	@echo '               ARGS="--seed 1 --random 50" also tries random ones'
	@echo 'make fuzz      every parser on its corpus and ten seconds of mutations; ARGS="--minutes 10"'
	@echo 'make sim-long  the simulator with 1,000 seeds, faults and power loss: some minutes'
	@echo 'make sim-wrong the simulator against stores with a wrong protocol: it must detect each'
	@echo 'make campaign  many seeds of the simulator, with a table of results; resumes where it was'
	@echo '               stopped: ARGS="--seeds 0:200000 --jobs 2"'
	@echo 'make kills     10,000 kills of engine, store and sessions; also powercuts (500 cuts), interrupts'
	@echo '               (1,000 times Ctrl-C) and troubles (full disk, EIO, SIGSTOP, out of memory)'
	@echo 'make bench     all benchmarks; also bench-adam, -rng, -io, -step, -hooks, -peers, -policies, -lora, -loss,'
	@echo '               -accumulate, -states, -learning, -unpack, -diffusion, -load, -rules, -compression'
	@echo 'make sweep     every class of transformers and diffusers, read, trained and written like the'
	@echo '               library does: an hour; writes docs/supported-models.md'
	@echo 'make paper     docs/paper-results.md: the papers compared with the simulator, some minutes'
	@echo 'make what-fits docs/what-fits.md: large models on small machines, in virtual time; some minutes'
	@echo 'make parity    docs/parity.md: lohan compared with torch in all settings, some minutes'
	@echo 'make docs      the pages of docs/ as a site, in build/site'
	@echo 'make wheel     one wheel for every Python, in dist/; wheel-aarch64: the same for aarch64;'
	@echo '               wheel-test: the wheel, tested with several Pythons and torches without a compiler'
	@echo 'make dist      all that is uploaded to PyPI, in dist/, checked by twine'
	@echo 'make try-install  the wheel in fresh Debian 12 and 13, from nothing to the first step; needs root;'
	@echo '               ARGS=--cuda-stubs: without the download of CUDA; ARGS="--machine aarch64": emulated'
	@echo 'make matrix    a quick selection of tests with each Python and several versions of torch'
	@echo 'make newest    a short selection with the newest version of every library; it only reports'
	@echo 'make coverage  the share of lines that the C tests and the quick Python tests run, per folder'
	@echo 'make build     the extension, in place'
	@echo 'make clean     remove what was built (keeps .venv)'

$(VENV)/.ready: requirements-dev.txt tools/setup_dev.sh
	tools/setup_dev.sh $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

build: $(VENV)/.installed
	@$(PY) setup.py --quiet build_ext --inplace

demo: build
	$(PY) -m lohan demo $(ARGS)

test: build
	$(RUN) tidy c py --fast -- $(ARGS)

# These, lint-quick and test are the first tier of .ci/run, which every change must pass.
tier1: lint-quick test test-sanitized fuzz-corpora

test-sanitized: $(VENV)/.ready
	$(RUN) asan sim --fast

fuzz-corpora: $(VENV)/.ready
	$(RUN) fuzz -- --corpora

tsan: $(VENV)/.ready
	$(RUN) tsan --fast

# The late device comes first: it takes minutes, and the slow tests may use all the time there is.
test-slow test-long: build
	$(if $(findstring slow,$@),$(RUN) lag --fast)
	$(RUN) py --marked $(@:test-%=%) -- $(ARGS)

test-thread: build
	LOHAN_TEST_BACKWARD=thread $(RUN) py --fast -- $(ARGS)

test-isa: build
	$(PY) tests/isa.py $(ARGS)

# axolotl, ms-swift and LLaMA-Factory pin their own versions of transformers: 2 GB in build/frameworks.
FRAMEWORKS ?= axolotl swift llamafactory
test-frameworks: build
	@failed=; for name in $(FRAMEWORKS); do \
		tools/setup_framework.sh $$name build/frameworks/$$name \
			&& build/frameworks/$$name/bin/python -m pytest -n0 -m "slow or not slow" \
				tests/py/test_frameworks.py $(ARGS) || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

lag: build
	$(RUN) lag -- $(ARGS)

lint: $(VENV)/.ready
	$(RUN) lint analyze

lint-quick: $(VENV)/.ready
	$(RUN) lint

analyze: $(VENV)/.ready
	$(RUN) analyze

fmt: $(VENV)/.ready
	$(RUN) fmt

bench: build
	$(RUN) bench -- $(ARGS)

bench-adam bench-rng bench-io bench-step bench-hooks bench-peers bench-policies bench-lora bench-zo bench-world bench-kept bench-loss bench-accumulate bench-states bench-learning bench-unpack bench-reference bench-diffusion bench-load bench-rules bench-compression bench-clip: build
	$(RUN) bench --only $(@:bench-%=%) -- $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

# It resumes from build/sweep.jsonl; ARGS="--only LlamaForCausalLM --again": one class.
sweep: build
	$(PY) tests/sweep/sweep.py $(ARGS)
	$(if $(ARGS),,$(PY) tests/sweep/record.py build/sweep.jsonl)

sanitize: $(VENV)/.installed
	$(RUN) asan tsan sim asan-py -- $(ARGS)

neon neon-fast: $(VENV)/.ready
	-tools/setup_cross.sh
	$(RUN) neon $(if $(findstring fast,$@),--fast)

mutants: build
	$(RUN) mutants -- $(ARGS)

fuzz: build
	-tools/setup_fuzz.sh
	$(RUN) fuzz -- $(ARGS)

sim-long: $(VENV)/.ready
	$(RUN) sim --seeds 1000

sim-wrong: $(VENV)/.ready
	$(PY) tests/sim/wrong_protocols.py $(ARGS)

campaign: $(VENV)/.ready
	$(PY) tests/sim/campaign.py $(ARGS)

kills powercuts interrupts troubles: build
	$(PY) tests/campaign/$@.py $(ARGS)

paper: build
	$(PY) benchmarks/paper_results.py $(ARGS)

what-fits: build
	$(PY) benchmarks/what_fits.py $(ARGS)

parity: build
	$(PY) benchmarks/parity.py $(ARGS)

docs: $(VENV)/.ready
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet && echo build/site/index.html

# These need only Python 3.11 or newer and a C compiler, not the development environment.
wheel:
	$(PYTHON) tools/make_wheel.py $(ARGS)

wheel-aarch64:
	tools/setup_cross.sh
	$(PYTHON) tools/make_wheel.py --machine aarch64 $(ARGS)

wheel-test:
	$(PYTHON) tools/make_wheel.py --test $(ARGS)

dist:
	tools/setup_cross.sh
	$(PYTHON) tools/make_wheel.py --dist $(ARGS)

try-install:
	$(PYTHON) tools/try_install.py $(ARGS)

newest:
	$(PYTHON) tools/newest.py $(ARGS)

matrix: $(VENV)/.ready
	$(PY) tools/matrix.py $(ARGS)

coverage: build
	$(PY) tools/line_coverage.py $(ARGS)

clean:
	rm -rf build dist python/*.egg-info python/lohan/*.so python/lohan/lohan.fatbin
	rm -f $(VENV)/.installed
