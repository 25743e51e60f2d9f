// Command pictures draws the pictures of the README, as SVG, from what this file and the first table of docs/figures.md say:
//
//	go run ./test/docs/pictures
//
// It runs in the module's root and writes docs/images. A test fails when they are not what it draws.
package main

import (
	"fmt"
	"log"
	"os"
	"path/filepath"
)

func main() {
	figures, err := os.ReadFile(filepath.Join("docs", "figures.md"))
	if err != nil {
		log.Fatal(err)
	}
	pictures, err := draw(string(figures))
	if err != nil {
		log.Fatal(err)
	}
	for name, svg := range pictures {
		if err := os.WriteFile(filepath.Join("docs", "images", name), []byte(svg), 0o644); err != nil {
			log.Fatal(err)
		}
	}
}

// draw makes all pictures, by file name.
func draw(figures string) (map[string]string, error) {
	points, err := table(figures)
	if err != nil {
		return nil, fmt.Errorf("the table of docs/figures.md: %w", err)
	}
	return map[string]string{"token.svg": token(), "all-to-all.svg": chart(points)}, nil
}
