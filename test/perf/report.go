package main

import (
	"encoding/json"
	"fmt"
	"os"
)

// printer writes rows for people or for programs.
type printer struct {
	json bool
}

func (p printer) print(rows []row) {
	if p.json {
		enc := json.NewEncoder(os.Stdout)
		for _, r := range rows {
			_ = enc.Encode(r)
		}
		return
	}
	if len(rows) == 0 {
		return
	}
	if rows[0].Op == "tune" {
		printCurves(rows)
		return
	}
	first := rows[0]
	how := "goroutines"
	if first.Procs {
		how = "processes"
	}
	fmt.Printf("\n%s, %d ranks as %s, device %s", first.Op, first.Ranks, how, first.Device)
	fmt.Printf(", %s", first.Splits)
	if first.Peer != "" {
		fmt.Printf("\npeer: %s", first.Peer)
	}
	fmt.Printf("\n%12s  %-15s %12s %12s %12s %10s", "bytes/rank", "algorithm", "us", "p10", "p90", "GB/s link")
	if first.Peer != "" {
		fmt.Printf(" %12s %8s", "peer us", "times")
	}
	if first.CopyUS != nil {
		fmt.Printf(" %12s %8s", "copy us", "of copy")
	}
	fmt.Println()
	for _, r := range rows {
		fmt.Printf("%12s  %-15s %12.1f %12.1f %12.1f %10.2f", human(r.BytesPerRank), r.Algorithm, r.US, r.P10, r.P90, r.GBpsLink)
		if r.PeerUS != nil {
			fmt.Printf(" %12.1f %7.2fx", *r.PeerUS, *r.PeerUS/r.US)
		}
		if r.CopyUS != nil {
			fmt.Printf(" %12.1f %7.2fx", *r.CopyUS, r.US / *r.CopyUS)
		}
		if !r.Checked {
			fmt.Print("  NOT CHECKED")
		}
		fmt.Println()
	}
}
