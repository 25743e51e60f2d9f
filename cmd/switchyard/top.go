package main

import (
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/switchyard-moe/switchyard/device/nvml"
	"github.com/switchyard-moe/switchyard/observe"
)

// top shows running ranks, again and again: in the terminal, or on a page.
func top(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard top", flag.ContinueOnError)
	at := flags.String("http", "", "serve a page at this `ADDRESS`, such as :8090 on the loopback")
	asJSON := flags.Bool("json", false, "without -http, print an object for each table")
	times := flags.Int("n", 0, "without -http, show `N` tables, for ever if 0")
	job := flags.String("job", "", jobHelp)
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	if *at == "" {
		return status([]string{"-every", "1s", "-n", strconv.Itoa(*times), "-json=" + strconv.FormatBool(*asJSON), "-job", *job}, stdout, stderr)
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
	server := http.Server{Handler: pageAt(path, *job), ReadTimeout: pageWithin, WriteTimeout: pageWithin, IdleTimeout: pageWithin, MaxHeaderBytes: 4 << 10}
	fmt.Fprintf(stderr, "switchyard top: %v\n", server.Serve(l))
	return 1
}

// pageWithin bounds a request for the page, answer included: processes get 2 s to answer.
const pageWithin = 10 * time.Second

// pageAt is the page of the jobs of this user, or of those that job chooses, at a path.
func pageAt(path, job string) http.Handler {
	gpus := new(gpus)
	mux := http.NewServeMux()
	mux.Handle(path, observe.Page(func(r *http.Request) (observe.State, error) {
		s, err := observe.Everybody(r.Context(), 0)
		if err == nil {
			s, err = s.OfJob(job)
		}
		s.GPUs = gpus.now()
		return s, err
	}))
	return mux
}

// gpus are those of this host.
type gpus struct {
	asked time.Time
	last  []observe.GPU
	none  bool
}

// gpusEvery is the time between two questions to the driver, each of which takes some milliseconds a GPU.
const gpusEvery = 3 * time.Second

func (g *gpus) now() []observe.GPU {
	if g.none || time.Since(g.asked) < gpusEvery {
		return g.last
	}
	report, err := nvml.Report()
	if g.none = errors.Is(err, nvml.ErrUnavailable); err == nil { // else the driver may tell more the next time
		g.last = report.Observed()
	}
	g.asked = time.Now()
	return g.last
}
