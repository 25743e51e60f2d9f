//go:build race

package allreduce

// RaceDetector reports whether the tests run under the race detector.
const RaceDetector = true
