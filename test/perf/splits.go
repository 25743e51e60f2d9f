package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

// fileSplits is the prefix of a -splits value that names a file.
const fileSplits = "file:"

// rowBytes is the least that a message of skewed splits differs from another by, as rows of tokens do.
const rowBytes = 128

// splitMatrix is what every rank sends to every rank when each sends about total bytes: in equal parts, to rank k a part
// proportional to 1/(k+1) in whole rows, or as a file has it.
func splitMatrix(kind string, n int, total int64) ([][]int64, error) {
	if path, ok := strings.CutPrefix(kind, fileSplits); ok {
		all, err := readSplits(path)
		if err != nil {
			return nil, err
		}
		m, ok := all[total]
		if !ok {
			return nil, fmt.Errorf("%s has no splits of %d bytes a rank", path, total)
		}
		if len(m) != n {
			return nil, fmt.Errorf("%s has splits of %d ranks, the world has %d", path, len(m), n)
		}
		return m, nil
	}
	m := make([][]int64, n)
	harmonic := 0.0
	for k := range n {
		harmonic += 1 / float64(k+1)
	}
	for r := range m {
		m[r] = make([]int64, n)
		for k := range m[r] {
			switch kind {
			case "uniform":
				m[r][k] = total / int64(n)
			case "zipf":
				m[r][k] = int64(float64(total)/harmonic/float64(k+1)) / rowBytes * rowBytes
			default:
				return nil, fmt.Errorf("-splits: %q is neither uniform nor zipf nor file:PATH", kind)
			}
		}
	}
	return m, nil
}

// readSplits reads a JSON object of square matrices of bytes, row r what rank r sends to every rank, by the bytes a rank
// sends on average.
func readSplits(path string) (map[int64][][]int64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var file map[string][][]int64
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	all := map[int64][][]int64{}
	for key, m := range file {
		total, err := strconv.ParseInt(key, 10, 64)
		if err != nil || total < 0 {
			return nil, fmt.Errorf("%s: %q is not a number of bytes", path, key)
		}
		for r, row := range m {
			if len(row) != len(m) {
				return nil, fmt.Errorf("%s: %s bytes: row %d has %d splits of %d", path, key, r, len(row), len(m))
			}
			if slices.Min(row) < 0 {
				return nil, fmt.Errorf("%s: %s bytes: row %d has a negative split", path, key, r)
			}
		}
		all[total] = m
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: no splits", path)
	}
	return all, nil
}

// fileSizes are the sizes in a file of splits, smallest first.
func fileSizes(path string) ([]int64, error) {
	all, err := readSplits(path)
	if err != nil {
		return nil, err
	}
	var sizes []int64
	for total := range all {
		sizes = append(sizes, total)
	}
	slices.Sort(sizes)
	return sizes, nil
}

func sum(v []int64) (s int64) {
	for _, x := range v {
		s += x
	}
	return s
}

func columnSum(m [][]int64, k int) (s int64) {
	for r := range m {
		s += m[r][k]
	}
	return s
}

// busiest is the bytes that cross the busiest port: that the rank which sends or receives most exchanges with others.
func busiest(m [][]int64) (most int64) {
	for r := range m {
		most = max(most, sum(m[r])-m[r][r], columnSum(m, r)-m[r][r])
	}
	return most
}

// before is what ranks below me send to rank p: where my part begins in its packed output.
func before(m [][]int64, p, me int) (at int64) { return columnSum(m[:me], p) }
