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
	if rows[0].MoE != nil {
		printMoE(rows)
		return
	}
	first := rows[0]
	how := "goroutines"
	if first.Procs {
		how = "processes"
	}
	fmt.Printf("\n%s, %d ranks as %s, device %s", first.Op, first.Ranks, how, first.Device)
	fmt.Printf(", %s", first.Splits)
	if first.Busy > 0 {
		fmt.Printf(", beside %d busy loops", first.Busy)
	}
	if first.Peer != "" {
		fmt.Printf("\npeer: %s", first.Peer)
	}
	fmt.Printf("\n%12s  %-15s %12s %12s %12s %12s %10s", "bytes/rank", "algorithm", "us", "mean", "p10", "p90", "GB/s link")
	if first.Peer != "" {
		fmt.Printf(" %12s %8s", "peer us", "times")
	}
	if first.CopyUS != nil {
		fmt.Printf(" %12s %8s", "copy us", "of copy")
	}
	fmt.Println()
	for _, r := range rows {
		fmt.Printf("%12s  %-15s %12.1f %12.1f %12.1f %12.1f %10.2f", human(r.BytesPerRank), r.Algorithm, r.US, r.Mean, r.P10, r.P90, r.GBpsLink)
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

// printMoE prints one case of dispatch on GPUs.
func printMoE(rows []row) {
	f := rows[0].MoE
	fmt.Printf("\n%d ranks, %s, %s, %d tokens, hidden %d, %s, %s\n", rows[0].Ranks, f.Types, f.Layout, f.Tokens, f.Hidden, f.Routing, f.MaxSMs)
	fmt.Printf("%-9s %-6s %10s %10s %10s %10s %8s %8s %9s %6s\n", "call", "mode", "us", "p10", "p90", "link MB", "GB/s", "DeepEP's", "floor us", "share")
	for _, r := range rows {
		f := r.MoE
		fmt.Printf("%-9s %-6s %10.1f %10.1f %10.1f %10.2f %8.1f %8.1f %9.1f %5.0f%%\n",
			f.Call, f.Mode, r.US, r.P10, r.P90, float64(f.LinkBytes)/1e6, r.GBpsLink, f.GBpsEP, f.FloorUS, 100*f.Share)
	}
}
