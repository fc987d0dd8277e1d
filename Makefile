# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
# many processes of the tests import the same modules
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-gpu-smoke test-gpu test-integrations test-integrations-all faults \
  sanitize lines lint type kernels wheel wheel-check site autotune bench bench-quick bench-report clean

CONSTRAINTS := --constraint constraints.txt --constraint constraints-integrations.txt
# what is never imported is not compiled to bytecode: half of the installation's time
INSTALL := $(BIN)/pip install --quiet --no-compile

# torch comes first and pinned, so that no other package chooses its build
.venv/demo: pyproject.toml constraints.txt constraints-integrations.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) $(CONSTRAINTS) torch
	$(INSTALL) $(CONSTRAINTS) --editable '.[demo]'
	touch $@

# what tests and linters need takes as long to install again, which the demo does not wait for;
# all cores compile here, once, what each process of the tests would compile again
.venv/ready: .venv/demo
	$(INSTALL) $(CONSTRAINTS) --editable '.[demo,test,dev]'
	$(BIN)/python -m compileall -q -j 0 -x py312 .venv/lib/*/site-packages/torch \
	  .venv/lib/*/site-packages/sympy .venv/lib/*/site-packages/triton
	touch $@

demo: .venv/demo
	$(BIN)/python -m examples.demo

# the default tier: minutes on two cores.  What needs a GPU is reported as skipped
test: .venv/ready
	$(BIN)/pytest --ignore=tests/integrations

# also what is slow: whole products, emulated kernels, machine code, subprocesses, most of the ranks
test-all: .venv/ready
	$(BIN)/pytest -m "" --ignore=tests/integrations

RESULTS := $(patsubst %,tests/ops/test_%.py,accuracy accumulate_into equal_rows log_probs loss \
  non_finite options soft_targets triton_kernels triton_rows triton_weight)
# on a GPU, which the processes share: what is not slow, and everything, results also without
# kernels in CuTe
test-gpu-smoke: .venv/ready
	$(BIN)/pytest --gpu --ignore=tests/integrations
test-gpu: .venv/ready
	$(BIN)/pytest --gpu -m "" --ignore=tests/integrations
	$(BIN)/pytest --gpu --without-kernels $(RESULTS)

# against the frameworks themselves, in the versions of the constraints: a case or two of each hook,
# and everything
test-integrations: .venv/integrations
	$(BIN)/pytest tests/integrations
test-integrations-all: .venv/integrations
	$(BIN)/pytest -m "" --dist=loadfile tests/integrations

# DeepSpeed without its C++ operators
.venv/integrations: .venv/ready tests/integrations/requirements.txt
	$(INSTALL) $(CONSTRAINTS) --editable '.[integrations]'
	DS_BUILD_OPS=0 $(INSTALL) --no-deps --requirement tests/integrations/requirements.txt
	touch $@

# puts past bugs back, one by one, and records which tier notices; ARGS=--resume continues
faults: .venv/ready
	$(BIN)/python -m tests.faults $(ARGS)

# compute-sanitizer over a step of every kind; TOOL=synccheck finds barriers that not all threads meet.
# TOOL=racecheck takes buffers of packed_store for raced, as it follows the arrival of one lane of a warp
# to that lane alone: with an arrival of each lane it finds nothing
TOOL := memcheck
sanitize: .venv/ready
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) --report-api-errors no \
	  --error-exitcode 1 $(BIN)/python -m tests.support.every_step

# the lines of the package by feature
lines: .venv/ready
	$(BIN)/python -m tests.lines

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check

type: .venv/ready
	$(BIN)/mypy

# each kind of kernel compiles clean in its default configuration; needs no GPU
kernels: .venv/ready
	$(BIN)/pytest -m "" tests/cute_kernels/test_compiled.py

# a wheel with every kernel that can be chosen, each compiled clean; it runs where the wheels of nvidia-cutlass-dsl do,
# whose libraries are what the kernels need of a system
PLATFORM := manylinux_2_28_$(shell uname -m)
wheel: .venv/ready
	rm -rf build dist && mkdir -p build/tree
	cp -a LICENSE README.md pyproject.toml autotune_cache cute_kernels cutefce integrations ops build/tree/
	CUTEFCE_CACHE_DIR=$(CURDIR)/build/tree/cute_kernels/prebuilt $(BIN)/python -m cutefce compile
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist \
	  --config-settings=--build-option=--plat-name=$(PLATFORM) build/tree
	$(call check-wheel,dist)

# the wheel of `pip install .`
wheel-check: .venv/ready
	rm -rf build
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build .
	$(call check-wheel,build)

# the tests against the wheel in a folder, where the checkout is not importable; then,
# whether its tuned tables prove its kernels: renew them before a release
define check-wheel
	$(INSTALL) --no-deps --target build/site $(1)/cutefce-*.whl
	ln -s $(CURDIR)/tests $(CURDIR)/bench build/site/
	cd build/site && PYTHONPATH=$(CURDIR)/build/site ../../$(BIN)/python -m pytest --rootdir=. \
	  -c ../../pyproject.toml -o pythonpath= tests/test_packaging.py tests/ops/test_loss.py
	cd build/site && PYTHONPATH=. ../../$(BIN)/python -m cutefce info | grep '^tuned table'
endef

# the documentation's site: build/documentation/index.html, without a warning of a link or a page
site: .venv/ready
	$(INSTALL) $(CONSTRAINTS) --editable '.[site]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# the shipped table of this machine's GPU; ARGS=--resume continues an interrupted run
autotune: .venv/ready
	$(BIN)/python -m cutefce tune --output-dir autotune_cache $(ARGS)

# all results, plots and the report of this machine's GPU; ARGS=--resume continues an interrupted run,
# ARGS="--resume --minutes 7" a part of it
bench: .venv/bench
	$(BIN)/python -m bench $(ARGS) all
	$(BIN)/python -m bench report

# the README's table and plot on this machine's GPU, in build/bench-quick/<gpu>/report.md
bench-quick: .venv/bench
	$(BIN)/python -m bench --output build/bench-quick $(ARGS) quick
	$(BIN)/python -m bench --output build/bench-quick report

# reports, plots, and the figures of the README and the docs, from the committed results
bench-report: .venv/ready
	$(BIN)/python -m bench report bench/results/nvidia_*
	$(BIN)/python -m bench figures

.venv/bench: .venv/ready
	$(INSTALL) $(CONSTRAINTS) --editable '.[bench]'
	touch $@

clean:
	rm -rf .venv build dist demo-output *.egg-info
