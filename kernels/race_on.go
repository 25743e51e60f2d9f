//go:build race

package kernels

const raceDetector = true
