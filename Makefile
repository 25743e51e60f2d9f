# The project's verbs. Every one works on a machine without a GPU and without a CUDA toolkit.
GO ?= go
PYTHON ?= python3

.PHONY: build test race bench kernels lint fmt

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

# Rebuilds the committed fatbins from kernels/cuda/*.cu. Needs nvcc, or PyPI to fetch it from.
kernels:
	$(GO) run ./kernels/cuda/internal/genfatbin

lint:
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "gofmt: $$out"; exit 1; fi
	$(GO) vet ./...
	CGO_ENABLED=0 $(GO) vet ./...
	$(GO) tool staticcheck ./...

fmt:
	gofmt -w .
