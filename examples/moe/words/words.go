// Package words says things to people.
package words

import (
	"fmt"
	"strings"
	"time"
)

// Count is like "1 rank" or "4 ranks".
func Count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// Fold breaks a text into lines of at most width columns, at spaces if it can.
func Fold(text string, width int) (lines []string) {
	width = max(width, 1)
	for _, line := range strings.Split(text, "\n") {
		rest := []rune(line)
		for len(rest) > width {
			at := width
			for i := width; i > width/2; i-- {
				if rest[i] == ' ' {
					at = i
					break
				}
			}
			lines = append(lines, string(rest[:at]))
			if rest = rest[at:]; rest[0] == ' ' {
				rest = rest[1:]
			}
		}
		lines = append(lines, string(rest))
	}
	return lines
}

// Bytes is a number of bytes, such as 1.5 GiB.
func Bytes(n float64) string {
	switch {
	case n >= 1<<40:
		return fmt.Sprintf("%.3g TiB", n/(1<<40))
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", n/(1<<30))
	default:
		return fmt.Sprintf("%.0f MiB", n/(1<<20))
	}
}

// Rounded is a time in two or three digits.
func Rounded(d time.Duration) string {
	switch {
	case d >= 100*time.Hour:
		return fmt.Sprintf("%.0f days", d.Hours()/24)
	case d >= 2*time.Hour:
		return fmt.Sprintf("%.0f h", d.Hours())
	case d >= 2*time.Minute:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d >= time.Second:
		return fmt.Sprintf("%.0f s", d.Seconds())
	}
	return fmt.Sprintf("%d ms", d.Milliseconds())
}

// Grouped writes an integer with its digits in groups of three.
func Grouped(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + " " + s[i:]
	}
	return s
}
