// Command pictures draws the pictures of the pages, as SVG, from what this folder says and from what pages have: the first table of
// docs/figures.md, and what test/sim has printed.
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

// The pages that have numbers of pictures.
const (
	figuresPage = "docs/figures.md"
	hostsPage   = "docs/measured/2026-11-23-hosts-2-cores.md"
)

func main() {
	pages := map[string]string{}
	for _, name := range []string{figuresPage, hostsPage} {
		page, err := os.ReadFile(filepath.FromSlash(name))
		if err != nil {
			log.Fatal(err)
		}
		pages[name] = string(page)
	}
	pictures, err := draw(pages)
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
func draw(pages map[string]string) (map[string]string, error) {
	points, err := table(pages[figuresPage])
	if err != nil {
		return nil, fmt.Errorf("the table of %s: %w", figuresPage, err)
	}
	w, err := curves(pages[hostsPage])
	if err != nil {
		return nil, fmt.Errorf("the model of %s: %w", hostsPage, err)
	}
	return map[string]string{"token.svg": token(), "all-to-all.svg": chart(points), "worlds.svg": w.draw()}, nil
}
