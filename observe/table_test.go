package observe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// Tables fit a terminal, with long names, too.
func TestTablesFit80Columns(t *testing.T) {
	s := fourRanks(func(r *Rank) {
		r.Rank, r.Pid, r.Program = 1000+r.Rank, 4194304, strings.Repeat("w", longestName)
		r.Operations = []Operation{{Operation: "dispatch backward", Calls: 12345678}}
		r.Waiting = []Waiting{{Group: "world", Operation: "dispatch backward", Call: 1234567, For: 1003, Seconds: 0.0123}}
		r.Heaps = []Heap{{Device: "host", UsedBytes: 1 << 30, ReservedBytes: 2 << 30}}
	})
	s.Ranks = append(s.Ranks, Rank{Rank: 0, Job: "0123456789abcdef", Program: "other"})
	for _, r := range s.Ranks {
		s.Lost = append(s.Lost, Loss{Job: r.Job, Rank: r.Rank, For: 1003, Operation: "dispatch backward", Share: 0.5})
	}
	var b strings.Builder
	s.Table(&b)
	rows := 0
	for line := range strings.Lines(b.String()) {
		if strings.HasPrefix(line, "1") || strings.HasPrefix(line, "RANK") || strings.HasPrefix(line, "JOB") || strings.HasPrefix(line, "www") {
			require.LessOrEqual(t, utf8.RuneCountInString(line)-1, 80, line)
			rows++
		}
	}
	require.Greater(t, rows, 8)
	require.Contains(t, b.String(), "job other 01234567\n")
	require.Regexp(t, `(?m)^0 +0 +0 +- +-$`, b.String(), "a rank without a heap")
}

func TestProgramsHaveNames(t *testing.T) {
	for line, want := range map[string]string{
		"/work/bin/moe\x00-procs\x00": "moe", "python3\x00-u\x00train/moe.py\x00--lr\x001\x00": "moe.py", "/usr/bin/python3.12\x00-m\x00vllm.serve\x00": "vllm.serve",
		"python\x00": "python", "a\x1b[31mb c\x00": "a_[31mb_c", strings.Repeat("x", 40): strings.Repeat("x", longestName), "": ".",
	} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "cmdline"), []byte(line), 0o600))
		require.Equal(t, want, programOf(dir), line)
	}
	require.Empty(t, programOf(filepath.Join(t.TempDir(), "gone")))
}
