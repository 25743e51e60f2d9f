package flight

import (
	"os"
	"strings"
)

// counter is the processor's time stamp counter.
func counter() int64

// counts says whether the counter runs alike on all cores and never stops: the system keeps its own time by it then.
func counts() bool {
	source, err := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	return err == nil && strings.TrimSpace(string(source)) == "tsc"
}
