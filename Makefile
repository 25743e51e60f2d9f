# The project's verbs. Every one works on a machine without a GPU and without a CUDA toolkit.
GO ?= go
PYTHON ?= python3
VENV := .venv

.PHONY: build test race bench kernels python lint fmt

build:
	$(GO) build ./...
	CGO_ENABLED=0 $(GO) build ./...

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
	$(VENV)/bin/pip install --quiet --disable-pip-version-check ./bindings/python
	cd bindings/python && ../../$(VENV)/bin/python -m pytest -q

$(VENV)/ready: bindings/python/requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r bindings/python/requirements-dev.txt
	touch $@

lint: $(VENV)/ready
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "gofmt: $$out"; exit 1; fi
	$(GO) vet ./...
	CGO_ENABLED=0 $(GO) vet ./...
	$(GO) tool staticcheck ./...
	cd bindings/python && ../../$(VENV)/bin/ruff check

fmt:
	gofmt -w .
