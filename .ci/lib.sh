# What .ci/run and .ci/full share. A step that fails does not stop those after it. At the end stand the slowest tests, those that were skipped
# with the reasons, those that failed once and passed alone (FLAKY), those that failed with their last lines, and the steps that failed.
# shellcheck shell=bash
set -euo pipefail

# Processes of a run have its mark, a variable in their environment: the number and the start of the run's own process. That begins anew with
# it, since the system shows the environment that a process began with, and a shell's children begin with the shell's.
mark=${SWITCHYARD_CI_MARK:-SWITCHYARD_CI_RUN}
export mark
begun() { cut -d ' ' -f 22 "/proc/$1/stat" 2>/dev/null || true; }
[ "${!mark:-}" = "$$.$(begun $$)" ] || exec env "$mark=$$.$(begun $$)" bash "$0" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -n "${HOME:-}" ] || HOME=$(mktemp -d)
export HOME CI=true
unset PYTHONDONTWRITEBYTECODE # with it each process that imports torch compiles its modules anew: 3.4 s of a core instead of 1.6 s
exec </dev/null
results=$(mktemp -d)
: >"$results/failed"
export results

# Builds in another folder find what this machine has compiled before.
export GOFLAGS="-trimpath${GOFLAGS:+ $GOFLAGS}"

marked() { grep -lszE "^$mark=$1\$" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3 || true; }

# left prints the processes of runs that are over.
left() {
	local pid owner
	for pid in $(marked '[0-9]+\.[0-9]+'); do
		owner=$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n "s/^$mark=//p") || true
		[ -z "$owner" ] || [ "$(begun "${owner%.*}")" = "${owner#*.}" ] || ps -o pid=,args= -p "$pid" || true
	done
}

# They are given some seconds, since the guard of a run that was killed ends them.
for _ in {1..20}; do
	[ -n "$(left)" ] || break
	sleep 0.5
done
if [ -n "$(left)" ]; then
	echo "processes of an earlier run live, and would take part in this one:"
	left
	exit 1
fi

# over kills what still runs, but for the calling process, until it has found nothing twice: a process that becomes another program has no
# environment for a moment.
over() {
	local pid none=0
	while [ "$none" -lt 2 ]; do
		none=$((none + 1))
		for pid in $(marked "${!mark}"); do
			if [ "$pid" != "$$" ] && [ "$pid" != "$BASHPID" ] && kill -KILL "$pid" 2>/dev/null; then none=0; fi
		done
		sleep 0.05
	done
}

# The guard outlives a run that is killed, and ends what that has started.
export -f begun marked over
setsid bash -c 'while [ "$1.$(begun "$1")" = "${!mark}" ]; do sleep 1; done; over; rm -rf "$results"' guard $$ >/dev/null 2>&1 &
disown

finish() {
	local code=$?
	trap - EXIT
	set +e
	over
	python3 .ci/summary.py "$results" || code=1
	[ ! -s "$results/failed" ] || code=1
	[ "$code" != 0 ] || echo "== done (after $SECONDS s)"
	rm -rf "$results"
	exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# step runs a script, in the background, since a shell heeds no signal while it waits for a program in the foreground. Interrupts act in the
# script as they do in the foreground.
step() {
	local code=0 begin=$SECONDS
	printf '== %s (after %d s)\n' "$1" "$SECONDS"
	env --default-signal=INT,QUIT bash -euxo pipefail -c "$2" &
	wait $! || code=$?
	[ "$code" = 0 ] || {
		printf '== FAILED with %d after %d s: %s\n' "$code" $((SECONDS - begin)) "$1"
		echo "$1" >>"$results/failed"
	}
	return "$code"
}

# beside runs a function at the same time as what follows. joined waits for it, and prints what it has printed.
beside() {
	"$1" >"$results/$1.log" 2>&1 &
	eval "$1=\$!"
}
joined() {
	wait "${!1}" || true
	cat "$results/$1.log"
}

# gotest NAME PACKAGES FLAGS... tests packages. At most 2 tests that fail run once more, alone; a panic, a data race or a build that fails does not.
gotest() {
	local name=$1 packages=$2
	shift 2
	go tool gotestsum --format standard-quiet --hide-summary skipped --junitfile "$results/$name.xml" --rerun-fails=1 \
		--rerun-fails-max-failures=2 --rerun-fails-run-root-test --rerun-fails-abort-on-data-race \
		--packages "$packages" -- -vet=off "$@"
}

# pytests NAME MAKE... has make run tests in Python, with the same rule.
pytests() {
	local name=$1
	shift
	PYTEST_ADDOPTS="--reruns 1 --max-suite-reruns 2 --rerun-show-tracebacks -raR --junitxml=$results/$name.xml" "$@" | tee "$results/$name.out"
	sed -n 's/^RERUN //p' "$results/$name.out" >"$results/$name.again"
}
export -f gotest pytests

# has installs a program or a library of Debian's, and tells the tests that the machine has it: they are not skipped then.
there() { command -v "$1" >/dev/null || grep -q "^[[:space:]]$1\.so" <<<"$(ldconfig -p)"; }
has() {
	if ! there "$1" && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
		$updated || apt-get update -q >/dev/null || true
		updated=true
		apt-get install -qy --no-install-recommends "$2" >/dev/null || true
	fi
	if there "$1"; then
		SWITCHYARD_CI_HAS=${SWITCHYARD_CI_HAS:+$SWITCHYARD_CI_HAS,}$3
	else
		echo "$2 is not to be had: tests that need it are skipped"
	fi
}
updated=false
export SWITCHYARD_CI_HAS=${SWITCHYARD_CI_HAS:-}
