//go:build amd64 && !purego

package vec

// at runs f with no more than the given instructions. Tests that use it do not run in parallel.
func at(lv level, f func()) {
	defer func(was level) { cpu = was }(cpu)
	cpu = min(cpu, lv)
	f()
}
