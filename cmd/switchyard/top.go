package main

import (
	"crypto/rand"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/switchyard-moe/switchyard/observe"
)

// top shows running ranks, again and again: in the terminal, or on a page.
func top(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard top", flag.ContinueOnError)
	flags.SetOutput(stderr)
	at := flags.String("http", "", "serve a page at this `ADDRESS`, such as :8090 on the loopback")
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	if *at == "" {
		return status([]string{"-every", "1s"}, stdout, stderr)
	}
	host, port, err := net.SplitHostPort(*at)
	if err != nil {
		fmt.Fprintf(stderr, "switchyard top: %v\n", err)
		return 2
	}
	if host == "" {
		host = "localhost"
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		fmt.Fprintf(stderr, "switchyard top: %v\n", err)
		return 1
	}
	// Other users of this host reach the port too, and do not know the path.
	path := "/" + rand.Text() + "/"
	fmt.Fprintf(stdout, "http://%s%s\n", l.Addr(), path)
	server := http.Server{Handler: pageAt(path), ReadTimeout: pageWithin, WriteTimeout: pageWithin, IdleTimeout: pageWithin, MaxHeaderBytes: 4 << 10}
	fmt.Fprintf(stderr, "switchyard top: %v\n", server.Serve(l))
	return 1
}

// pageWithin bounds a request for the page, answer included: processes get 2 s to answer.
const pageWithin = 10 * time.Second

// pageAt is the page of all jobs of this user, at a path.
func pageAt(path string) http.Handler {
	mux := http.NewServeMux()
	mux.Handle(path, observe.Page(func(r *http.Request) (observe.State, error) {
		return observe.Everybody(r.Context(), 0)
	}))
	return mux
}
