#!/usr/bin/env bash
# Runs DeepEP's own tests on 2 and 4 ranks: peer.sh CHECKOUT
set -euo pipefail
checkout=$(realpath "$1") python=${PYTHON:-python3}
[[ $python == /* || $python != */* ]] || python=$PWD/$python
cd "$(dirname "$0")"
export PYTHONPATH=../../tests
for ranks in 2 4; do
	for test in \
		"legacy/test_intranode.py --num-tokens 64 --hidden 256 --num-topk 4" \
		"legacy/test_low_latency.py --num-tokens 32 --hidden 1024 --num-topk 4" \
		"elastic/test_ep.py --num-tokens 64 --hidden 512 --num-topk 4 --skip-perf-test" \
		"elastic/test_ep.py --num-tokens 64 --hidden 512 --num-topk 4 --skip-perf-test --do-cpu-sync 0 --test-first-only" \
		"elastic/test_ep.py --num-tokens 64 --hidden 512 --num-topk 4 --skip-perf-test --allow-multiple-reduction 0"; do
		echo "== $ranks ranks: $test"
		# shellcheck disable=SC2086 # words
		set -- $test
		"$python" peer.py "$checkout" "$1" "$ranks" --num-experts 16 "${@:2}"
	done
done
