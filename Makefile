# The project's verbs. Every one works on a machine without a GPU and without a CUDA toolkit.
GO ?= go
PYTHON ?= python3
VENV := .venv

# The oldest torch that the Python package supports. The newest is what the index has.
OLDEST_TORCH := 2.8.0

# CUDA C++, C++ and C. What is generated is in .clang-format-ignore.
C_SOURCES = $(shell git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' '*.c')

.PHONY: build test race bench kernels python python-torch python-company deep-ep deep-ep-tests package release release-twice docs lint fmt

build:
	$(GO) build ./...
	CGO_ENABLED=0 $(GO) build ./...

# Some minutes; with -short less than two.
test:
	$(GO) test ./...

race:
	$(GO) test -race ./...

bench:
	$(GO) run ./test/perf alltoallv
	$(GO) run ./test/perf allreduce
	$(GO) run ./test/perf dispatch

# Rebuilds what is generated and committed: the layouts that kernels and Go share, and the fatbins. Needs nvcc, or PyPI to fetch it from.
kernels:
	$(GO) run ./kernels/cuda/internal/genlayout
	$(GO) run ./kernels/cuda/internal/genfatbin

# Builds and installs the Python package into .venv and runs its tests. Those that need torch are skipped without it.
python: $(VENV)/ready
	CC=$$(command -v cc || true) $(VENV)/bin/pip install --quiet --disable-pip-version-check ./bindings/python
	cd bindings/python && ../../$(VENV)/bin/python -m pytest -q

# The package's tests with the oldest torch that it supports and then with the newest, which stays in .venv-torch. Some 6 GB to fetch; one torch
# at a time is on the disk, and 10 GB are enough.
python-torch: $(VENV)/ready
	for torch in torch==$(OLDEST_TORCH) torch; do \
		rm -rf $(VENV)-torch && $(PYTHON) -m venv $(VENV)-torch && \
		$(VENV)-torch/bin/pip install --quiet --disable-pip-version-check --no-cache-dir $$torch -r bindings/python/requirements-dev.txt && \
		CC=$$(command -v cc || true) $(VENV)-torch/bin/pip install --quiet --disable-pip-version-check ./bindings/python && \
		$(VENV)-torch/bin/python -c 'import torch; print("torch", torch.__version__)' && \
		(cd bindings/python && ../../$(VENV)-torch/bin/python -m pytest -q) || exit 1; \
	done

# The package next to FlashInfer, NCCL EP, xformers, numba and cupy, imported before it and after it, as far as they have packages and can be
# imported here. Some 8 GB to fetch.
python-company:
	rm -rf $(VENV)-company && $(PYTHON) -m venv $(VENV)-company
	$(VENV)-company/bin/pip install --quiet --disable-pip-version-check --no-cache-dir torch numpy
	CC=$$(command -v cc || true) $(VENV)-company/bin/pip install --quiet --disable-pip-version-check ./bindings/python
	$(VENV)-company/bin/python bindings/python/company.py

# The package deep_ep and its tests, with the torch that is in .venv-torch.
deep-ep:
	CC=$$(command -v cc || true) $(VENV)-torch/bin/pip install --quiet --disable-pip-version-check ./bindings/python
	$(VENV)-torch/bin/pip install --quiet --disable-pip-version-check --no-deps ./bindings/python/deep_ep
	$(VENV)-torch/bin/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r bindings/python/deep_ep/tests/requirements.txt
	cd bindings/python/deep_ep && ../../../$(VENV)-torch/bin/python -m pytest -q

# DeepEP's own tests, unmodified, on the CPU: DEEPEP names a checkout of DeepEP 2.1. After make deep-ep.
deep-ep-tests:
	cd bindings/python/deep_ep && PYTHON=../../../$(VENV)-torch/bin/python ./tests/peer.sh "$(DEEPEP)"

# Builds the sdist and the wheel into bindings/python/dist, checks them and installs each into a clean environment.
package: $(VENV)/ready
	$(VENV)/bin/python bindings/python/check_package.py bindings/python/dist

# The files of a release, from the commit that the version's tag names, into dist.
release: $(VENV)/release
	$(VENV)/bin/python bindings/python/release.py dist

# The files of a release from HEAD, built twice in different folders, which must be the same to the byte.
release-twice: $(VENV)/release
	$(VENV)/bin/python bindings/python/release.py dist --trial --twice

$(VENV)/release: $(VENV)/ready bindings/python/requirements-release.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r bindings/python/requirements-release.txt
	touch $@

$(VENV)/ready: bindings/python/requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r bindings/python/requirements-dev.txt
	touch $@

# Writes into the pages what is made: code, pictures, the environment variables.
docs:
	$(GO) run ./cmd/switchyard env -markdown >docs/environment.md
	$(GO) run ./test/docs/pictures
	$(GO) test ./test/docs -run "Code|Promises|Floors|Launchers|Troubleshooting" -update

lint: $(VENV)/ready
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "gofmt: $$out"; exit 1; fi
	$(GO) vet ./...
	CGO_ENABLED=0 $(GO) vet ./...
	$(GO) tool staticcheck ./...
	cd bindings/python && ../../$(VENV)/bin/ruff check && ../../$(VENV)/bin/mypy
	cd bindings/python/deep_ep && ../../../$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(C_SOURCES)

fmt: $(VENV)/ready
	gofmt -w .
	$(VENV)/bin/clang-format -i $(C_SOURCES)
