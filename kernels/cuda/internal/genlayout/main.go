// Genlayout writes the files that say to C what the CUDA kernels share with Go.
//
//	go run ./kernels/cuda/internal/genlayout [-root .]
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/layout"
)

func main() {
	root := flag.String("root", ".", "the module's root")
	flag.Parse()
	if err := run(*root); err != nil {
		fmt.Fprintln(os.Stderr, "genlayout:", err)
		os.Exit(1)
	}
}

func run(root string) error {
	l, err := layout.Read(root)
	if err != nil {
		return err
	}
	files, err := l.Files()
	if err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}
