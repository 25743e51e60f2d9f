package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/loopback"
)

// workerEnv carries the config to a worker process.
const workerEnv = "SWITCHYARD_PERF_WORKER"

// runWorld runs the operation on all ranks and returns rank 0's rows.
func runWorld(ctx context.Context, c config) ([]row, error) {
	if c.Procs {
		return runProcs(ctx, c)
	}
	groups, err := comm.Local(c.Ranks)
	if err != nil {
		return nil, err
	}
	var rows []row
	eg, ctx := errgroup.WithContext(ctx)
	for _, g := range groups {
		eg.Go(func() error {
			defer g.Close()
			got, err := benches[c.Op](ctx, g, c)
			if g.Rank() == 0 {
				rows = got
			}
			if err != nil {
				g.Abort(err)
				return fmt.Errorf("rank %d: %w", g.Rank(), err)
			}
			return nil
		})
	}
	return rows, eg.Wait()
}

// runProcs starts one process a rank from this executable and reads rank 0's rows.
func runProcs(ctx context.Context, c config) ([]row, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	host := loopback.Host()
	spec, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	eg, ctx := errgroup.WithContext(ctx)
	var out bytes.Buffer
	for r := range c.Ranks {
		cmd := exec.CommandContext(ctx, self)
		cmd.Env = append(os.Environ(), workerEnv+"="+string(spec), "RANK="+strconv.Itoa(r), "WORLD_SIZE="+strconv.Itoa(c.Ranks),
			"LOCAL_RANK="+strconv.Itoa(r), "MASTER_ADDR="+host, "SWITCHYARD_PORT="+strconv.Itoa(loopback.Port))
		cmd.Stderr = os.Stderr
		if r == 0 {
			cmd.Stdout = &out
		}
		eg.Go(func() error {
			if err := cmd.Run(); err != nil {
				return fmt.Errorf("rank %d: %w", r, err)
			}
			return nil
		})
	}
	if err := eg.Wait(); err != nil {
		return nil, err
	}
	var rows []row
	dec := json.NewDecoder(&out)
	for dec.More() {
		var r row
		if err := dec.Decode(&r); err != nil {
			return nil, err
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// runWorker is main in a worker process. It reports whether this is one.
func runWorker(ctx context.Context) (bool, error) {
	spec := os.Getenv(workerEnv)
	if spec == "" {
		return false, nil
	}
	var c config
	if err := json.Unmarshal([]byte(spec), &c); err != nil {
		return true, err
	}
	conf, err := comm.FromEnv()
	if err != nil {
		return true, err
	}
	g, err := comm.Join(ctx, conf)
	if err != nil {
		return true, err
	}
	rows, err := benches[c.Op](ctx, g, c)
	if err != nil {
		g.Abort(err)
		return true, errors.Join(err, g.Close())
	}
	enc := json.NewEncoder(os.Stdout)
	for _, r := range rows {
		if err := enc.Encode(r); err != nil {
			return true, err
		}
	}
	return true, g.Close()
}

// runPeer runs a peer's benchmark and returns its microseconds by bytes a rank.
func runPeer(ctx context.Context, command string, c config) (map[int64]float64, error) {
	command = strings.NewReplacer("{ranks}", strconv.Itoa(c.Ranks), "{splits}", c.Splits).Replace(command)
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("peer %q: %w", command, err)
	}
	us := map[int64]float64{}
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 2 || strings.HasPrefix(f[0], "#") {
			continue
		}
		size, err1 := strconv.ParseInt(f[0], 10, 64)
		t, err2 := strconv.ParseFloat(f[1], 64)
		if err := errors.Join(err1, err2); err != nil {
			return nil, fmt.Errorf("peer %q printed %q: %w", command, lines.Text(), err)
		}
		us[size] = t
	}
	if len(us) == 0 {
		return nil, fmt.Errorf("peer %q printed no figures", command)
	}
	return us, nil
}
